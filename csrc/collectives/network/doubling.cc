// Recursive doubling.
//
// In each step every rank exchanges all it has with the rank whose number differs in one bit, from the highest bit to
// the lowest one, and both add the two: after log2(n) steps all have the sum of all. That is the smallest number of
// messages one after the other, but each of them carries the whole array: halving and doubling (halving.cc) takes twice
// as many, with fewer bytes. Where n is a power of two, that adds up in the same tree.
//
// If n is no power of two, the first ranks stand together in pairs: the odd one gives its array to the even one before
// all this, and gets the sum from it afterwards.
//
// Each element is added in the order of the numbers, in the same tree on all ranks, so all have the same bits. 16-bit
// floats travel as float32, and are rounded at the end.
//
// Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
#include <vector>

#include "collectives/network/algorithms.h"
#include "kernels/copy.h"

namespace ringtrain {
namespace {

struct Sums {
  char *mine, *theirs;
};

// The largest power of two that is not more than there are ranks.
int power_of(int ranks) {
  int power = 1;
  while (2 * power <= ranks) power *= 2;
  return power;
}

// 16-bit floats are added in float32.
Reduction partial_of(const Reduction& reduction) { return {wide(reduction.dtype), reduction.reduce}; }

void take(const Reduction& reduction, char* sums, const void* source, size_t count) {
  if (is_half(reduction.dtype))
    widen(reduction.dtype, reinterpret_cast<float*>(sums), source, count);
  else
    copy(sums, source, count * size_of(reduction.dtype));
}

void give(const Reduction& reduction, void* destination, const char* sums, size_t count) {
  if (is_half(reduction.dtype))
    narrow(reduction.dtype, reduction.scale, destination, reinterpret_cast<const float*>(sums), count);
  else
    scale(reduction.dtype, reduction.scale, destination, sums, count);
}

class Doubling {
 public:
  Doubling(Endpoint& peers, const Reduction& reduction, const Sums& sums, size_t chunk_bytes)
      : peers_(peers),
        reduction_(reduction),
        sums_(sums),
        chunk_bytes_(chunk_bytes),
        power_(power_of(peers.size())),
        extra_(peers.size() - power_) {}

  // The contents of `mine` there.
  void reduce(size_t count) {
    const size_t bytes = count * element_;
    const bool is_paired = peers_.rank() < 2 * extra_;
    if (is_paired && peers_.rank() % 2 == 1) {
      exchange_with(peers_.rank() - 1, bytes, sums_.mine, 0);
      return exchange_with(peers_.rank() - 1, 0, sums_.mine, bytes);
    }
    if (is_paired) {
      exchange_with(peers_.rank() + 1, 0, sums_.theirs, bytes);
      combine(true, count);
    }
    for (int bit = power_ / 2; bit > 0; bit /= 2) {
      const int partner = number() ^ bit;
      exchange_with(rank_of(partner), bytes, sums_.theirs, bytes);
      combine(number() < partner, count);
    }
    if (is_paired) exchange_with(peers_.rank() + 1, bytes, sums_.mine, 0);
  }

 private:
  // Sends `mine`, and receives.
  void exchange_with(int peer, size_t sent_bytes, char* into, size_t received_bytes) {
    exchange(peers_, {sums_.mine, sent_bytes, peer}, {into, received_bytes, peer}, chunk_bytes_);
  }

  void combine(bool mine_first, size_t count) {
    const void* sources[] = {mine_first ? sums_.mine : sums_.theirs, mine_first ? sums_.theirs : sums_.mine};
    void* destination = sums_.mine;
    ringtrain::reduce(reduction_, &destination, 1, sources, 2, count);
  }

  // Those that take part in the doubling are numbered from 0.
  int number() const { return peers_.rank() < 2 * extra_ ? peers_.rank() / 2 : peers_.rank() - extra_; }
  int rank_of(int number) const { return number < extra_ ? 2 * number : number + extra_; }

  Endpoint& peers_;
  const Reduction reduction_;
  const size_t element_ = size_of(reduction_.dtype);  // bytes
  const Sums sums_;
  const size_t chunk_bytes_;
  const int power_;
  const int extra_;  // how many ranks there are above it
};

}  // namespace

void allreduce_by_doubling(Endpoint& peers, const Reduction& reduction, const Piece& array, size_t chunk_bytes,
                           const DoublingMemory& memory) {
  const Reduction partial = partial_of(reduction);
  const size_t bytes = array.count * size_of(partial.dtype);
  const Sums sums = {memory.mine.get(bytes), memory.theirs.get(bytes)};
  take(reduction, sums.mine, array.source, array.count);
  Doubling(peers, partial, sums, chunk_bytes).reduce(array.count);
  give(reduction, array.destination, sums.mine, array.count);
}

void reduce_by_tree(const Reduction& reduction, DType source_dtype, const Sources& sources, void* destination,
                    size_t count, Scratch& sums) {
  const Reduction partial = partial_of(reduction);
  const size_t bytes = count * size_of(partial.dtype);
  char* const first = sums.get(bytes * sources.size());
  struct Sum {
    const void* data;
    char* place;  // where it may be written
  };
  std::vector<Sum> left;  // those that are not in the sum of another one
  for (size_t i = 0; i < sources.size(); ++i) {
    char* const place = first + i * bytes;
    if (is_half(source_dtype)) widen(source_dtype, reinterpret_cast<float*>(place), sources[i], count);
    left.push_back({is_half(source_dtype) ? place : sources[i], place});
  }
  const auto add = [&](size_t to, size_t from) {
    const void* both[] = {left[to].data, left[from].data};
    void* sum = left[to].place;
    reduce(partial, &sum, 1, both, 2, count);
    left[to].data = sum;
  };
  const auto power = static_cast<size_t>(power_of(static_cast<int>(left.size())));
  for (size_t number = 0; left.size() > power; ++number) {
    add(number, number + 1);
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(number) + 1);
  }
  for (size_t distance = power / 2; distance > 0; distance /= 2)
    for (size_t number = 0; number < distance; ++number) add(number, number + distance);
  give(reduction, destination, static_cast<const char*>(left.front().data), count);
}

}  // namespace ringtrain
