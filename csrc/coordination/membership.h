// Which ranks belong to which process set. Every rank of the world keeps the same table, since all change it by the
// same plans in the same order. Set 0 is the whole world.
#pragma once

#include <map>
#include <vector>

namespace ringtrain {

class Membership {
 public:
  explicit Membership(int world_size);

  // The id of the new set. `ranks`: ascending.
  int add(std::vector<int> ranks);
  void remove(int id) { sets_.erase(id); }

  bool has(int id) const { return sets_.count(id) != 0; }
  bool contains(int id, int rank) const { return place(id, rank) >= 0; }
  const std::vector<int>& ranks(int id) const { return sets_.at(id); }
  // The rank's place in the set, or -1.
  int place(int id, int rank) const;

 private:
  std::map<int, std::vector<int>> sets_;
  int next_id_ = 1;
};

}  // namespace ringtrain
