// Ranks that can run collectives together. One class per way of doing it; a hierarchy is a Group made of Groups.
//
// A Group knows neither names nor process sets. Its ranks are numbered from 0 in the order of the process set. All
// its ranks call the same methods in the same order with arguments that fit together: that was negotiated above.
// Every wait inside looks after the other ranks through a Watch and throws when waiting makes no sense any more; after
// that the Group is out of step and must not be used again. Requires Engine::turn_.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace ringtrain {

// Memory that a Group works in: grows to the largest request and stays.
class Scratch {
 public:
  // At least `bytes`, uninitialised; what was there before may be gone.
  char* get(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(new char[bytes]);
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t bytes_ = 0;
};

// The algorithm of an operation of so many bytes and more, up to the next choice for the same operation, in words. Each
// Group makes it of the numbers by which it chooses.
struct AlgorithmChoice {
  std::string operation;
  size_t from_bytes;  // of the whole array; for an alltoall of the longest message
  std::string algorithm;
  std::string options;  // the options that change it, with a comma between several; empty where none does
};
using AlgorithmChoices = std::vector<AlgorithmChoice>;

// One number per rank of the Group: elements or bytes, as the method says.
using Counts = std::vector<size_t>;

// Of one array, by rank of the Group.
using Sources = std::vector<const void*>;

inline size_t count_of(const std::vector<Piece>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), size_t{0},
                         [](size_t count, const Piece& piece) { return count + piece.count; });
}
inline size_t total_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }
inline Counts offsets_of(const Counts& counts) {
  Counts offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), size_t{0});
  return offsets;
}

// `count` elements in as many slices as there are ranks, each beginning on a cache line; the last ones may be empty.
inline Counts even_slices(size_t count, int size) {
  const size_t line = 64, ranks = static_cast<size_t>(size);
  const size_t usual = ((count + ranks - 1) / ranks + line - 1) / line * line;
  Counts counts(ranks);
  for (size_t r = 0; r < ranks; ++r) counts[r] = std::min(count, (r + 1) * usual) - std::min(count, r * usual);
  return counts;
}

// `count` elements or bytes cut into chunks of `most`. The last one is shorter, and those behind it are empty.
struct Chunk {
  size_t offset, count;
};
inline size_t chunks_of(size_t count, size_t most) { return (count + most - 1) / most; }
inline Chunk chunk_of(size_t count, size_t most, size_t number) {
  const size_t offset = std::min(count, number * most);
  return {offset, std::min(most, count - offset)};
}

// Calls visit(begin, count) for as few parts of `count` elements, all about as long, as there can be if none is longer
// than `most`, a multiple of 64.
template <typename Visit>
void for_each_part(size_t count, size_t most, Visit visit) {
  if (count == 0) return;
  const size_t parts = (count + most - 1) / most;
  const size_t usual = ((count + parts - 1) / parts + 63) / 64 * 64;
  for (size_t begin = 0; begin < count; begin += usual) visit(begin, std::min(usual, count - begin));
}

inline Counts in_bytes(Counts counts, size_t element_bytes) {
  for (size_t& count : counts) count *= element_bytes;
  return counts;
}

class Group {
 public:
  Group(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual const char* name() const = 0;

  // Each piece's destination becomes the reduction of all ranks' sources. A source may be its own destination.
  // All ranks end with the same bits.
  virtual void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) = 0;

  // Reduces one small array without a message, from the sources of all ranks. Returns false, and does nothing, where
  // the result would not have the bits of allreduce().
  virtual bool reduce_values(const Reduction&, const Sources&, void* /*destination*/, size_t /*count*/) {
    return false;
  }

  // The same where one array of each node has travelled, of so many bytes; 0 where that would not have the bits of
  // allreduce(). All ranks call add_on_node(), which returns the sum of a node at its first rank, and then add_nodes(),
  // there with the sums of all nodes, in the order of their first ranks.
  struct NodeSum {
    const void* data;
    size_t bytes;
  };
  virtual size_t node_sum_bytes(const Reduction&, size_t /*count*/) const { return 0; }
  virtual NodeSum add_on_node(const Reduction&, const void* /*source*/, size_t /*count*/) { return {nullptr, 0}; }
  virtual void add_nodes(const Reduction&, const Sources& /*sums*/, void* /*destination*/, size_t /*count*/) {}

