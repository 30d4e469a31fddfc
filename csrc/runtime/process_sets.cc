#include "runtime/process_sets.h"

#include <algorithm>

#include "collectives/choose.h"
#include "collectives/shm/shm_group.h"
#include "network/network.h"
#include "runtime/fabric.h"

namespace ringtrain {

ProcessSets::ProcessSets(const World& world, const Options& options, const Tuning& tuning, Fabric& fabric)
    : world_(world), options_(options), tuning_(tuning), fabric_(fabric), membership_(world.size()) {
  try {
    open(0);
  } catch (const Error& error) {
    fabric_.say_last_words(error.kind(), error.what());
    throw;
  }
}

void ProcessSets::open(int id) {
  const Placement placement = world_.place(membership_.ranks(id));
  NodeMemory memory = share_memory(id, placement);
  if (placement.own < 0) return;
  const int tag = kFirstGroupTag + id % kGroupTags;
  groups_[id] = choose_group(placement, options_, tuning_, fabric_.network(), tag, std::move(memory), fabric_.watch());
}

void ProcessSets::close(int id) {
  groups_.erase(id);
  if (network() && network()->collectives()) network()->collectives()->free_unused(fabric_.watch());
}

void ProcessSets::leave() {
  while (!groups_.empty()) close(groups_.begin()->first);
}

NodeMemory ProcessSets::share_memory(int id, const Placement& placement) {
  NodeMemory memory;
  memory.arena = fabric_.arena().get();
  if (placement.own >= 0)
    for (const int place : placement.on_node(placement.own_node()))
      memory.arena_members.push_back(world_.place_on_node(placement.ranks[place]));
  if (fabric_.channel().size() == 1 || !wants_shared_memory(placement, options_)) return memory;
  // A node with a single rank makes a segment like the others, which nobody reads.
  const int size = std::max(static_cast<int>(memory.arena_members.size()), 2);
  memory.geometry = MailboxGeometry::of(size, static_cast<size_t>(options_.mailbox_kb * 1024), world_.cores);
  const auto bytes = [&](int) { return ShmGroup::segment_bytes(memory.geometry); };
  SegmentPlan plan = {"set" + std::to_string(id), bytes};
  if (!fabric_.node()) plan.if_it_fails = nullptr;  // that of the node has failed, and said so
  memory.mailboxes = make_segments(world_, placement, plan, fabric_.channel());
  return memory;
}

}  // namespace ringtrain
