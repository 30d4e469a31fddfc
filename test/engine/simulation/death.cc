#include "death.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread_annotations.h"
#include "crowd.h"
#include "network/alarm.h"

namespace ringtrain {
namespace {

constexpr int kChildren = 4;

struct Load {
  size_t messages = 0, bytes = 0;
  void add(size_t more) {
    ++messages;
    bytes += more;
  }
};

// That of one rank, connected as by the rounds of the negotiation.
class NewsNetwork final : public Network {
 public:
  NewsNetwork(int rank, std::vector<Load>& loads) : rank_(rank), loads_(loads) {}

  void bring(Bytes message, int from) {
    message_ = std::move(message);
    from_ = from;
  }
  const Bytes& last_sent() const { return last_sent_; }

  NetworkRequest isend(const void* data, size_t bytes, int to, int) override {
    loads_[static_cast<size_t>(rank_)].add(bytes);
    loads_[static_cast<size_t>(to)].add(bytes);
    const char* begin = static_cast<const char*>(data);
    last_sent_.assign(begin, begin + bytes);
    return begun(0, Kind::message);
  }
  NetworkRequest irecv(void* data, size_t bytes, int, int) override {
    std::copy_n(message_.begin(), std::min(bytes, message_.size()), static_cast<char*>(data));
    message_.clear();
    return begun(0, Kind::message);
  }
  bool has_arrived(int from, int) override { return !message_.empty() && from == from_; }
  bool has_arrived_from_any(int) override { return !message_.empty(); }
  bool would_see_end_at(int rank) const override { return are_connected(rank_, rank); }

  bool are_connected(int one, int other) const {
    if (one == other) return false;
    return (std::max(one, other) - 1) / kChildren == std::min(one, other);
  }

 private:
  int look(uint64_t&, bool& has_ended) noexcept override {
    has_ended = true;
    return 0;
  }
  void require_success(int) const override {}
  void cancel(uint64_t) noexcept override {}

  const int rank_;
  std::vector<Load>& loads_;
  Bytes message_, last_sent_;
  int from_ = 0;
};

}  // namespace

// A connection tells some ranks of the death, and each of the others hears it from one that is alive. All of them tell
// it once.
DeathCost cost_of_death(int size) {
  turn.assert_held();  // one thread
  std::vector<int> all;
  std::vector<RankName> names;
  for (int rank = 0; rank < size; ++rank) {
    all.push_back(rank);
    names.push_back({rank, "node" + std::to_string(rank), rank});
  }
  const int dead = size - 1;
  std::vector<Load> loads(all.size());
  std::vector<double> seconds(all.size());
  Bytes message;
  const auto tell = [&](int rank, bool hears) {
    NewsNetwork network(rank, loads);
    Alarm alarm(Endpoint(network, all, rank, 0, nullptr), names);
    if (hears) network.bring(message, (dead - 1) / kChildren);
    const double begin = processor_s();
    try {
      if (hears)
        alarm.listen();
      else
        alarm.raise(ErrorKind::peer_lost, "rank " + std::to_string(dead) + " has died");
    } catch (const Error&) {
    }
    seconds[static_cast<size_t>(rank)] = processor_s() - begin;
    message = network.last_sent();
  };
  const NewsNetwork connections(dead, loads);
  for (const bool hears : {false, true})
    for (int rank = 0; rank < dead; ++rank)
      if (connections.would_see_end_at(rank) != hears) tell(rank, hears);
  loads.pop_back();
  const auto busiest = std::max_element(
      loads.begin(), loads.end(), [](const Load& one, const Load& other) { return one.messages < other.messages; });
  return {seconds[static_cast<size_t>(busiest - loads.begin())], busiest->messages, busiest->bytes};
}

}  // namespace ringtrain
