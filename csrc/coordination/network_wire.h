// A Wire over messages of the Network.
#pragma once

#include <algorithm>
#include <utility>

#include "coordination/wire.h"
#include "network/endpoint.h"

namespace ringtrain {

class NetworkWire final : public Wire {
 public:
  // A tag for each value of Tag, from that of `peers` on, belongs to this wire.
  explicit NetworkWire(Endpoint peers) : peers_(std::move(peers)) {}
  // The last messages of a wire are what the others need to end well.
  ~NetworkWire() override {
    constexpr double kMoment_s = 1;
    peers_.drain(kMoment_s);
  }

  int rank() const override { return peers_.rank(); }
  int size() const override { return peers_.size(); }
  int rank_of_world(int rank) const override { return peers_.ranks()[static_cast<size_t>(rank)]; }

  void send(int to, Tag tag, const void* data, size_t bytes) override {
    peers_.post(to, static_cast<int>(tag), data, bytes);
  }
  void receive(int from, Tag tag, void* data, size_t bytes) override {
    const auto message = peers_.take(from, static_cast<int>(tag), bytes);
    std::copy(message->begin(), message->end(), static_cast<char*>(data));
  }
  void receive_from_any(Tag tag, void* data, size_t bytes) override {
    receive(peers_.sender(static_cast<int>(tag)), tag, data, bytes);
  }
  bool has_arrived(Tag tag) override { return peers_.has_arrived_from_any(static_cast<int>(tag)); }
  bool arrives_within(int from, Tag tag, double seconds) override {
    return peers_.arrives_within(from, static_cast<int>(tag), seconds);
  }

 private:
  Endpoint peers_;
};

}  // namespace ringtrain