  // The same in place, where every rank's pieces are in the Arena of the node, or on a GPU in memory of NCCL.
  virtual void allreduce_registered(const Reduction& reduction, const std::vector<Piece>& pieces) {
    allreduce(reduction, pieces);
  }

  // `source` holds total_of(counts) elements. Rank r gets elements [offset of r, + counts[r]) of the reduction, also at
  // their own place in the source.
  virtual void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                              const Counts& counts) = 0;

  // The same for many arrays.
  struct Scattering {
    const void* source;
    void* destination;
    Counts counts;
  };
  virtual void reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) {
    for (const Scattering& array : arrays) reduce_scatter(reduction, array.source, array.destination, array.counts);
  }

  // Rank r gives bytes[r] bytes; `destination` gets all of them, in rank order. The source may be at its own place in
  // the destination.
  virtual void allgather(const void* source, void* destination, const Counts& bytes) = 0;

  // The same of many arrays.
  struct Gathering {
    const void* source;
    void* destination;
    Counts bytes;
  };
  virtual void allgather_all(const std::vector<Gathering>& arrays) {
    for (const Gathering& array : arrays) allgather(array.source, array.destination, array.bytes);
  }

  // As allgather of `bytes` bytes of each rank, where each is made at its own place in `destination`, part by part,
  // while the parts before it travel, and used when the same part of all ranks is there.
  struct Parts {
    std::function<void(size_t begin, size_t bytes)> make, use;
  };
  virtual void allgather_parts(const Parts& parts, void* destination, size_t bytes) {
    parts.make(0, bytes);
    char* all = static_cast<char*>(destination);
    allgather(all + static_cast<size_t>(rank_) * bytes, all, Counts(static_cast<size_t>(size_), bytes));
    parts.use(0, bytes);
  }

  virtual void broadcast(void* data, size_t bytes, int root) = 0;

  // The same for many arrays: `count` bytes at the destination of each piece.
  virtual void broadcast_all(const std::vector<Piece>& pieces, int root) {
    for (const Piece& piece : pieces) broadcast(piece.destination, piece.count, root);
  }

  // send_bytes[r] bytes go to rank r, receive_bytes[r] come from it; both sides laid end to end in rank order.
  virtual void alltoall(const void* source, const Counts& send_bytes, void* destination,
                        const Counts& receive_bytes) = 0;

  virtual void barrier() = 0;

  // For what treats the links between the nodes in another way than those within. Ranks that share no memory are nodes
  // of their own.
  struct Levels {
    Group* node;   // the ranks of this rank's node; null where it is alone
    Group* cross;  // this rank's column: its like on every node; null where it has none, or there is one node
    int nodes, columns;
  };
  virtual Levels levels() { return {nullptr, this, size_, 1}; }

 private:
  const int rank_;
  const int size_;
};

// A Group of one rank: so that nobody has to ask whether the job is distributed.
class SelfGroup final : public Group {
 public:
  SelfGroup() : Group(0, 1) {}
  const char* name() const override { return "self"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override {
    for (const Piece& piece : pieces) reduce_scatter(reduction, piece.source, piece.destination, {piece.count});
  }
  bool reduce_values(const Reduction& reduction, const Sources& sources, void* destination, size_t count) override {
    allreduce(reduction, {{sources.front(), destination, count}});
    return true;
  }
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                      const Counts& counts) override {
    if (source == destination && reduction.scale == 1.0) return;
    reduce(reduction, &destination, 1, &source, 1, counts[0]);
  }
  void allgather(const void* source, void* destination, const Counts& bytes) override {
    copy(destination, source, bytes[0]);
  }
  void broadcast(void*, size_t, int) override {}
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts&) override {
    allgather(source, destination, send_bytes);
  }
  void barrier() override {}
};

// Which of two ways is faster here: tried when a Group is made.
//
// How long work() takes on the slowest rank: the best of a few times, after one that makes connections. All ranks at
// the same time. slowest(seconds) gives all ranks the largest of their numbers.
template <typename Work, typename Slowest>
double probe_s(Work work, Slowest slowest) {
  constexpr int kTimes = 3;
  double best_s = std::numeric_limits<double>::infinity();
  work();
  for (int time = 0; time < kTimes; ++time) {
    const double begin = now_s();
    work();
    best_s = std::min(best_s, now_s() - begin);
  }
  return slowest(best_s);
}

}  // namespace ringtrain
