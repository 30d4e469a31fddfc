// How this rank reaches the others: MPI, the node's shared segment, and the channel over both. Made once, at start-up.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/descriptor.h"
#include "base/options.h"
#include "base/placement.h"
#include "base/wait.h"
#include "coordination/channel.h"
#include "coordination/shm_channel.h"
#include "coordination/wire.h"
#include "gpu/nccl.h"
#include "memory/arena.h"
#include "memory/node.h"
#include "memory/shm.h"
#include "network/alarm.h"
#include "network/endpoint.h"
#include "network/mpi.h"
#include "network/network.h"
#include "network/sockets.h"
#include "runtime/peer_watch.h"
#include "runtime/resources.h"

namespace ringtrain {

// The world as ringtrain/job/world.py describes it.
struct World {
  int rank = 0;
  std::vector<RankName> names;  // of every rank
  std::vector<int> nodes;       // the node of every rank, numbered by first appearance: rank 0 is on node 0
  int cores = 1;                // that the ranks of this rank's node can keep busy at the same time
  std::string token;            // differs from job to job
  std::variant<std::monostate, MpiDescription, SocketDescription> network;  // nothing for a world of one rank
  int gpu = -1;                     // that init() has chosen for this rank; -1: none yet
  std::vector<NcclCandidate> nccl;  // the best first
  bool looks_for_sharing = true;    // of a GPU by two ranks; not if init() has warned of that already

  int size() const { return static_cast<int>(names.size()); }
  // These ranks of the world. `own` is -1 when this rank is not among them.
  Placement place(const std::vector<int>& ranks) const;
  // The member's place among all ranks of its node.
  int place_on_node(int member) const;
  int ranks_on_own_node() const;
};

// The calls for rounds of all lanes but that of the world, in messages of one tag: to look for those of hundreds of
// lanes that do nothing costs no more than to look for those of one. Requires Engine::turn_.
class LaneCalls {
 public:
  // `bell` rings when a call has come. Both outlive this.
  LaneCalls(Endpoint world, Flag& bell) : world_(std::move(world)), bell_(bell) {}

  void send(int rank, int process_set, uint64_t round);
  // Takes those that have come.
  void look();
  // The latest round of this set that was called for since the last take(); 0: none.
  bool has(int process_set) const { return latest_.count(process_set) > 0; }
  uint64_t take(int process_set);
  void forget(int process_set) { latest_.erase(process_set); }

 private:
  struct Call {
    int64_t process_set;
    uint64_t round;
  };

  Endpoint world_;
  Flag& bell_;
  std::map<int, uint64_t> latest_;  // by process set
};

// A Wire over messages of the Network.
class NetworkWire final : public Wire {
 public:
  // A tag for each value of Tag, from that of `peers` on, belongs to this wire. `calls`: null where calls are messages
  // like others.
  explicit NetworkWire(Endpoint peers, LaneCalls* calls = nullptr, int process_set = 0)
      : peers_(std::move(peers)), calls_(calls), process_set_(process_set) {}
  // The last messages of a wire are what the others need to end well.
  ~NetworkWire() override {
    constexpr double kMoment_s = 1;
    peers_.drain(kMoment_s);
  }

  int rank() const override { return peers_.rank(); }
  int size() const override { return peers_.size(); }
  int rank_of_world(int rank) const override { return peers_.ranks()[static_cast<size_t>(rank)]; }

  void send(int to, Tag tag, const void* data, size_t bytes) override {
    if (tag == Tag::call && calls_) return call(to, data);
    peers_.post(to, static_cast<int>(tag), data, bytes);
  }
  void receive(int from, Tag tag, void* data, size_t bytes) override {
    const auto message = peers_.take(from, static_cast<int>(tag), bytes);
    std::copy(message->begin(), message->end(), static_cast<char*>(data));
  }
  void receive_from_any(Tag tag, void* data, size_t bytes) override {
    if (tag == Tag::call && calls_) return take_call(data);
    receive(peers_.sender(static_cast<int>(tag)), tag, data, bytes);
  }
  bool has_arrived(Tag tag) override {
    if (tag == Tag::call && calls_) return calls_->has(process_set_);
    return peers_.has_arrived_from_any(static_cast<int>(tag));
  }
  bool arrives_within(int from, Tag tag, double seconds) override {
    return peers_.arrives_within(from, static_cast<int>(tag), seconds);
  }

 private:
  void call(int to, const void* round);
  void take_call(void* round);

  Endpoint peers_;
  LaneCalls* const calls_;
  const int process_set_;
};

// Rings the engine's bell when something has come from another host, so that an engine without work can sleep until
// then.
class ArrivalBell {
 public:
  // `descriptor`: Network::descriptor(), not negative. It and the bell outlive this.
  ArrivalBell(int descriptor, Flag& bell);
  ~ArrivalBell();

  // It will ring once, at once if something has come already. Costs a system call.
  void arm();

 private:
  void listen();

