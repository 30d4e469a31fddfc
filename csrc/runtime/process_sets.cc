#include "runtime/process_sets.h"

#include <algorithm>

#include "collectives/shm_group.h"
#include "runtime/segments.h"

namespace ringtrain {

ProcessSets::ProcessSets(const World& world, const Options& options, const Tuning& tuning, Fabric& fabric)
    : world_(world), options_(options), tuning_(tuning), fabric_(fabric), membership_(world.size()) {
  open(0);
}

void ProcessSets::open(int id) {
  const Placement placement = world_.place(membership_.ranks(id));
  NodeMemory memory;
  if (fabric_.channel().size() > 1 && wants_shared_memory(placement, options_)) {
    const auto mailbox_bytes = static_cast<size_t>(options_.mailbox_kb * 1024);
    // A node with a single rank makes a segment like the others, which nobody reads.
    const auto bytes_for = [&](int size) {
      return ShmGroup::Geometry::of(std::max(size, 2), mailbox_bytes, world_.cores).segment_bytes();
    };
    memory.mailboxes = make_segments(world_, placement, {"set" + std::to_string(id), bytes_for}, fabric_.channel());
  }
  if (placement.own < 0) return;
  memory.cores = world_.cores;
  memory.arena = fabric_.arena().get();
  for (const int place : placement.on_node(placement.own_node()))
    memory.arena_members.push_back(world_.place_on_node(placement.ranks[place]));
  const int tag = kFirstGroupTag + id % kGroupTags;
  groups_[id] = choose_group(placement, options_, tuning_, fabric_.mpi(), tag, std::move(memory), fabric_.watch());
}

}  // namespace ringtrain
