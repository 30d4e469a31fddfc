#include "kvstore/wire/connection.h"

#include <sys/epoll.h>

#include <utility>

#include "base/log.h"

namespace ringtrain {
namespace {

// So much leaves without waiting for more, and so little is little.
constexpr size_t kMuch = 128 << 10, kLittle = 256 << 10;

std::shared_ptr<IncomingFrame> frame_for(char* place) {
  auto frame = std::make_shared<IncomingFrame>();
  frame->place = place;
  return frame;
}

void begin(IncomingFrame& frame, const FrameHeader& header, char* place) {
  frame.header = header;
  frame.place = place;
  frame.came = 0;
  frame.is_complete = false;
}

bool is_possible(const Head& head) {
  return head.said <= kLastSaid && static_cast<int>(head.dtype) < kDTypes && static_cast<int>(head.wanted) < kDTypes &&
         (head.body_bytes <= kLongestBody || is_of_chunk(head.said) || head.said == Said::done);
}

}  // namespace

// A head and its body, one behind the other in the stream.
struct Connection::Message {
  Head head;
  OutgoingFrame head_frame, body_frame;
  std::shared_ptr<const void> keeper;
};

Connection::Connection(Poller& poller, Owner& owner, Traffic& traffic, ByteStream bytes)
    : poller_(poller),
      owner_(owner),
      traffic_(traffic),
      stream_(std::move(bytes)),
      head_frame_(frame_for(nullptr)),
      body_frame_(frame_for(nullptr)) {
  poller_.add(stream_.socket(), *this, false);
}

Connection::~Connection() { poller_.remove(stream_.socket()); }

void Connection::send(uint32_t id, const Head& head, const char* body, std::shared_ptr<const void> keeper) {
  if (has_ended_) return;
  const auto message = std::make_shared<Message>();
  message->head = head;
  message->keeper = std::move(keeper);
  message->head_frame.header = {kHeadTag, id, sizeof(Head)};
  message->head_frame.data = reinterpret_cast<const char*>(&message->head);
  stream_.send({message, &message->head_frame});
  if (head.body_bytes > 0) {
    message->body_frame.header = {kBodyTag, id, head.body_bytes};
    message->body_frame.data = body;
    stream_.send({message, &message->body_frame});
  }
  traffic_.sent_messages.fetch_add(1, std::memory_order_relaxed);
  traffic_.sent_bytes.fetch_add(sizeof(FrameHeader) + sizeof(Head) + head.body_bytes, std::memory_order_relaxed);
  if (traffic_.verbose >= 2) say("sends", id, head);
  if (stream_.queued_bytes() > kLittle) was_full_ = true;
  if (stream_.queued_bytes() >= kMuch && !waits_for_room_) flush();
}

void Connection::send(uint32_t id, const Head& head, Bytes body) {
  const auto kept = std::make_shared<const Bytes>(std::move(body));
  Head with_size = head;
  with_size.body_bytes = static_cast<uint32_t>(kept->size());
  send(id, with_size, kept->data(), kept);
}

// The owner hears of an end when the Poller says so, which the kernel then tells in any case.
void Connection::flush() {
  if (has_ended_ || waits_for_room_ || stream_.queued_bytes() == 0) return;
  if (!stream_.write()) is_broken_ = true;
  note_what_is_left();
}

void Connection::note_what_is_left() {
  waits_for_room_ = stream_.queued_bytes() > 0;
  poller_.wait_for_writing(stream_.socket(), *this, waits_for_room_);
}

// An exception of its owner, such as for lack of memory, ends this connection and no other.
void Connection::is_ready(uint32_t events) {
  const auto error = error_of([&] { advance(events); });
  if (!error) return;
  if (traffic_.verbose >= 1) inform(traffic_.name + " ends a connection: " + error->what());
  end(0);
}

void Connection::advance(uint32_t events) {
  const bool may_write = (events & EPOLLOUT) != 0, may_read = (events & ~uint32_t{EPOLLOUT}) != 0;
  if (is_broken_ || (may_write && !stream_.write()) || (may_read && !stream_.read(*this)) || is_broken_)
    return end(stream_.error());
  if (may_write) note_what_is_left();
  if (was_full_ && stream_.queued_bytes() <= kLittle) {
    was_full_ = false;
    owner_.has_room();
  }
  flush();
}

std::shared_ptr<IncomingFrame> Connection::place(const FrameHeader& header) {
  if (is_broken_) return nullptr;
  return waits_for_body_ ? place_body(header) : place_head(header);
}

std::shared_ptr<IncomingFrame> Connection::place_head(const FrameHeader& header) {
  if (header.tag != kHeadTag || header.bytes != sizeof(Head)) return nullptr;
  begin(*head_frame_, header, reinterpret_cast<char*>(&head_));
  return head_frame_;
}

std::shared_ptr<IncomingFrame> Connection::place_body(const FrameHeader& header) {
  const bool belongs =
      header.tag == kBodyTag && header.number == head_frame_->header.number && header.bytes == head_.body_bytes;
  if (!belongs) return nullptr;
  begin(*body_frame_, header, owner_.place(header.number, head_));
  return body_frame_;
}

void Connection::complete(IncomingFrame& frame) {
  if (&frame == head_frame_.get()) {
    begin_message();
    if (is_broken_ || waits_for_body_) return;
  }
  waits_for_body_ = false;
  const auto error = error_of([&] { owner_.take(head_frame_->header.number, head_); });
  if (!error) return;
  is_broken_ = true;
  if (traffic_.verbose >= 1) inform(traffic_.name + " ends a connection: " + error->what());
}

void Connection::begin_message() {
  is_broken_ = !is_possible(head_);
  if (is_broken_) return;
  waits_for_body_ = head_.body_bytes > 0;
  traffic_.received_messages.fetch_add(1, std::memory_order_relaxed);
  traffic_.received_bytes.fetch_add(sizeof(FrameHeader) + sizeof(Head) + head_.body_bytes, std::memory_order_relaxed);
  if (traffic_.verbose >= 2) say("gets", head_frame_->header.number, head_);
}

void Connection::end(int error) {
  if (std::exchange(has_ended_, true)) return;
  poller_.remove(stream_.socket());
  owner_.has_ended(error);
}

void Connection::say(const char* what, uint32_t id, const Head& head) const {
  inform(traffic_.name + " " + what + " " + name_of(head.said) + " " + std::to_string(id) + ": store " +
         std::to_string(head.store) + ", part " + std::to_string(head.part) + ", chunk " + std::to_string(head.chunk) +
         ", number " + std::to_string(head.number) + ", " + std::to_string(head.body_bytes) + " bytes");
}

}  // namespace ringtrain
