// Some ranks of the world, numbered from 0, and the messages between them: under Groups, Wires and the Alarm.
#pragma once

#include <limits>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/wait.h"
#include "network/network.h"

namespace ringtrain {

// Requires Engine::turn_.
class Endpoint {
 public:
  static constexpr double kNever_s = std::numeric_limits<double>::infinity();

  // `ranks`: of the world, this one at `rank`. No other messages between them have the tags from `tag` on that the
  // methods count from 0. `watch` may be null where every wait has an end. `network` and `watch` outlive this.
  Endpoint(Network& network, std::vector<int> ranks, int rank, int tag, Watch* watch)
      : network_(&network), ranks_(std::move(ranks)), rank_(rank), tag_(tag), watch_(watch) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  // A number of a peer for any number, counted round in the circle of the ranks.
  int wrap(int rank) const { return ((rank % size()) + size()) % size(); }
  Network& network() const { return *network_; }
  const std::vector<int>& ranks() const { return ranks_; }
  int tag() const { return tag_; }
  Watch& watch() const { return *watch_; }

  // Messages in memory that was lent to the Network (Network::Lending).
  NetworkRequest send(int to, const void* data, size_t bytes) { return network_->isend(data, bytes, ranks_[to], tag_); }
  NetworkRequest receive(int from, void* data, size_t bytes) {
    return network_->irecv(data, bytes, ranks_[from], tag_);
  }
  bool test(NetworkRequest& request) { return network_->test(request); }
  void wait(NetworkRequest request) {
    wait_until([&] { return test(request); }, kNever_s);
  }
  // advance() returns how many messages of a stream are over.
  template <typename Advance>
  void wait_for_some(Advance advance, Pace& pace) {
    waiter_.poll_stream(advance, pace, watch_, [&](double pause_s) { network_->sleep(pause_s, kNever_s, watch_); });
  }

  // Messages in memory of their own, which may be longer under way than their sender or receiver lives.
  void post(int to, int tag, const void* data, size_t bytes);
  // Waits for a message of at most so many bytes. Null if it has not come in time.
  std::shared_ptr<const Bytes> take(int from, int tag, size_t most_bytes, double longest_s = kNever_s);
  bool has_arrived_from_any(int tag) { return network_->has_arrived_from_any(tag_ + tag); }
  // The sender of what has_arrived_from_any() has seen.
  int sender(int tag);
  bool is_connected_to(int rank) const { return network_->is_connected_to(ranks_[rank]); }
  bool would_see_end_at(int rank) const { return network_->would_see_end_at(ranks_[rank]); }
  // Waits for a message without taking it; whether one is there.
  bool arrives_within(int from, int tag, double longest_s);
  // Gives what was posted a moment to leave. A message that cannot leave delays no other.
  void drain(double longest_s) noexcept;

 private:
  template <typename Ready>
  void wait_until(Ready ready, double longest_s) {
    waiter_.poll(ready, watch_, [&](double pause_s) { network_->sleep(pause_s, longest_s, watch_); });
  }
  template <typename Ready>
  bool comes_true(Ready ready, double longest_s);

  Network* network_;
  std::vector<int> ranks_;
  int rank_, tag_;
  Watch* watch_;
  Waiter waiter_;
  std::list<NetworkRequest> posted_;
};

}  // namespace ringtrain
