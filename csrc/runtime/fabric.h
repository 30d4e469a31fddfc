// How this rank reaches the others: MPI, the node's shared segment, and the channel over both. Made once, at start-up.
#pragma once

#include <memory>

#include "base/options.h"
#include "coordination/channel.h"
#include "coordination/network_wire.h"
#include "memory/arena.h"
#include "memory/node.h"
#include "network/alarm.h"
#include "network/network.h"
#include "runtime/arrival_bell.h"
#include "runtime/peer_watch.h"
#include "runtime/resources.h"
#include "runtime/world.h"

namespace ringtrain {

// Tags of messages: the negotiation's wires have their own, each process set has one from kFirstGroupTag on.
constexpr int kWorldWireTag = 0, kLeaderWireTag = 8, kAlarmTag = 15, kFirstGroupTag = 16, kGroupTags = 16000;

class Fabric {
 public:
  // All ranks of the world at the same time. `world` outlives this.
  Fabric(const World& world, const Options& options, Resources& resources);

  Channel& channel() const { return *channel_; }
  // Requires Engine::turn_.
  PeerWatch& watch() { return watch_; }
  // Any thread.
  OwnFailure& own_failure() { return own_failure_; }
  Network* network() { return network_.get(); }  // null in a world of one rank
  Node* node() { return node_.get(); }           // null when no rank shares memory with this one
  // Null where none is to be had: no rank shares memory with this one, or /dev/shm does not allow it. Shared with the
  // user's arrays.
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  Alarm* alarm() { return alarm_.get(); }  // null when all ranks share one node's memory
  // Whether a rank of this node rings the bell when another node wants a round.
  bool is_rung_for_rounds() const { return node_ && node_->index() > 0; }
  // Whether the bell will ring when something comes from another node, from now on until it does once. If not, one has
  // to look.
  bool will_ring_on_arrival();
  // Tells all others why this rank cannot go on.
  void say_last_words(ErrorKind kind, const std::string& message);
  // Rings when there is something to do; the engine sleeps on it.
  Flag& bell() { return node_ ? node_->doorbell(node_->index()) : own_bell_; }

 private:
  void connect(const World& world, const Options& options, Resources& resources);
  void make_node(const World& world, Channel& bootstrap);
  void make_arena(const World& world, Resources& resources, Channel& bootstrap);
  void make_channel(const World& world);

  OwnFailure own_failure_;
  PeerWatch watch_;
  Flag own_bell_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Node> node_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<Alarm> alarm_;
  std::unique_ptr<NetworkWire> wire_;  // between all ranks, or between the leaders of the nodes
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<ArrivalBell> arrival_bell_;  // where the Network has what it needs
};

}  // namespace ringtrain
