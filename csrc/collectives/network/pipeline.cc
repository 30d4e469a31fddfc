#include "collectives/network/pipeline.h"

namespace ringtrain {
namespace {

class ChunksOfTwo final : public Messages {
 public:
  ChunksOfTwo(const Message& outgoing, const Message& incoming, size_t chunk_bytes)
      : outgoing_(outgoing), incoming_(incoming), chunk_bytes_(chunk_bytes) {}
  size_t count() const override { return chunks_of(std::max(outgoing_.bytes, incoming_.bytes), chunk_bytes_); }
  Message outgoing(size_t i) override { return part(outgoing_, i); }
  Message incoming(size_t i) override { return part(incoming_, i); }

 private:
  Message part(const Message& whole, size_t i) const {
    const Chunk chunk = chunk_of(whole.bytes, chunk_bytes_, i);
    return {whole.data + chunk.offset, chunk.count, whole.peer};
  }

  const Message outgoing_, incoming_;
  const size_t chunk_bytes_;
};

}  // namespace

int Flow::step() {
  const size_t before = arrived_ + sent_;
  while (post_receive()) {
  }
  while (post_send()) {
  }
  while (finish_receive()) {
  }
  while (finish_send()) {
  }
  if (sent_ == count_ && arrived_ < count_ && messages_.is_long()) peers_.watch().has_sent_all();
  return static_cast<int>(arrived_ + sent_ - before);
}

void Flow::wait() {
  peers_.wait_for_some([&] { return step(); }, pace_);
}

bool Flow::post_receive() {
  const size_t i = receives_posted_;
  if (i == count_ || i == arrived_ + kWindow || !messages_.may_receive(i, sent_)) return false;
  const Message message = messages_.incoming(i);
  if (message.bytes > 0) receives_[i % kWindow] = peers_.receive(message.peer, message.data, message.bytes);
  ++receives_posted_;
  return true;
}

bool Flow::post_send() {
  const size_t i = sends_posted_;
  if (i == count_ || i == sent_ + kWindow || !messages_.may_send(i, arrived_)) return false;
  const Message message = messages_.outgoing(i);
  if (message.bytes > 0) sends_[i % kWindow] = peers_.send(message.peer, message.data, message.bytes);
  ++sends_posted_;
  return true;
}

bool Flow::finish_receive() {
  if (arrived_ == receives_posted_ || !peers_.test(receives_[arrived_ % kWindow])) return false;
  messages_.arrived(arrived_++);
  return true;
}

bool Flow::finish_send() {
  if (sent_ == sends_posted_ || !peers_.test(sends_[sent_ % kWindow])) return false;
  ++sent_;
  return true;
}

void run(Endpoint& peers, Messages& messages) {
  Flow flow(peers, messages);
  while (!flow.is_done()) flow.wait();
}

void exchange(Endpoint& peers, const Message& outgoing, const Message& incoming, size_t chunk_bytes) {
  ChunksOfTwo messages(outgoing, incoming, chunk_bytes);
  run(peers, messages);
}

void Pipeline::lay_out(const std::function<size_t(size_t, size_t)>& width) {
  places_.resize(blocks_ * steps());
  steps_.reserve(places_.size());
  for (size_t wave = 0; wave + 1 < blocks_ + steps(); ++wave) {
    for (size_t block = wave < steps() ? 0 : wave - steps() + 1; block <= std::min(wave, blocks_ - 1); ++block) {
      const size_t step = wave - block, begin = step_of_.size();
      step_of_.resize(begin + width(block, first_step_ + step), static_cast<uint32_t>(steps_.size()));
      places_[block * steps() + step] = steps_.size();
      steps_.push_back({block, first_step_ + step, begin, step_of_.size()});
    }
  }
}

}  // namespace ringtrain
