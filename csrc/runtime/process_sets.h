// The process sets that exist, each with the Group that carries out its operations on this rank, and the Line over
// which its ranks negotiate.
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

// A process set that this rank belongs to. Its lane owns it, and those who use its Group, such as requests that are
// left under way.
struct OpenSet {
  int id = 0;
  Line* line = nullptr;
  Tuning* tuning = nullptr;  // that of its opening, unless it is the world
  Membership* membership = nullptr;

  // Where they are its own, and not those of the world.
  std::unique_ptr<Line> own_line;
  Tuning own_tuning = {};
  std::unique_ptr<Membership> own_membership;

  std::shared_ptr<Group> group;  // null until it is needed
};

// Requires the turn, but for construction.
class ProcessSets {
 public:
  // Makes the Group of the whole world. All arguments outlive this.
  ProcessSets(const World& world, const Options& options, Tuning& tuning, Fabric& fabric);

  // All ranks of the world call these in the same order, also those outside the set. The coordinator has already
  // changed the membership.
  void open(int id) REQUIRES(turn);
  void close(int id) REQUIRES(turn);
  bool is_empty() const { return sets_.empty(); }
  std::vector<int> ids() const;  // of those that this rank belongs to

  Membership& membership() { return membership_; }
  // Where the ranks of a set are, and how fast the links of their hosts.
  Placement place(int id) const;
  bool contains_this_rank(int id) const { return sets_.count(id) != 0; }
  // Of a set that this rank belongs to. All ranks of the set make the first call of group() or shared_group() together:
  // that makes the Group.
  Group& group(int id);
  std::shared_ptr<Group> shared_group(int id) { return {sets_.at(id), &group(id)}; }
  // Null if it has not been made.
  const Group* made_group(int id) const {
    const auto set = sets_.find(id);
    return set == sets_.end() ? nullptr : set->second->group.get();
  }
  std::shared_ptr<OpenSet> open_set(int id) { return sets_.at(id); }
  Network* network() { return fabric_.network(); }  // null in a world of one rank

 private:
  // Returns the rates of link_rates by node, measured now for auto; nothing if all are alike. All ranks of the world.
  LinkRates find_link_rates();
  LinkRates measure_links(const Placement& placement);
  // Without mailboxes where they are of no use or cannot be had. All ranks of the set.
  NodeMemory share_memory(int id, const Placement& placement, Channel& channel);

  const World& world_;
  const Options& options_;
  Tuning& tuning_;
  Fabric& fabric_;
  Membership membership_;
  LinkRates link_rates_;                          // of each node
  std::map<int, std::shared_ptr<OpenSet>> sets_;  // that this rank belongs to
};

}  // namespace ringtrain
