#include "collectives/network/peers.h"

#include <algorithm>

#include "collectives/network/flow.h"

namespace ringtrain {
namespace {

class ChunksOfTwo final : public Messages {
 public:
  ChunksOfTwo(const Message& outgoing, const Message& incoming, size_t chunk_bytes)
      : outgoing_(outgoing), incoming_(incoming), chunk_bytes_(chunk_bytes) {}
  size_t count() const override {
    return (std::max(outgoing_.bytes, incoming_.bytes) + chunk_bytes_ - 1) / chunk_bytes_;
  }
  Message outgoing(size_t i) override { return part(outgoing_, i); }
  Message incoming(size_t i) override { return part(incoming_, i); }

 private:
  Message part(const Message& whole, size_t i) const {
    const size_t begin = std::min(whole.bytes, i * chunk_bytes_);
    return {whole.data + begin, std::min(chunk_bytes_, whole.bytes - begin), whole.peer};
  }

  const Message outgoing_, incoming_;
  const size_t chunk_bytes_;
};

}  // namespace

void Peers::run(Messages& messages) {
  Flow flow(*this, messages);
  while (!flow.is_done()) flow.wait();
}

void Peers::exchange(const Message& outgoing, const Message& incoming, size_t chunk_bytes) {
  ChunksOfTwo messages(outgoing, incoming, chunk_bytes);
  run(messages);
}

}  // namespace ringtrain
