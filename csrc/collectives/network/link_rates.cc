#include "collectives/network/link_rates.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "collectives/network/network_group.h"
#include "collectives/network/pipeline.h"

namespace ringtrain {
namespace {

// A link may pass the first bytes after a pause at once: they are sent, but not timed.
constexpr size_t kFirstBytes = 256 << 10, kShortest = 256 << 10, kLongest = 16 << 20;

// So many bytes to the next rank, in messages as those of the ring, behind kFirstBytes.
class TimedMessages final : public Messages {
 public:
  // `outgoing`, `incoming`: as long as all of them.
  TimedMessages(const Endpoint& peers, size_t bytes, size_t chunk_bytes, char* outgoing, char* incoming)
      : peers_(peers),
        bytes_(bytes),
        chunk_bytes_(chunk_bytes),
        first_(chunks_of(kFirstBytes, chunk_bytes)),
        outgoing_(outgoing),
        incoming_(incoming) {}

  size_t count() const override { return first_ + chunks_of(bytes_, chunk_bytes_); }
  Message outgoing(size_t i) override { return message(i, outgoing_, peers_.wrap(peers_.rank() + 1)); }
  Message incoming(size_t i) override { return message(i, incoming_, peers_.wrap(peers_.rank() - 1)); }
  void arrived(size_t i) override {
    if (i + 1 == first_) begin_s_ = now_s();
    if (i + 1 == count()) seconds_ = now_s() - begin_s_;
  }

  // From the last of the first bytes to the last of all.
  double seconds() const { return seconds_; }

 private:
  Message message(size_t i, char* data, int peer) const {
    const bool is_first = i < first_;
    const Chunk chunk = is_first ? chunk_of(kFirstBytes, chunk_bytes_, i) : chunk_of(bytes_, chunk_bytes_, i - first_);
    return {data + (is_first ? 0 : kFirstBytes) + chunk.offset, chunk.count, peer};
  }

  const Endpoint& peers_;
  const size_t bytes_, chunk_bytes_, first_;
  char *const outgoing_, *const incoming_;
  double begin_s_ = 0, seconds_ = 0;
};

// All of it is lent to the Network.
class LinkProbe {
 public:
  LinkProbe(Endpoint peers, const Tuning& tuning)
      : peers_(std::move(peers)),
        tuning_(tuning),
        group_(Endpoint(peers_.network(), peers_.ranks(), peers_.rank(), peers_.tag(), &peers_.watch()), tuning,
               {"ring", DType::float32, {}, {}}) {}

  // Seconds of so many bytes to each rank from the one before it, all at the same time; the same on all ranks.
  std::vector<double> seconds_of(size_t bytes) {
    constexpr size_t kTimes = 3;
    std::array<double, kTimes> times;
    for (double& time : times) time = own_seconds_of(bytes);
    std::sort(times.begin(), times.end());
    all_.assign(static_cast<size_t>(peers_.size()), 0);
    all_[static_cast<size_t>(peers_.rank())] = times[kTimes / 2];
    group_.allreduce({DType::float64, Reduce::max}, {{all_.data(), all_.data(), all_.size()}});
    return all_;
  }

 private:
  double own_seconds_of(size_t bytes) {
    char* const outgoing = outgoing_.get(kFirstBytes + bytes);
    char* const incoming = incoming_.get(kFirstBytes + bytes);
    TimedMessages messages(peers_, bytes, tuning_.ring_chunk_bytes, outgoing, incoming);
    group_.barrier();
    run(peers_, messages);
    return messages.seconds();
  }

  Endpoint peers_;
  const Tuning& tuning_;
  NetworkGroup group_;  // of the same ranks: between two of its operations the messages are those of `peers_`
  Scratch outgoing_, incoming_;
  std::vector<double> all_;
};

}  // namespace

LinkRates measure_link_rates(Endpoint peers, const Tuning& tuning) {
  constexpr double kLong_s = 0.05, kKilo = 1000, kBits = 8, kFastest = 1e9;
  Network& network = peers.network();
  const auto probe = std::make_shared<LinkProbe>(std::move(peers), tuning);
  const Network::Lending lending(&network, probe);
  size_t bytes = kShortest;
  std::vector<double> seconds = probe->seconds_of(bytes);
  while (bytes < kLongest && *std::max_element(seconds.begin(), seconds.end()) < kLong_s) {
    bytes *= 2;
    seconds = probe->seconds_of(bytes);
  }
  LinkRates rates;
  for (size_t i = 0; i < seconds.size(); ++i) {
    const double best_s = std::min(seconds[i], seconds[(i + 1) % seconds.size()]);
    const double rate = static_cast<double>(bytes) * kBits / kKilo / std::max(best_s, 1e-9);
    rates.push_back(static_cast<uint64_t>(std::clamp(rate, 1.0, kFastest)));
  }
  const auto [slowest, fastest] = std::minmax_element(rates.begin(), rates.end());
  return *fastest > 2 * *slowest ? rates : LinkRates();
}

}  // namespace ringtrain
