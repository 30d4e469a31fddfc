#include "runtime/segments.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace ringtrain {
namespace {

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
  const auto create = [&] { segment = SharedSegment::create(bytes, plan.pages); };
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
