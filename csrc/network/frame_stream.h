// Messages over one TCP connection: each is a header and its bytes, sent from where they are and received to where they
// belong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "network/byte_stream.h"

namespace ringtrain {

struct FrameHeader {
  uint32_t tag, number;
  uint64_t bytes;
};

// A message that goes out. Its data is that of the sender, or its own.
struct OutgoingFrame {
  FrameHeader header;
  const char* data;
  size_t moved = 0;  // with the header
  std::unique_ptr<char[]> own;
  bool is_kept = false;       // keep_data() has been called
  bool is_confirmed = false;  // the other side has said that it has all of it

  size_t left() const { return sizeof(FrameHeader) + header.bytes - moved; }
  // The memory of the sender is no longer needed. Where there is none for a copy, what is left has no data, and the
  // connection ends before it.
  void keep_data() noexcept;
  // Nothing of it counts as sent any more.
  void begin_again() { moved = 0; }
};

// A message that comes in. Its place is that of the receiver, or its own; null: nobody wants it.
struct IncomingFrame {
  FrameHeader header;
  char* place;
  size_t came = 0;
  std::unique_ptr<char[]> own;
  bool is_complete = false;
};

class FrameStream {
 public:
  // The receiver of the messages.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    // A message begins: where it goes. Null where it is none.
    virtual std::shared_ptr<IncomingFrame> place(const FrameHeader& header) = 0;
    virtual void complete(IncomingFrame& frame) = 0;
  };

  // `bytes` is connected and does not block.
  explicit FrameStream(ByteStream bytes) : bytes_(std::move(bytes)), buffer_(kBufferBytes) {}

  int socket() const { return bytes_.socket(); }
  void send(std::shared_ptr<OutgoingFrame> frame) {
    queued_bytes_ += frame->left();
    outgoing_.push_back(std::move(frame));
  }
  size_t queued_bytes() const { return queued_bytes_; }
  // The message that has begun to come, or null.
  const std::shared_ptr<IncomingFrame>& incoming() const { return incoming_; }
  // The rest of it is nothing that anybody wants: its memory is somebody else's from now on.
  void discard_incoming();
  // See ByteStream.
  uint64_t sent_bytes() const { return bytes_.sent_bytes(); }
  uint64_t received_bytes() const { return bytes_.received_bytes(); }

  // As much as the socket takes, and all that has come. False when the connection is over.
  bool write();
  bool read(Receiver& receiver);
  // After a write that has failed: takes what came before the connection ended, such as a bye.
  void read_rest(Receiver& receiver);
  // Why it is over, as errno: what the first call said that failed; 0: the other side has ended it.
  int error() const { return error_; }

 private:
  static constexpr size_t kBufferBytes = 4 << 10;  // large ones are not copied twice

  bool goes_on(ssize_t moved);
  bool take_buffered(Receiver& receiver);
  bool begin_frame(Receiver& receiver);
  void end_frame_if_complete(Receiver& receiver);

  ByteStream bytes_;
  std::deque<std::shared_ptr<OutgoingFrame>> outgoing_;
  size_t queued_bytes_ = 0;
  std::shared_ptr<IncomingFrame> incoming_;  // that is under way
  Bytes buffer_;                             // for headers, and what is too short for a call of its own
  size_t begin_ = 0, end_ = 0;               // of what has not been looked at
  int error_ = 0;
};

}  // namespace ringtrain
