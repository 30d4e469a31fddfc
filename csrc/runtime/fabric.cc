#include "runtime/fabric.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "coordination/shm_channel.h"
#include "coordination/tree_channel.h"

namespace ringtrain {
namespace {

epoll_event event_of(int descriptor, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = descriptor;
  return event;
}

// How long a round waits for the other nodes to come by themselves before it calls them.
constexpr double kPatience_s = 1e-3;

// Two bits for each of the most operations that the cache may hold unless the user says otherwise, and the usual
// announcement in one piece. Longer ones are sent in several.
constexpr size_t kBoardBytes = 16 << 10;

std::vector<std::vector<int>> ranks_by_node(const World& world) {
  std::vector<std::vector<int>> ranks(static_cast<size_t>(*std::max_element(world.nodes.begin(), world.nodes.end())) +
                                      1);
  for (int rank = 0; rank < world.size(); ++rank) ranks[world.nodes[rank]].push_back(rank);
  return ranks;
}

std::vector<int> all_ranks(const World& world) {
  std::vector<int> ranks;
  for (const RankName& name : world.names) ranks.push_back(name.rank);
  return ranks;
}

std::unique_ptr<Network> open_network(const World& world) {
  if (const auto* mpi = std::get_if<MpiDescription>(&world.network)) return open_mpi(*mpi, world.names);
  if (const auto* sockets = std::get_if<SocketDescription>(&world.network))
    return open_sockets(*sockets, world.rank, world.names);
  return nullptr;
}

// Whether all ranks give the same text, which is not "". A difference is a bit that neither their hashes nor the
// complements of these have in common.
bool all_have_the_same(const std::string& text, Channel& channel) {
  const uint64_t hash = std::hash<std::string>()(text);
  Words words = text.empty() ? Words{0, 0} : Words{hash, ~hash};
  channel.and_bits(words);
  return words[0] == ~words[1];
}

// Runs `step`, and warns if it throws and somebody minds.
bool succeeds(const std::function<void()>& step, const char* otherwise) {
  try {
    step();
    return true;
  } catch (const Error& error) {
    if (otherwise) warn(std::string(error.what()) + ". " + otherwise);
    return false;
  }
}

}  // namespace

Placement World::place(const std::vector<int>& ranks) const {
  Placement placement;
  placement.ranks = ranks;
  for (const int member : ranks) placement.nodes.push_back(nodes[static_cast<size_t>(member)]);
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  placement.own = own == ranks.end() ? -1 : static_cast<int>(own - ranks.begin());
  return placement;
}

int World::ranks_on_own_node() const {
  return static_cast<int>(std::count(nodes.begin(), nodes.end(), nodes[static_cast<size_t>(rank)]));
}

int World::place_on_node(int member) const {
  return static_cast<int>(std::count(nodes.begin(), nodes.begin() + member, nodes[static_cast<size_t>(member)]));
}

ArrivalBell::ArrivalBell(int descriptor, Flag& bell)
    : network_(descriptor), bell_(bell), epoll_(epoll_create1(EPOLL_CLOEXEC)), end_(eventfd(0, EFD_CLOEXEC)) {
  epoll_event network = event_of(network_, 0), end = event_of(end_.number(), EPOLLIN);
  if (!epoll_ || !end_ || epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, network_, &network) != 0 ||
      epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, end_.number(), &end) != 0)
    throw failure("no file descriptors are left for the connections between ranks (see ulimit -n)");
  thread_ = start_thread(&ArrivalBell::listen, this);
}

ArrivalBell::~ArrivalBell() {
  eventfd_write(end_.number(), 1);
  thread_.join();
}

void ArrivalBell::arm() {
  epoll_event event = event_of(network_, EPOLLIN | EPOLLONESHOT);
  epoll_ctl(epoll_.number(), EPOLL_CTL_MOD, network_, &event);
}

void ArrivalBell::listen() {
  epoll_event event = {};
  while (true) {
    if (epoll_wait(epoll_.number(), &event, 1, -1) < 1) continue;
    if (event.data.fd == end_.number()) return;
    bell_.ring_all();
  }
}

Fabric::Fabric(const World& world, const Options& options, Resources& resources)
    : watch_(own_failure_, {options.stall_warning_time_s, options.start_timeout_s}) {
  network_ = open_network(world);
  if (!network_) {
    channel_ = std::make_unique<SelfChannel>();
    return;
  }
  alarm_ = std::make_unique<Alarm>(Endpoint(*network_, all_ranks(world), world.rank, kAlarmTag, nullptr), world.names);
  watch_.listen_to(*alarm_);
  try {
    connect(world, options, resources);
  } catch (const Error& error) {
    const Error reason = watch_.with_reason(error);
    say_last_words(reason.kind(), reason.what());
    throw reason;
  }
}

void Fabric::connect(const World& world, const Options& options, Resources& resources) {
  wire_ = std::make_unique<NetworkWire>(Endpoint(*network_, all_ranks(world), world.rank, kWorldWireTag, &watch_));
  TreeChannel bootstrap(*wire_, std::numeric_limits<double>::infinity(), false);
  if (options.shared_memory == "auto") make_node(world, bootstrap);
  if (node_) make_arena(world, resources, bootstrap);
  if (node_)
    make_channel(world);
  else
    channel_ = std::make_unique<TreeChannel>(*wire_, kPatience_s, true);
  const bool share_memory = node_ && node_->size() == world.size();
  if (share_memory) {
    watch_.stop_listening_to(*alarm_);
    alarm_.reset();
  } else if (network_->descriptor() >= 0) {
    arrival_bell_ = std::make_unique<ArrivalBell>(network_->descriptor(), bell());
  }
}

