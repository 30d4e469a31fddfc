#include "network/frame_stream.h"

#include <errno.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace ringtrain {

// After a call that has moved nothing.
bool FrameStream::goes_on(ssize_t moved) {
  if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  // The kernel tells an error once: after a write that failed, a read only finds the end.
  if (moved < 0 && error_ == 0) error_ = errno;
  return false;
}

void OutgoingFrame::keep_data() noexcept {
  if (std::exchange(is_kept, true)) return;
  own.reset(new (std::nothrow) char[header.bytes]);
  if (own) std::copy_n(data, header.bytes, own.get());
  data = own.get();
}

bool FrameStream::write() {
  constexpr size_t kMostFrames = 16;
  while (!outgoing_.empty()) {
    iovec parts[2 * kMostFrames];
    size_t used = 0, asked = 0;
    for (size_t i = 0; i < std::min(kMostFrames, outgoing_.size()); ++i) {
      OutgoingFrame& frame = *outgoing_[i];
      constexpr size_t kHead = sizeof(FrameHeader);
      const size_t head = kHead - std::min(frame.moved, kHead), body = frame.moved - (kHead - head);
      if (frame.header.bytes > body && !frame.data) {
        error_ = ENOMEM;
        return false;
      }
      if (head > 0) parts[used++] = {reinterpret_cast<char*>(&frame.header) + frame.moved, head};
      if (frame.header.bytes > body) parts[used++] = {const_cast<char*>(frame.data) + body, frame.header.bytes - body};
      asked += frame.left();
    }
    const ssize_t sent = bytes_.send(parts, used);
    if (sent < 0) return goes_on(sent);
    queued_bytes_ -= static_cast<size_t>(sent);
    for (size_t left = static_cast<size_t>(sent); left > 0;) {
      OutgoingFrame& frame = *outgoing_.front();
      const size_t part = std::min(left, frame.left());
      frame.moved += part;
      left -= part;
      if (frame.left() == 0) outgoing_.pop_front();
    }
    if (static_cast<size_t>(sent) < asked) return true;
  }
  return true;
}

// One call fills the rest of the message under way and, behind it, the buffer with what follows.
bool FrameStream::read(Receiver& receiver) {
  char nowhere[16 << 10];
  while (true) {
    iovec parts[2];
    size_t used = 0, for_frame = 0;
    if (incoming_) {
      for_frame = incoming_->header.bytes - incoming_->came;
      char* place = incoming_->place ? incoming_->place + incoming_->came : nowhere;
      if (!incoming_->place) for_frame = std::min(for_frame, sizeof(nowhere));
      parts[used++] = {place, for_frame};
    }
    const bool is_discarding = incoming_ && !incoming_->place;
    if (!is_discarding) parts[used++] = {buffer_.data() + end_, buffer_.size() - end_};
    const size_t asked = for_frame + (is_discarding ? 0 : buffer_.size() - end_);
    const ssize_t came = bytes_.receive(parts, used);
    if (came <= 0) return goes_on(came);
    const size_t of_frame = std::min(static_cast<size_t>(came), for_frame);
    end_ += static_cast<size_t>(came) - of_frame;
    if (incoming_) {
      incoming_->came += of_frame;
      end_frame_if_complete(receiver);
    }
    if (!take_buffered(receiver)) {
      error_ = EPROTO;
      return false;
    }
    if (static_cast<size_t>(came) < asked && !bytes_.has_failed()) return true;
  }
}

// A call may return less than there is.
void FrameStream::read_rest(Receiver& receiver) {
  for (uint64_t before = received_bytes(); read(receiver) && received_bytes() > before; before = received_bytes())
    continue;
}

bool FrameStream::take_buffered(Receiver& receiver) {
  while (begin_ < end_) {
    if (!incoming_ && end_ - begin_ < sizeof(FrameHeader)) break;
    if (!incoming_ && !begin_frame(receiver)) return false;
    const size_t part = std::min(end_ - begin_, static_cast<size_t>(incoming_->header.bytes) - incoming_->came);
    if (incoming_->place) std::memcpy(incoming_->place + incoming_->came, buffer_.data() + begin_, part);
    incoming_->came += part;
    begin_ += part;
    end_frame_if_complete(receiver);
  }
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  return true;
}

void FrameStream::discard_incoming() {
  const size_t came = incoming_->came;
  incoming_ = std::make_shared<IncomingFrame>(IncomingFrame{incoming_->header, nullptr, came, nullptr, false});
}

bool FrameStream::begin_frame(Receiver& receiver) {
  FrameHeader header;
  std::memcpy(&header, buffer_.data() + begin_, sizeof(header));
  begin_ += sizeof(header);
  incoming_ = receiver.place(header);
  return incoming_ != nullptr;
}

void FrameStream::end_frame_if_complete(Receiver& receiver) {
  if (incoming_->came < incoming_->header.bytes) return;
  const std::shared_ptr<IncomingFrame> complete = std::move(incoming_);
  incoming_.reset();
  complete->is_complete = true;
  receiver.complete(*complete);
}

}  // namespace ringtrain
