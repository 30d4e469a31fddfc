// Recursive doubling, and recursive halving and doubling.
//
// Doubling. In step k = 0, 1, .. every rank exchanges all it has with the rank whose number differs in bit k, and both
// add the two: after log2(n) steps all have the sum of all. That is the smallest number of messages one after the
// other, but each of them carries the whole array.
//
// Halving and doubling. Partners exchange halves instead: of two ranks whose numbers differ in the highest bit, the
// lower one sends the upper half and adds the lower half that it gets, and so on with half of that half and the next
// bit. After log2(n) steps each has the complete sum of 1/n of the array. The same steps backwards, without adding,
// give everybody all. Twice as many messages, but no more bytes than in a ring.
//
// If n is no power of two, the first ranks stand together in pairs: the odd one gives its array to the even one before
// all this, and gets the sum from it afterwards.
//
// Each element is added in the order of the numbers, in the same tree on all ranks, so all have the same bits. 16-bit
// floats travel as float32, and are rounded at the end.
//
// Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
#include "collectives/network/doubling_group.h"

#include <cstring>
#include <vector>

namespace ringtrain {

DoublingGroup::DoublingGroup(Peers peers, std::unique_ptr<Group> others, const Limits& limits)
    : FlatGroup(peers.rank(), peers.size()), peers_(std::move(peers)), others_(std::move(others)), limits_(limits) {
  while (2 * power_ <= size()) power_ *= 2;
  extra_ = size() - power_;
}

void DoublingGroup::reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) {
  for (const Piece& array : arrays) reduce_array(reduction, array);
}

void DoublingGroup::reduce_array(const Reduction& reduction, const Piece& array) {
  const bool is_wide = is_half(reduction.dtype);
  const Reduction partial = {is_wide ? DType::float32 : reduction.dtype, reduction.reduce, 1.0};
  const size_t element = size_of(partial.dtype), count = array.count;
  char* mine = mine_.get(count * element);
  theirs_.get(count * element);
  if (is_wide)
    widen(reduction.dtype, reinterpret_cast<float*>(mine), array.source, count);
  else
    std::memcpy(mine, array.source, count * element);

  const Range all = {0, count}, none = {0, 0};
  const bool is_paired = rank() < 2 * extra_;
  if (!has_number()) {
    exchange(rank() - 1, all, mine, none, element);
    exchange(rank() - 1, none, mine, all, element);
  } else {
    if (is_paired) {
      exchange(rank() + 1, none, theirs_.get(0), all, element);
      combine(partial, true, all);
    }
    if (count * element < limits_.halve_from_bytes)
      reduce_by_doubling(partial, count);
    else
      reduce_by_halving(partial, count);
    if (is_paired) exchange(rank() + 1, all, mine, none, element);
  }

  if (is_wide)
    narrow(reduction.dtype, reduction.scale, array.destination, reinterpret_cast<float*>(mine), count);
  else
    scale(reduction.dtype, reduction.scale, array.destination, mine, count);
}

void DoublingGroup::reduce_by_doubling(const Reduction& reduction, size_t count) {
  const Range all = {0, count};
  for (int bit = 1; bit < power_; bit *= 2) {
    const int partner = number() ^ bit;
    exchange(rank_of(partner), all, theirs_.get(0), all, size_of(reduction.dtype));
    combine(reduction, number() < partner, all);
  }
}

void DoublingGroup::reduce_by_halving(const Reduction& reduction, size_t count) {
  const size_t element = size_of(reduction.dtype);
  struct Step {
    int partner;
    Range mine, theirs;
  };
  std::vector<Step> steps;
  Range own = {0, count};
  for (int bit = power_ / 2; bit > 0; bit /= 2) {
    const int partner = number() ^ bit;
    const size_t middle = own.begin + (own.end - own.begin) / 2;
    const Range lower = {own.begin, middle}, upper = {middle, own.end};
    const bool is_lower = number() < partner;
    own = is_lower ? lower : upper;
    steps.push_back({partner, own, is_lower ? upper : lower});
    exchange(rank_of(partner), steps.back().theirs, theirs_.get(0), own, element);
    combine(reduction, is_lower, own);
  }
  for (auto step = steps.rbegin(); step != steps.rend(); ++step)
    exchange(rank_of(step->partner), step->mine, mine_.get(0), step->theirs, element);
}

void DoublingGroup::exchange(int peer, const Range& out, char* into, const Range& in, size_t element) {
  peers_.exchange({mine_.get(0) + out.begin * element, (out.end - out.begin) * element, peer},
                  {into + in.begin * element, (in.end - in.begin) * element, peer}, limits_.chunk_bytes);
}

void DoublingGroup::combine(const Reduction& reduction, bool mine_first, const Range& range) {
  const size_t offset = range.begin * size_of(reduction.dtype);
  char *mine = mine_.get(0) + offset, *theirs = theirs_.get(0) + offset;
  const void* sources[] = {mine_first ? mine : theirs, mine_first ? theirs : mine};
  void* destination = mine;
  if (range.begin < range.end) reduce(reduction, &destination, 1, sources, 2, range.end - range.begin);
}

void DoublingGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                                   const Counts& counts) {
  const size_t element = size_of(reduction.dtype), total = total_of(counts);
  if (total == 0) return;
  char* whole = whole_.get(total * element);
  reduce_arrays(reduction, {{source, whole, total}});
  std::memcpy(destination, whole + offsets_of(counts)[rank()] * element, counts[rank()] * element);
}

void DoublingGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  others_->allgather(source, destination, bytes);
}

void DoublingGroup::broadcast(void* data, size_t bytes, int root) { others_->broadcast(data, bytes, root); }

void DoublingGroup::alltoall(const void* source, const Counts& send_bytes, void* destination,
                             const Counts& receive_bytes) {
  others_->alltoall(source, send_bytes, destination, receive_bytes);
}

}  // namespace ringtrain
