// Messages of key-value stores over one TCP connection, on the thread of its Poller.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/bytes.h"
#include "kvstore/wire/message.h"
#include "network/byte_stream.h"
#include "network/frame_stream.h"
#include "network/poller.h"

namespace ringtrain {

// Shared by the connections of a server, or of a client: their traffic. Any thread.
struct Traffic {
  std::string name;  // who says what it writes
  int verbose = 0;   // 2: every message is a line
  std::atomic<uint64_t> sent_bytes{0}, sent_messages{0}, received_bytes{0}, received_messages{0};
};

class Connection final : public Watched, FrameStream::Receiver {
 public:
  // Of the frames of a message. The last digit: the version of Head.
  static constexpr uint32_t kHeadTag = 0x4b560005, kBodyTag = 0x4b560006;

  class Owner {
   public:
    virtual ~Owner() = default;
    // A message with a body begins: where the body goes. Null: nobody wants it.
    virtual char* place(uint32_t id, const Head& head) = 0;
    // All of it has arrived. An exception ends the connection.
    virtual void take(uint32_t id, const Head& head) = 0;
    // Little is left of what was sent.
    virtual void has_room() = 0;
    // Nothing follows. `error`: errno; 0: the other side has ended it.
    virtual void has_ended(int error) = 0;
  };

  // All outlive this.
  Connection(Poller& poller, Owner& owner, Traffic& traffic, ByteStream bytes);
  ~Connection() override;

  // The body stays where it is until the message has left; `keeper`, which may be null, is kept so long.
  void send(uint32_t id, const Head& head, const char* body = nullptr, std::shared_ptr<const void> keeper = nullptr);
  void send(uint32_t id, const Head& head, Bytes body);
  // Sends as much as the socket takes. To be called before its thread sleeps.
  void flush();
  size_t queued_bytes() const { return stream_.queued_bytes(); }
  uint64_t sent_bytes() const { return stream_.sent_bytes(); }
  uint64_t received_bytes() const { return stream_.received_bytes(); }
  bool has_ended() const { return has_ended_; }

 private:
  struct Message;

  void is_ready(uint32_t events) override;
  void advance(uint32_t events);
  std::shared_ptr<IncomingFrame> place(const FrameHeader& header) override;
  std::shared_ptr<IncomingFrame> place_head(const FrameHeader& header);
  std::shared_ptr<IncomingFrame> place_body(const FrameHeader& header);
  void complete(IncomingFrame& frame) override;
  void begin_message();
  void note_what_is_left();
  void end(int error);
  void say(const char* what, uint32_t id, const Head& head) const;

  Poller& poller_;
  Owner& owner_;
  Traffic& traffic_;
  FrameStream stream_;
  const std::shared_ptr<IncomingFrame> head_frame_, body_frame_;
  Head head_;  // of the message that comes
  bool waits_for_body_ = false, is_broken_ = false, has_ended_ = false, was_full_ = false;
  bool waits_for_room_ = false;  // the Poller says when the socket has some
};

}  // namespace ringtrain