  const int network_;
  Flag& bell_;
  const Descriptor epoll_, end_;  // end_: readable when the thread is to end
  std::thread thread_;
};

// Tags on the Network: the negotiation's wires have their own, each process set has one from kFirstGroupTag on, and its
// lane one for each value of Tag from kFirstLaneTag on. MPI guarantees those up to 32,767, which limits how many
// process sets may be open at the same time, and how many long messages from one rank to another may be under way.
constexpr int kWorldWireTag = 0, kLeaderWireTag = 8, kAlarmTag = 15, kFirstGroupTag = 16, kGroupTags = 16000;
constexpr int kFirstLaneTag = kFirstGroupTag + kGroupTags, kLanes = 2000, kTagsOfLane = 4;
constexpr int lane_tag(int process_set) { return kFirstLaneTag + process_set % kLanes * kTagsOfLane; }
constexpr int kLaneCallsTag = kFirstLaneTag + kLanes * kTagsOfLane;
// Of words of messages between two ranks, and from the next one on of their values.
constexpr int kMessageTag = kLaneCallsTag + 1, kLastTag = 32767;

// How some ranks negotiate, and hear of each other meanwhile.
struct Line {
  explicit Line(const PeerWatch& watch) : watch(watch) {}

  PeerWatch watch;                    // of the one thread that waits for the others
  SharedSegment boards;               // of a process set's ranks on this node
  std::unique_ptr<NetworkWire> wire;  // between all of them, or between the leaders of the nodes
  std::unique_ptr<Channel> channel;
  bool is_over_network = false;
};

class Fabric {
 public:
  // All ranks of the world at the same time. `world` and `turn` outlive this.
  Fabric(const World& world, const Options& options, Resources& resources, TurnMutex& turn);

  Channel& channel() const { return *line_.channel; }
  // Requires Engine::turn_.
  PeerWatch& watch() { return line_.watch; }
  Line& line() { return line_; }
  // Makes the Line of a process set. All ranks of the world at the same time; null for those outside the set.
  std::unique_ptr<Line> open_line(int process_set, const Placement& placement);
  // Takes calls for rounds of process sets, whose Lines then know of them.
  void hear_calls() {
    if (lane_calls_) lane_calls_->look();
  }
  // Any thread.
  OwnFailure& own_failure() { return own_failure_; }
  Network* network() { return network_.get(); }  // null in a world of one rank
  Node* node() { return node_.get(); }           // null when no rank shares memory with this one
  // Null where none is to be had: no rank shares memory with this one, or /dev/shm does not allow it. Shared with the
  // user's arrays.
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  Alarm* alarm() { return alarm_.get(); }  // null when all ranks share one node's memory
  // Whether a rank of this node rings the bell when another node asks for a round.
  bool is_rung_for_rounds() const { return node_ && node_->index() > 0; }
  // Whether the bell will ring when something comes from another node, from now on until it does once. If not, one has
  // to look.
  bool will_ring_on_arrival();
  // Tells all others why this rank cannot go on.
  void say_last_words(ErrorKind kind, const std::string& message);
  // Rings when there is something to do; the engine sleeps on it.
  Flag& bell() { return node_ ? node_->doorbell(node_->index()) : own_bell_; }
  // Any thread. Rings when a message between two ranks of this node goes on.
  Flag& message_bell() { return node_ ? node_->rings().bell() : own_bell_; }

 private:
  // How long a round waits for the other nodes to come by themselves before it calls them, at least.
  static constexpr double kPatience_s = 1e-3;

  void connect(const Options& options, Resources& resources);
  void make_node(Channel& bootstrap);
  void make_arena(Resources& resources, Channel& bootstrap);
  std::unique_ptr<ShmChannel> on_node(Boards boards, const Placement& placement, Watch& watch);
  // `on_node`: null where ranks share no memory.
  void make_channel(Line& line, const Placement& placement, std::unique_ptr<ShmChannel> on_node, int process_set);

  const World& world_;
  double patience_s_ = kPatience_s;  // of rounds with other nodes
  OwnFailure own_failure_;
  Flag own_bell_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Node> node_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<Alarm> alarm_;
  Line line_;                                  // of the world; its last messages need the Network
  std::unique_ptr<LaneCalls> lane_calls_;      // where not all ranks share memory
  std::unique_ptr<ArrivalBell> arrival_bell_;  // where the Network has what it needs
};

// Shared segments for the ranks of each node, made by all ranks of the world together: everybody has one, or nobody.
struct SegmentPlan {
  std::string purpose;               // the segment's name is made of it
  std::function<size_t(int)> bytes;  // for so many ranks
  size_t most_reserved = SIZE_MAX;   // of these, from the beginning on; others when they are used
  const char* if_it_fails =
      "All ranks go through the network instead, which is slower.";  // the end of a warning; null for no warning
};

// A segment on every node of `placement` for the ranks of the placement that are there. All ranks of the world call
// this, those outside the placement too. Returns a segment without data where this rank needs none, and everywhere when
// it could not be had somewhere; then it warns.
SharedSegment make_segments(const World& world, const Placement& placement, const SegmentPlan& plan, Channel& channel);

}  // namespace ringtrain