bool Fabric::will_ring_on_arrival() {
  if (arrival_bell_) arrival_bell_->arm();
  return arrival_bell_ != nullptr;
}

void Fabric::say_last_words(ErrorKind kind, const std::string& message) {
  if (node_) node_->say_last_words(kind, message);
  if (alarm_) alarm_->raise(kind, message);
}

void Fabric::make_node(const World& world, Channel& bootstrap) {
  const Placement placement = world.place(all_ranks(world));
  const SegmentPlan plan = {"node", [](int size) { return Node::bytes(size, kBoardBytes); }};
  SharedSegment segment = make_segments(world, placement, plan, bootstrap);
  if (!segment.data()) return;
  std::vector<RankName> members;
  for (const int place : placement.on_node(placement.own_node())) members.push_back(world.names[place]);
  node_ = std::make_unique<Node>(std::move(segment), placement.place_on_node(), std::move(members), kBoardBytes);
  // Nobody may miss the sign of life of a rank that is still on its way here.
  bootstrap.all_agree(true);
  watch_.listen_to(*node_);
  alarm_->leave_out(placement.on_node(placement.own_node()));
}

// That of the generation before if all ranks still have it, in the same places.
void Fabric::make_arena(const World& world, Resources& resources, Channel& bootstrap) {
  const Resources::SharedArena before = resources.arena();
  const bool is_of_this_node = before.arena && before.member == node_->index() && before.size == node_->size();
  if (all_have_the_same(is_of_this_node ? before.token : "", bootstrap)) {
    arena_ = before.arena;
    return;
  }
  const SegmentPlan plan = {"arena", &Arena::bytes, 0, nullptr};
  SharedSegment segment = make_segments(world, world.place(all_ranks(world)), plan, bootstrap);
  if (!segment.data()) return;
  arena_ = std::make_shared<Arena>(std::move(segment), node_->size(), node_->index());
  resources.set_arena({arena_, world.token, node_->index(), node_->size()});
}

void Fabric::make_channel(const World& world) {
  const std::vector<std::vector<int>> ranks = ranks_by_node(world);
  auto on_node = std::make_unique<ShmChannel>(*node_, watch_);
  if (ranks.size() == 1) {
    wire_.reset();
    channel_ = std::move(on_node);
    return;
  }
  std::unique_ptr<TreeChannel> cross;
  if (node_->index() == 0) {
    std::vector<int> leaders;
    std::vector<size_t> sizes;
    for (const auto& of_node : ranks) {
      leaders.push_back(of_node.front());
      sizes.push_back(of_node.size());
    }
    wire_ =
        std::make_unique<NetworkWire>(Endpoint(*network_, leaders, world.nodes[world.rank], kLeaderWireTag, &watch_));
    const bool is_alone_everywhere = leaders.size() == static_cast<size_t>(world.size());
    cross = std::make_unique<TreeChannel>(*wire_, kPatience_s, is_alone_everywhere, std::move(sizes));
  } else {
    wire_.reset();
  }
  channel_ = std::make_unique<NodeChannel>(world.rank, world.size(), std::move(on_node), std::move(cross), ranks);
}

// The first rank of each node creates the segment, unnamed, and the others open it through its process. The nodes'
// tickets reach all ranks at once, since all others leave the bits of a node's word set. Where /proc does not show the
// process, the segment gets a name for a moment.
SharedSegment make_segments(const World& world, const Placement& placement, const SegmentPlan& plan, Channel& channel) {
  const bool is_member = placement.own >= 0;
  const std::vector<int> places = is_member ? placement.on_node(placement.own_node()) : std::vector<int>();
  const int creator = is_member ? placement.ranks[places.front()] : -1;
  const bool is_creator = creator == world.rank;
  const size_t bytes = is_member ? plan.bytes(static_cast<int>(places.size())) : 0;
  const auto own_node = static_cast<size_t>(world.nodes[world.rank]);
  SharedSegment segment;
  const auto create = [&] { segment = SharedSegment::create(bytes, std::min(bytes, plan.most_reserved)); };
  if (!channel.all_agree(!is_creator || succeeds(create, plan.if_it_fails))) return {};

  Words tickets(static_cast<size_t>(*std::max_element(world.nodes.begin(), world.nodes.end())) + 1, ~uint64_t{0});
  if (is_creator) tickets[own_node] = segment.ticket();
  channel.and_bits(tickets);
  const auto attach = [&] { segment = SharedSegment::attach(world.names[creator].pid, tickets[own_node], bytes); };
  if (channel.all_agree(!is_member || is_creator || succeeds(attach, nullptr))) return segment;

  const std::string name = "ringtrain-" + world.token + "-" + plan.purpose + "-" + std::to_string(own_node);
  const auto publish = [&] { segment.publish(name); };
  if (!channel.all_agree(!is_creator || succeeds(publish, plan.if_it_fails))) return {};
  const auto attach_by_name = [&] { segment = SharedSegment::attach(name, bytes); };
  const bool has_segment = !is_member || segment.data();
  if (!channel.all_agree(has_segment || succeeds(attach_by_name, plan.if_it_fails))) return {};
  segment.unlink();
  return segment;
}

}  // namespace ringtrain
