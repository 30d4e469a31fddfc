// The process sets that exist, each with the Group that carries out its operations on this rank.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "base/options.h"
#include "base/thread_annotations.h"
#include "collectives/group.h"
#include "collectives/network/shares.h"
#include "collectives/shm/shm_group.h"
#include "coordination/membership.h"
#include "runtime/fabric.h"

namespace ringtrain {

// Requires the turn, but for construction.
class ProcessSets {
 public:
  // Makes the Group of the whole world. All arguments outlive this.
  ProcessSets(const World& world, const Options& options, const Tuning& tuning, Fabric& fabric);

  // All ranks of the world call these in the same order, also those outside the set. The coordinator has already
  // changed the membership.
  void open(int id) REQUIRES(turn);
  void close(int id) REQUIRES(turn);
  // Closes all of them; not after an error.
  void leave() REQUIRES(turn);

  Membership& membership() { return membership_; }
  // Where the ranks of a set are, and how fast the links of their hosts.
  Placement place(int id) const;
  bool contains_this_rank(int id) const { return groups_.count(id) != 0; }
  Group& group(int id) { return *groups_.at(id); }
  std::shared_ptr<Group> shared_group(int id) { return groups_.at(id); }
  Network* network() { return fabric_.network(); }  // null in a world of one rank
  // For messages between two ranks of the world, this one first.
  Endpoint transfers(std::vector<int> ranks) {
    return {*fabric_.network(), std::move(ranks), 0, kTransferTag, &fabric_.watch()};
  }

 private:
  // Returns the rates of link_rates by node, measured now for auto; nothing if all are alike. All ranks of the world.
  LinkRates find_link_rates();
  LinkRates measure_links(const Placement& placement);
  // All ranks of the world call this, too. Without mailboxes where they are of no use or cannot be had.
  NodeMemory share_memory(int id, const Placement& placement);

  const World& world_;
  const Options& options_;
  const Tuning& tuning_;
  Fabric& fabric_;
  Membership membership_;
  LinkRates link_rates_;                          // of each node
  std::map<int, std::shared_ptr<Group>> groups_;  // of the sets that this rank belongs to
};

}  // namespace ringtrain
