// Takes the place of csrc/network/frame_stream.h in the simulation of stores: frames travel whole, and may be late or
// lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "base/bytes.h"
#include "network/byte_stream.h"

namespace ringtrain {

struct FrameHeader {
  uint32_t tag, number;
  uint64_t bytes;
};

struct OutgoingFrame {
  FrameHeader header;
  const char* data;
};

struct IncomingFrame {
  FrameHeader header;
  char* place;
  size_t came = 0;
  bool is_complete = false;
};

class FrameStream {
 public:
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual std::shared_ptr<IncomingFrame> place(const FrameHeader& header) = 0;
    virtual void complete(IncomingFrame& frame) = 0;
  };

  explicit FrameStream(ByteStream bytes) : socket_(std::move(bytes)) {}

  int socket() const { return socket_.number(); }
  void send(std::shared_ptr<OutgoingFrame> frame) {
    queued_bytes_ += sizeof(FrameHeader) + frame->header.bytes;
    outgoing_.push_back(std::move(frame));
  }
  size_t queued_bytes() const { return queued_bytes_; }
  uint64_t sent_bytes() const { return sent_bytes_; }
  uint64_t received_bytes() const { return received_bytes_; }
  bool write();
  bool read(Receiver& receiver);
  int error() const { return error_; }

 private:
  Descriptor socket_;
  std::deque<std::shared_ptr<OutgoingFrame>> outgoing_;
  size_t queued_bytes_ = 0;
  uint64_t sent_bytes_ = 0, received_bytes_ = 0;
  int error_ = 0;
};

}  // namespace ringtrain
