// Which ranks belong to which process set, and which of them have joined. Every rank of the world keeps the same table,
// since all change it by the same decisions in the same order. Set 0 is the whole world.
#pragma once

#include <map>
#include <vector>

namespace ringtrain {

class Membership {
 public:
  explicit Membership(int world_size);

  // The id of the new set. `ranks`: in the order of their places.
  int add(std::vector<int> ranks);
  // The world and one of its sets, without those that have joined.
  Membership of(int id) const;
  void remove(int id) { sets_.erase(id); }

  int world_size() const { return static_cast<int>(ranks(0).size()); }
  bool has(int id) const { return sets_.count(id) != 0; }
  bool contains(int id, int rank) const { return place(id, rank) >= 0; }
  const std::vector<int>& ranks(int id) const { return sets_.at(id).ranks; }
  // The rank's place in the set, or -1.
  int place(int id, int rank) const;

  // A rank of the set contributes zeros from now on, until end_join().
  void join(int id, int rank);
  void end_join(int id);
  const std::vector<int>& joined(int id) const { return sets_.at(id).joined; }
  bool has_joined(int id, int rank) const;

 private:
  struct Set {
    Set() = default;
    explicit Set(std::vector<int> in_order);

    std::vector<int> ranks;    // by place
    std::vector<int> by_rank;  // the places of the ranks as they ascend
    std::vector<int> joined;   // ascending
  };

  std::map<int, Set> sets_;
  int next_id_ = 1;
};

}  // namespace ringtrain
