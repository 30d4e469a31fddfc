#include "runtime/fabric.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cstring>
#include <limits>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "coordination/tree_channel.h"

namespace ringtrain {
namespace {

epoll_event event_of(int descriptor, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = descriptor;
  return event;
}

// How long a round takes, which is how long it waits for the others to come by themselves: ranks that call an operation
// again and again come to its round up to a hop apart. One that is called before it comes has nothing to say in that
// round, so its operation takes another one. Of two rounds after each other one may be quick, where others were ahead.
double round_s_of(Channel& channel) {
  double quickest_two_s = std::numeric_limits<double>::infinity(), before_s = quickest_two_s;
  for (int round = 0; round < 5; ++round) {
    const double begin = now_s();
    channel.all_agree(true);
    const double round_s = now_s() - begin;
    quickest_two_s = std::min(quickest_two_s, before_s + round_s);
    before_s = round_s;
  }
  return quickest_two_s / 2;
}

// Two bits for each of the most operations that the cache may hold unless the user says otherwise, and the usual
// announcement in one piece. Longer ones are sent in several.
constexpr size_t kBoardBytes = 16 << 10;
// There may be hundreds of lanes, each with few operations.
constexpr size_t kLaneBoardBytes = 2 << 10;

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

void LaneCalls::send(int rank, int process_set, uint64_t round) {
  const Call call = {process_set, round};
  world_.post(rank, 0, &call, sizeof(call));
}

void LaneCalls::look() {
  while (world_.has_arrived_from_any(0)) {
    Call call = {};
    const auto message = world_.take(world_.sender(0), 0, sizeof(call));
    std::memcpy(&call, message->data(), sizeof(call));
    uint64_t& latest = latest_[static_cast<int>(call.process_set)];
    latest = std::max(latest, call.round);
    bell_.ring();
  }
}

uint64_t LaneCalls::take(int process_set) {
  const uint64_t round = latest_.at(process_set);
  latest_.erase(process_set);
  return round;
}

void NetworkWire::call(int to, const void* round) {
  uint64_t number;
  std::memcpy(&number, round, sizeof(number));
  calls_->send(peers_.ranks()[static_cast<size_t>(to)], process_set_, number);
}

void NetworkWire::take_call(void* round) {
  const uint64_t number = calls_->take(process_set_);
  std::memcpy(round, &number, sizeof(number));
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

Fabric::Fabric(const World& world, const Options& options, Resources& resources, TurnMutex& turn)
    : world_(world), line_(PeerWatch(own_failure_, {options.stall_warning_time_s, options.start_timeout_s}, turn)) {
  network_ = open_network(world);
  if (!network_) {
    line_.channel = std::make_unique<SelfChannel>();
    return;
  }
  alarm_ = std::make_unique<Alarm>(Endpoint(*network_, all_ranks(world), world.rank, kAlarmTag, nullptr), world.names);
  watch().listen_to(*alarm_);
  try {
    connect(options, resources);
  } catch (const Error& error) {
    const Error reason = watch().with_reason(error);
    say_last_words(reason.kind(), reason.what());
    throw reason;
  }
}

void Fabric::connect(const Options& options, Resources& resources) {
  const Placement placement = world_.place(all_ranks(world_));
  const auto wire =
      std::make_unique<NetworkWire>(Endpoint(*network_, placement.ranks, world_.rank, kWorldWireTag, &watch()));
  TreeChannel bootstrap(*wire, std::numeric_limits<double>::infinity());
  if (!placement.is_on_one_node()) patience_s_ = std::max(kPatience_s, round_s_of(bootstrap));
  if (options.shared_memory == "auto") make_node(bootstrap);
  if (node_) make_arena(resources, bootstrap);
  make_channel(line_, placement, node_ ? on_node(node_->boards(), placement, watch()) : nullptr, 0);
  const bool share_memory = node_ && node_->size() == world_.size();
  if (!share_memory)
    lane_calls_ =
        std::make_unique<LaneCalls>(Endpoint(*network_, placement.ranks, world_.rank, kLaneCallsTag, &watch()), bell());
  if (share_memory) {
    watch().stop_listening_to(*alarm_);
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
  if (network_) network_->has_failed();
}

void Fabric::make_node(Channel& bootstrap) {
  const Placement placement = world_.place(all_ranks(world_));
  const auto size = static_cast<int>(placement.on_node(placement.own_node()).size());
  const SegmentPlan plan = {"node", [](int size) { return Node::bytes(size, kBoardBytes); },
                            Node::reserved_bytes(size, kBoardBytes)};
  SharedSegment segment = make_segments(world_, placement, plan, bootstrap);
  if (!segment.data()) return;
  std::vector<RankName> members;
  for (const int place : placement.on_node(placement.own_node())) members.push_back(world_.names[place]);
  node_ = std::make_unique<Node>(std::move(segment), placement.place_on_node(), std::move(members), kBoardBytes);
  // Nobody may miss the sign of life of a rank that is still on its way here.
  bootstrap.all_agree(true);
  watch().listen_to(*node_);
  alarm_->leave_out(placement.on_node(placement.own_node()));
}

// That of the generation before if all ranks still have it, in the same places.
void Fabric::make_arena(Resources& resources, Channel& bootstrap) {
  const Resources::SharedArena before = resources.arena();
  const bool is_of_this_node = before.arena && before.member == node_->index() && before.size == node_->size();
  if (all_have_the_same(is_of_this_node ? before.token : "", bootstrap)) {
    arena_ = before.arena;
    return;
  }
  const SegmentPlan plan = {"arena", &Arena::bytes, 0, nullptr};
  SharedSegment segment = make_segments(world_, world_.place(all_ranks(world_)), plan, bootstrap);
  if (!segment.data()) return;
  arena_ = std::make_shared<Arena>(std::move(segment), node_->size(), node_->index());
  resources.set_arena({arena_, world_.token, node_->index(), node_->size()});
}

std::unique_ptr<ShmChannel> Fabric::on_node(Boards boards, const Placement& placement, Watch& watch) {
  std::vector<Flag*> doorbells;
  for (const int place : placement.on_node(placement.own_node()))
    doorbells.push_back(&node_->doorbell(world_.place_on_node(placement.ranks[static_cast<size_t>(place)])));
  ShmChannel::Patience patience;
  if (!placement.is_on_one_node()) patience = {patience_s_, true};
  return std::make_unique<ShmChannel>(boards, placement.place_on_node(), std::move(doorbells), patience, watch);
}

void Fabric::make_channel(Line& line, const Placement& placement, std::unique_ptr<ShmChannel> on_node,
                          int process_set) {
  const int tag_of_world = on_node ? kLeaderWireTag : kWorldWireTag;
  const int tag = process_set == 0 ? tag_of_world : lane_tag(process_set);
  LaneCalls* const calls = process_set == 0 ? nullptr : lane_calls_.get();
  const auto wire_between = [&](const std::vector<int>& ranks, int own) {
    return std::make_unique<NetworkWire>(Endpoint(*network_, ranks, own, tag, &line.watch), calls, process_set);
  };
  if (placement.ranks.size() == 1) {
    line.channel = std::make_unique<SelfChannel>();
    return;
  }
  if (!on_node) {
    line.is_over_network = true;
    line.wire = wire_between(placement.ranks, placement.own);
    line.channel = std::make_unique<TreeChannel>(*line.wire, patience_s_);
    return;
  }
  line.is_over_network = !placement.is_on_one_node();
  if (!line.is_over_network) {
    line.channel = std::move(on_node);
    return;
  }
  std::vector<int> leaders;
  std::vector<size_t> sizes;
  std::vector<std::vector<int>> places;
  for (size_t place = 0; place < placement.ranks.size(); ++place) {  // the first rank's node is the first
    const std::vector<int> of_node = placement.on_node(placement.nodes[place]);
    if (of_node.front() != static_cast<int>(place)) continue;
    places.push_back(of_node);
    leaders.push_back(placement.ranks[static_cast<size_t>(places.back().front())]);
    sizes.push_back(places.back().size());
  }
  std::unique_ptr<TreeChannel> cross;
  const auto own = std::find(leaders.begin(), leaders.end(), world_.rank);
  if (own != leaders.end()) {
    line.wire = wire_between(leaders, static_cast<int>(own - leaders.begin()));
    cross = std::make_unique<TreeChannel>(*line.wire, patience_s_, std::move(sizes));
  }
  line.channel = std::make_unique<NodeChannel>(placement.own, static_cast<int>(placement.ranks.size()),
                                               std::move(on_node), std::move(cross), places);
}

// A process set of one rank on each node needs no boards, but where others of its ranks share a node: all ranks of the
// world make the same calls.
std::unique_ptr<Line> Fabric::open_line(int process_set, const Placement& placement) {
  const bool shares_memory = node_ && placement.distinct_nodes().size() < placement.ranks.size();
  SharedSegment boards;
  if (shares_memory) {
    const SegmentPlan plan = {"lane" + std::to_string(process_set),
                              [](int size) { return Boards::bytes(size, kLaneBoardBytes); }};
    boards = make_segments(world_, placement, plan, *line_.channel);
  }
  if (placement.own < 0) return nullptr;
  auto line = std::make_unique<Line>(line_.watch.for_another_thread());
  line->boards = std::move(boards);
  std::unique_ptr<ShmChannel> on_node;
  if (line->boards.data()) {
    const auto size = static_cast<int>(placement.on_node(placement.own_node()).size());
    on_node = this->on_node(Boards(line->boards.data(), size, kLaneBoardBytes), placement, line->watch);
  }
  if (lane_calls_) lane_calls_->forget(process_set);
  make_channel(*line, placement, std::move(on_node), process_set);
  return line;
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
