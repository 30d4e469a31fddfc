#include "collectives/network/hierarchical_group.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <tuple>

#include "collectives/network/algorithms.h"
#include "collectives/network/packing.h"
#include "kernels/copy.h"

namespace ringtrain {
namespace {

constexpr size_t kFewestBytes =
    256 << 10;  // of a block, for each column: the ranks of a node meet twice for each block

// Below, there would be less than two blocks, and an allreduce in blocks takes a hop more than a doubling. But sums of
// 16-bit floats travel in 32 bits where the stages follow each other.
size_t overlap_from_bytes(DType dtype, int columns) {
  return static_cast<size_t>(columns) * (is_half(dtype) ? kFewestBytes / 2 : 2 * kFewestBytes);
}

Reduction unscaled(const Reduction& reduction, DType dtype) { return {dtype, reduction.reduce, 1.0}; }

// Each block behind the first costs a hop, and of the time of shared memory n blocks hide all but an n-th.
double best_blocks(double bytes, double hop_s) {
  constexpr double kSharedPerSecond = 4e8;  // bytes, at least
  return std::max(1.0, std::sqrt(bytes / kSharedPerSecond / hop_s));
}

// Long enough for the messages of the ring to be long; short enough for all stages to be at work most of the time.
size_t block_elements(const HierarchicalGroup::Parts& parts, size_t total, size_t element, Way way) {
  constexpr size_t kLine = 64, kMostBytes = 256 << 10, kManyBlocks = 16, kFewSlices = 4;
  constexpr size_t kLongestBytes = 64 << 20;  // 16-bit floats have memory for a block of sums
  const size_t columns = static_cast<size_t>(parts.columns);
  const auto best = static_cast<size_t>(best_blocks(static_cast<double>(total * element), parts.chooser.hop_s()));
  // In halving a message has a part of a block that does not depend on the number of nodes.
  const size_t nodes = way == Way::halving ? kFewSlices : parts.ranks.size();
  const size_t fewest = columns * kFewestBytes / element, most = columns * nodes * kMostBytes / element;
  const size_t usual =
      best < kManyBlocks ? std::min(total / best, kLongestBytes / element) : std::min(total / kManyBlocks, most);
  return (std::max(usual, fewest) + kLine - 1) / kLine * kLine;
}

// Each array by itself where the owners of its elements matter.
std::vector<Block> cut(const HierarchicalGroup::Parts& parts, const std::vector<Piece>& arrays, size_t element,
                       const Summing& summing, Way way) {
  const size_t all = count_of(arrays);
  std::vector<Block> blocks;
  for (const Piece& array : arrays)
    for_each_part(
        array.count, block_elements(parts, has_owners(summing.order) ? array.count : all, element, way),
        [&](size_t begin, size_t count) {
          blocks.push_back({static_cast<const char*>(array.source) + begin * element,
                            static_cast<char*>(array.destination) + begin * element, parts.column_counts(count)});
        });
  return blocks;
}

constexpr size_t kBlockBytes = 1 << 20;

// Calls visit(pieces) for blocks of at most kBlockBytes, with several pieces or a part of one.
template <typename Visit>
void for_each_block(const std::vector<Piece>& pieces, Visit visit) {
  std::vector<Piece> block;
  size_t bytes = 0;
  const auto end = [&] {
    if (!block.empty()) visit(block);
    block.clear();
    bytes = 0;
  };
  for (const Piece& piece : pieces)
    for_each_part(piece.count, kBlockBytes, [&](size_t begin, size_t count) {
      if (bytes + count > kBlockBytes) end();
      char* data = static_cast<char*>(piece.destination) + begin;
      block.push_back({data, data, count});
      bytes += count;
    });
  end();
}

constexpr int64_t kLongBytes = 16 << 10;

// The counts of all ranks, cut into runs of whole nodes, for the stages in the shared memory of one node.
//
// Nodes that follow each other, and what of some counts is theirs. Every node has as many ranks.
class NodeRun {
 public:
  // From node `begin` on, as many nodes as have kShort elements together, but at least one: so that what is long is cut
  // where it needs no copy, and what is short takes few steps.
  NodeRun(const std::vector<std::vector<int>>& ranks, const Counts& counts, size_t begin)
      : ranks_(ranks), begin_(begin), end_(begin), columns_(ranks.front().size()) {
    size_t total = 0;
    do {
      for (size_t place = 0; place < columns_.size(); ++place) {
        const size_t count = counts[static_cast<size_t>(ranks[end_][place])];
        columns_[place] += count;
        total += count;
      }
      ++end_;
    } while (end_ < ranks.size() && total < kShort);
  }

  size_t end() const { return end_; }
  // By place: the counts of the ranks with that place.
  const Counts& columns() const { return columns_; }
  // Whether in the order of columns the ranks are in their own order, without another between.
  bool is_in_order() const {
    int next = ranks_[begin_][0];
    bool is = true;
    for_each([&](size_t rank) { is = is && static_cast<int>(rank) == next++; });
    return is;
  }
  size_t first_rank() const { return static_cast<size_t>(ranks_[begin_][0]); }
  // Calls visit(rank) by place, and for a place by node.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (size_t place = 0; place < columns_.size(); ++place)
      for (size_t node = begin_; node < end_; ++node) visit(static_cast<size_t>(ranks_[node][place]));
  }

 private:
  static constexpr size_t kShort = 64 << 10;

  const std::vector<std::vector<int>>& ranks_;
  size_t begin_, end_;
  Counts columns_;
};

// Calls visit(run) for all nodes, in order.
template <typename Visit>
void for_each_run(const std::vector<std::vector<int>>& ranks, const Counts& counts, Visit visit) {
  for (size_t node = 0; node < ranks.size();) {
    const NodeRun run(ranks, counts, node);
    visit(run);
    node = run.end();
  }
}

}  // namespace

// One allreduce with its three stages at work at the same time, each on another block.
class HierarchicalGroup::Overlapped {
 public:
  // The dtype in which 16-bit floats are summed.
  struct Wide {
    Scratch &block, &slices;
  };
  Overlapped(const Parts& parts, const Summing& summing, Way way, const Reduction& reduction,
             const std::vector<Piece>& arrays, const Wide& wide);
  void run();

 private:
  // The work that is left between the nodes, and its result.
  struct Slice {
    char *source, *destination;
    size_t count;  // elements
  };
  Slice slice(size_t k) const;

  void reduce_on_node(size_t k);
  void gather_on_node(size_t k);

  const Parts& parts_;
  const Reduction reduction_;
  const bool is_wide_;
  const DType dtype_;     // of the sums
  const size_t element_;  // bytes of a result
  const std::vector<Block> blocks_;
  // How many blocks may be behind the one that is waited for: one for each step between the nodes, if there are as
  // many.
  const size_t ahead_;
  size_t longest_slice_ = 0;
  float *wide_block_ = nullptr, *wide_slices_ = nullptr;
  std::unique_ptr<Stream> stream_;  // null when this rank has no column
};

HierarchicalGroup::Overlapped::Overlapped(const HierarchicalGroup::Parts& parts, const Summing& summing, Way way,
                                          const Reduction& reduction, const std::vector<Piece>& arrays,
                                          const Wide& wide)
    : parts_(parts),
      reduction_(reduction),
      is_wide_(is_half(reduction.dtype)),
      dtype_(is_wide_ ? DType::float32 : reduction.dtype),
      element_(size_of(reduction.dtype)),
      blocks_(cut(parts, arrays, element_, summing, way)),
      ahead_(std::min(parts.chooser.steps(way) + 1, blocks_.size())) {
  size_t longest = 0;
  for (const Block& block : blocks_) {
    longest = std::max(longest, total_of(block.counts));
    longest_slice_ = std::max(longest_slice_, block.counts[parts.place()]);
  }
  if (is_wide_) {
    wide_block_ = reinterpret_cast<float*>(wide.block.get(longest * sizeof(float)));
    wide_slices_ = reinterpret_cast<float*>(wide.slices.get((ahead_ + 1) * longest_slice_ * sizeof(float)));
  }
  if (!parts.cross) return;
  std::vector<Piece> slices;
  for (size_t k = 0; k < blocks_.size(); ++k) {
    const Slice own = slice(k);
    slices.push_back({own.source, own.destination, own.count});
  }
  stream_ = parts.cross->stream(way, summing, reduction, dtype_, slices);
}

HierarchicalGroup::Overlapped::Slice HierarchicalGroup::Overlapped::slice(size_t k) const {
  const Block& block = blocks_[k];
  char* destination = block.destination + offsets_of(block.counts)[parts_.place()] * element_;
  char* wide = reinterpret_cast<char*>(wide_slices_ + k % (ahead_ + 1) * longest_slice_);
  return {is_wide_ ? wide : destination, destination, block.counts[parts_.place()]};
}

// In this order on all ranks of a node, since they meet in both stages.
void HierarchicalGroup::Overlapped::run() {
  const StreamWatch::Attendance attendance(*parts_.watch, stream_.get());
  for (size_t k = 0; k < blocks_.size() + ahead_; ++k) {
    if (k < blocks_.size()) reduce_on_node(k);
    if (k >= ahead_) gather_on_node(k - ahead_);
  }
}

void HierarchicalGroup::Overlapped::reduce_on_node(size_t k) {
  const Block& block = blocks_[k];
  const void* source = block.source;
  if (is_wide_) {
    widen(reduction_.dtype, wide_block_, source, total_of(block.counts));
    source = wide_block_;
  }
  parts_.node->reduce_scatter({dtype_, reduction_.reduce, 1.0}, source, slice(k).source, block.counts);
  if (!stream_) return;
  stream_->release();
  stream_->step();
}

void HierarchicalGroup::Overlapped::gather_on_node(size_t k) {
  if (stream_) stream_->wait_for(k);
  parts_.node->allgather(slice(k).destination, blocks_[k].destination, in_bytes(blocks_[k].counts, element_));
}

Counts HierarchicalGroup::Parts::column_counts(size_t count) const {
  Counts counts = even_slices(count, columns);
  counts.resize(static_cast<size_t>(node->size()));
  return counts;
}

HierarchicalGroup::Parts::Seat HierarchicalGroup::Parts::seat_of(int rank) const {
  for (size_t node = 0; node < ranks.size(); ++node) {
    const auto place = std::find(ranks[node].begin(), ranks[node].end(), rank);
    if (place != ranks[node].end()) return {static_cast<int>(node), static_cast<int>(place - ranks[node].begin())};
  }
  throw failure("rank " + std::to_string(rank) + " is on no node of its group");
}

bool HierarchicalGroup::Parts::is_even() const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](const auto& of_node) { return of_node.size() == static_cast<size_t>(columns); });
}

Counts HierarchicalGroup::Parts::of_own_column(const Counts& counts) const {
  Counts own;
  for (const auto& of_node : ranks) own.push_back(counts[static_cast<size_t>(of_node[place()])]);
  return own;
}

AlgorithmChoices HierarchicalGroup::choices(int columns, bool is_even, bool may_overlap, const PartChoices& parts) {
  const std::string none = "allreduce_algorithm=ring for no hierarchy";
  // 16-bit floats are widened inside a host.
  const auto is_widened = [](const AlgorithmChoice& choice) {
    return choice.operation.find(NetworkGroup::of_16_bit_floats) != std::string::npos;
  };
  const size_t overlapped_from = overlap_from_bytes(DType::float32, columns);
  AlgorithmChoices all;
  for (const AlgorithmChoice& choice : parts.cross) {
    const bool is_by_rank = choice.operation == "allgather" || choice.operation == "reducescatter";
    const bool is_reduction = choice.operation == "allreduce" || choice.operation == "reducescatter";
    if (is_reduction && parts.by_ranks) continue;
    if (choice.operation == "alltoall" || (is_by_rank && !is_even) || is_widened(choice)) continue;
    // Each column has its share of the array but in a broadcast, where one column has all of it.
    const size_t share = choice.operation == "broadcast" ? 1 : static_cast<size_t>(columns);
    const size_t from_bytes = choice.from_bytes * share;
    if (choice.operation == "allreduce" && may_overlap && from_bytes >= overlapped_from) continue;
    all.push_back(
        {choice.operation, from_bytes, "shared memory in each host; between hosts: " + choice.algorithm,
         (is_reduction ? "cross_algorithm, ring_from_kb, link_hop_us, link_gbit; " : "cross_algorithm=ring; ") + none});
  }
  if (may_overlap && !parts.by_ranks) {
    const auto way_of = [&](size_t bytes) {
      const size_t count = bytes / sizeof(float) / static_cast<size_t>(columns);
      const Reduction sum = {DType::float32};
      return parts.chooser.for_blocks(parts.chooser.summing(sum, count), sum, count).value_or(Way::doubling);
    };
    AlgorithmChoices overlapped;
    for (const Chooser::Choice& choice : Chooser::choices(way_of)) {
      if (choice.from_bytes <= overlapped_from) overlapped.clear();
      const bool is_ring = choice.way == Way::ring, is_exchange = choice.way == Way::exchange;
      overlapped.push_back({"allreduce", std::max(choice.from_bytes, overlapped_from),
                            std::string("shared memory in each host, and at the same time ") +
                                (is_ring       ? "a ring"
                                 : is_exchange ? "an exchange"
                                               : "halving and doubling") +
                                " between hosts" + (is_ring ? parts.shares : ""),
                            "link_rates; cross_algorithm=mpi for one after the other; " + none});
    }
    all.insert(all.end(), overlapped.begin(), overlapped.end());
  }
  if (is_even) all.push_back({"alltoall", 0, "one message for each pair of hosts, through shared memory", ""});
  for (const AlgorithmChoice& choice : parts.flat) {
    const bool is_by_rank =
        choice.operation.rfind("allgather", 0) == 0 || choice.operation.rfind("reducescatter", 0) == 0;
    const bool is_reduction =
        choice.operation.rfind("allreduce", 0) == 0 || choice.operation.rfind("reducescatter", 0) == 0;
    if (choice.operation == "alltoall")
      all.push_back(
          {choice.operation, is_even ? static_cast<size_t>(kLongBytes) : 0, choice.algorithm, choice.options});
    else if ((is_by_rank && !is_even) || (parts.by_ranks && is_reduction))
      all.push_back(choice);
  }
  std::stable_sort(all.begin(), all.end(), [](const AlgorithmChoice& one, const AlgorithmChoice& other) {
    return std::tie(one.operation, one.from_bytes) < std::tie(other.operation, other.from_bytes);
  });
  return all;
}

void HierarchicalGroup::barrier() {
  parts_.node->barrier();
  if (parts_.place() == 0) parts_.cross->barrier();
  parts_.node->barrier();
}

bool HierarchicalGroup::may_overlap(DType dtype, size_t count) const {
  return parts_.may_overlap && count * size_of(dtype) >= overlap_from_bytes(dtype, parts_.columns);
}

void HierarchicalGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  if (adds_by_ranks(reduction)) return flat_->allreduce(reduction, pieces);
  const auto kind_of = [&](const Piece& piece) { return summing_of(reduction, piece.count); };
  for_each_kind(pieces, kind_of, [&](const Summing& summing, const std::vector<Piece>& some) {
    const auto reduce = [&](const std::vector<Piece>& arrays) { reduce_arrays(summing, reduction, arrays); };
    if (has_owners(summing.order))
      reduce(some);
    else
      reduce_packed(some, size_of(reduction.dtype), packed_, reduce);
  });
}

Summing HierarchicalGroup::summing_of(const Reduction& reduction, size_t count) const {
  const size_t columns = static_cast<size_t>(parts_.columns);
  return parts_.chooser.summing(reduction, count / columns, may_overlap(reduction.dtype, count));
}

// The ranks of a doubling can add up the sums of all nodes themselves, in the same tree.
size_t HierarchicalGroup::node_sum_bytes(const Reduction& reduction, size_t count) const {
  if (adds_by_ranks(reduction)) return 0;
  const Summing summing = summing_of(reduction, count);
  const Reduction sum = unscaled(reduction, wide(reduction.dtype));
  const size_t column = count / static_cast<size_t>(parts_.columns);
  const bool is_doubling = !summing.is_narrowed && parts_.chooser.for_summing(summing, sum, column) == Way::doubling;
  return is_doubling ? count * size_of(sum.dtype) : 0;
}

Group::NodeSum HierarchicalGroup::add_on_node(const Reduction& reduction, const void* source, size_t count) {
  const DType dtype = wide(reduction.dtype);
  const size_t bytes = count * size_of(dtype);
  if (is_half(reduction.dtype)) {
    char* const wide = wide_.get(bytes);
    widen(reduction.dtype, reinterpret_cast<float*>(wide), source, count);
    source = wide;
  }
  const bool is_first = parts_.place() == 0;
  Counts counts(static_cast<size_t>(parts_.node->size()));
  counts.front() = count;
  char* const sum = is_first ? node_sum_.get(bytes) : nullptr;
  parts_.node->reduce_scatter(unscaled(reduction, dtype), source, sum, counts);
  return {sum, is_first ? bytes : 0};
}

void HierarchicalGroup::add_nodes(const Reduction& reduction, const Sources& sums, void* destination, size_t count) {
  if (parts_.place() == 0) {
    std::vector<size_t> nodes(sums.size());
    std::iota(nodes.begin(), nodes.end(), size_t{0});
    std::sort(nodes.begin(), nodes.end(),
              [&](size_t one, size_t other) { return parts_.ranks[one].front() < parts_.ranks[other].front(); });
    Sources by_node(sums.size());
    for (size_t i = 0; i < nodes.size(); ++i) by_node[nodes[i]] = sums[i];
    if (is_half(reduction.dtype)) {
      auto* const wide = reinterpret_cast<float*>(wide_.get(count * sizeof(float)));
      reduce_by_tree(unscaled(reduction, DType::float32), DType::float32, by_node, wide, count, tree_);
      narrow(reduction.dtype, reduction.scale, destination, wide, count);
    } else {
      reduce_by_tree(reduction, reduction.dtype, by_node, destination, count, tree_);
    }
  }
  parts_.node->broadcast(destination, count * size_of(reduction.dtype), 0);
}

void HierarchicalGroup::reduce_arrays(const Summing& summing, const Reduction& reduction,
                                      const std::vector<Piece>& arrays) {
  const size_t count = count_of(arrays);
  if (count == 0) return;
  std::optional<Way> way;
  if ((parts_.may_overlap && has_owners(summing.order)) || may_overlap(reduction.dtype, count))
    way = parts_.chooser.for_blocks(summing, reduction, count / static_cast<size_t>(parts_.columns));
  if (way) return Overlapped(parts_, summing, *way, reduction, arrays, {wide_, wide_slices_}).run();
  for (const Piece& array : arrays) reduce_array(summing, reduction, array);
}

void HierarchicalGroup::reduce_array(const Summing& summing, const Reduction& reduction, const Piece& array) {
  if (is_half(reduction.dtype)) {  // the sums of the nodes would be rounded, or overflow, on their way
    auto* wide = reinterpret_cast<float*>(wide_.get(array.count * sizeof(float)));
    widen(reduction.dtype, wide, array.source, array.count);
    reduce_array(summing, unscaled(reduction, DType::float32), {wide, wide, array.count});
    return narrow(reduction.dtype, reduction.scale, array.destination, wide, array.count);
  }
  const Counts counts = parts_.column_counts(array.count);
  const Counts bytes = in_bytes(counts, size_of(reduction.dtype));
  char* slice = static_cast<char*>(array.destination) + offsets_of(bytes)[parts_.place()];
  parts_.node->reduce_scatter(unscaled(reduction, reduction.dtype), array.source, slice, counts);
  if (parts_.cross) parts_.cross->allreduce_of(summing, reduction, {{slice, slice, counts[parts_.place()]}});
  parts_.node->allgather(slice, array.destination, bytes);
}

// An allgather over several nodes: each column gathers what its own ranks have, and a node's ranks tell each other what
// their columns have gathered.

void HierarchicalGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  if (!parts_.is_even()) return flat_->allgather(source, destination, bytes);
  const Counts own_column = parts_.of_own_column(bytes), offsets = offsets_of(bytes);
  char* own = own_column_.get(total_of(own_column));
  parts_.cross->allgather(source, own, own_column);
  for_each_run(parts_.ranks, bytes, [&](const NodeRun& run) {
    const bool is_in_order = run.is_in_order();
    char* there = static_cast<char*>(destination);
    char* gathered = is_in_order ? there + offsets[run.first_rank()] : run_.get(total_of(run.columns()));
    parts_.node->allgather(own, gathered, run.columns());
    own += run.columns()[parts_.place()];
    if (is_in_order) return;
    run.for_each([&](size_t rank) {
      copy(there + offsets[rank], gathered, bytes[rank]);
      gathered += bytes[rank];
    });
  });
}

void HierarchicalGroup::allgather_all(const std::vector<Gathering>& arrays) {
  gather_packed(arrays, rank(), packed_,
                [&](const Gathering& array) { allgather(array.source, array.destination, array.bytes); });
}

// A reduce-scatter over several nodes: on each node the ranks of a place reduce what their column's ranks will own, and
// the column reduces and divides it. 16-bit floats are widened on the way into the node, and rounded at the end.

void HierarchicalGroup::reduce_scatter_by(Way way, const Reduction& reduction, const Scattering& array) {
  const void* const source = array.source;
  void* const destination = array.destination;
  const Counts& counts = array.counts;
  const bool is_wide = is_half(reduction.dtype);
  const DType dtype = wide(reduction.dtype);
  const size_t given = size_of(reduction.dtype), element = size_of(dtype);
  const Counts own_column = parts_.of_own_column(counts), offsets = offsets_of(counts);
  const auto part_of = [&](size_t rank) { return static_cast<const char*>(source) + offsets[rank] * given; };

  char* of_node = own_column_.get(total_of(own_column) * element);
  char* next = of_node;
  for_each_run(parts_.ranks, counts, [&](const NodeRun& run) {
    const void* by_column = part_of(run.first_rank());
    if (is_wide || !run.is_in_order()) {
      char* copy = run_.get(total_of(run.columns()) * element);
      by_column = copy;
      run.for_each([&](size_t rank) {
        if (is_wide)
          widen(reduction.dtype, reinterpret_cast<float*>(copy), part_of(rank), counts[rank]);
        else
          std::copy_n(part_of(rank), counts[rank] * element, copy);
        copy += counts[rank] * element;
      });
    }
    parts_.node->reduce_scatter({dtype, reduction.reduce}, by_column, next, run.columns());
    next += run.columns()[parts_.place()] * element;
  });
  if (!is_wide) return parts_.cross->reduce_scatter_by(way, reduction, {of_node, destination, own_column});
  const size_t count = own_column[static_cast<size_t>(parts_.own_node)];
  auto* sums = reinterpret_cast<float*>(run_.get(count * element));
  parts_.cross->reduce_scatter_by(way, {dtype, reduction.reduce}, {of_node, sums, own_column});
  narrow(reduction.dtype, reduction.scale, destination, sums, count);
}

void HierarchicalGroup::reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) {
  if (!parts_.is_even() || adds_by_ranks(reduction)) return flat_->reduce_scatter_all(reduction, arrays);
  const Reduction sum = {wide(reduction.dtype), reduction.reduce};
  const auto columns = static_cast<size_t>(parts_.columns);
  for_each_way(parts_.chooser, sum, columns, arrays, [&](Way way, const std::vector<Scattering>& some) {
    scatter_packed(some, rank(), size_of(reduction.dtype), packed_,
                   [&](const Scattering& array) { reduce_scatter_by(way, reduction, array); });
  });
}

// A broadcast over several nodes: along the column of the root, and from there to all of each node, block by block.
// While a node copies a block, the network takes in the next one.
//
// A root without a column first gives its node the data, which the first column then takes to the other nodes.

void HierarchicalGroup::broadcast_all(const std::vector<Piece>& pieces, int root) {
  const Parts::Seat seat = parts_.seat_of(root);
  const bool has_column = seat.place < parts_.columns;
  const int column = has_column ? seat.place : 0;
  const bool is_on_node = parts_.own_node == seat.node;

  for_each_block(pieces, [&](const std::vector<Piece>& block) {
    if (!has_column && is_on_node) parts_.node->broadcast_all(block, seat.place);
    if (parts_.node->rank() == column) parts_.cross->broadcast_all(block, seat.node);
    if (has_column || !is_on_node) parts_.node->broadcast_all(block, column);
  });
}

// An alltoall over several nodes: the ranks of a node give each column what is for its ranks, on whatever node, and the
// columns exchange it, in one message for each node in place of one for each rank.
//
// This adds two copies, so long messages go straight to their ranks. Nobody knows all sizes, so the longest one is
// agreed on first, and the ranks of a node tell each other what they send.

void HierarchicalGroup::alltoall(const void* source, const Counts& send_bytes, void* destination,
                                 const Counts& receive_bytes) {
  const auto straight = [&] { flat_->alltoall(source, send_bytes, destination, receive_bytes); };
  if (!parts_.is_even()) return straight();
  auto longest = static_cast<int64_t>(std::max(*std::max_element(send_bytes.begin(), send_bytes.end()),
                                               *std::max_element(receive_bytes.begin(), receive_bytes.end())));
  for (Group* level : {parts_.node.get(), static_cast<Group*>(parts_.cross.get())})
    level->allreduce({DType::int64, Reduce::max}, {{&longest, &longest, 1}});
  if (longest >= kLongBytes) return straight();

  // By place and rank: what the ranks of this node send.
  const size_t mates = static_cast<size_t>(parts_.columns), size = send_bytes.size();
  Counts sent_by_mates(mates * size);
  parts_.node->allgather(send_bytes.data(), sent_by_mates.data(), Counts(mates, size * sizeof(size_t)));
  const auto sent_by = [&](size_t mate, int rank) { return sent_by_mates[mate * size + static_cast<size_t>(rank)]; };

  // To the columns of this node.
  const Counts send_offsets = offsets_of(send_bytes);
  char* by_column = run_.get(total_of(send_bytes));
  char* next = by_column;
  Counts to_columns, from_mates;
  for (size_t place = 0; place < mates; ++place) {
    const char* begin = next;
    size_t from_mate = 0;
    for (const auto& of_node : parts_.ranks) {
      const auto to = static_cast<size_t>(of_node[place]);
      copy(next, static_cast<const char*>(source) + send_offsets[to], send_bytes[to]);
      next += send_bytes[to];
      from_mate += sent_by(place, of_node[parts_.place()]);
    }
    to_columns.push_back(static_cast<size_t>(next - begin));
    from_mates.push_back(from_mate);
  }
  char* of_mates = own_column_.get(total_of(from_mates));
  parts_.node->alltoall(by_column, to_columns, of_mates, from_mates);

  // The data that arrived is ordered by mate and node. It is sent, and arrives from other nodes, by node and mate.
  Counts to_nodes, from_nodes, mate_offsets = offsets_of(from_mates);
  char* by_node = run_.get(total_of(from_mates));
  next = by_node;
  for (const auto& of_node : parts_.ranks) {
    const char* begin = next;
    for (size_t mate = 0; mate < mates; ++mate) {
      const size_t bytes = sent_by(mate, of_node[parts_.place()]);
      next = std::copy_n(of_mates + mate_offsets[mate], bytes, next);
      mate_offsets[mate] += bytes;
    }
    to_nodes.push_back(static_cast<size_t>(next - begin));
    size_t bytes = 0;
    for (const int rank : of_node) bytes += receive_bytes[static_cast<size_t>(rank)];
    from_nodes.push_back(bytes);
  }
  char* arrived = arrived_.get(total_of(receive_bytes));
  parts_.cross->alltoall(by_node, to_nodes, arrived, from_nodes);
  const Counts receive_offsets = offsets_of(receive_bytes);
  for (const auto& of_node : parts_.ranks)
    for (const int rank : of_node) {
      const auto from = static_cast<size_t>(rank);
      copy(static_cast<char*>(destination) + receive_offsets[from], arrived, receive_bytes[from]);
      arrived += receive_bytes[from];
    }
}

}  // namespace ringtrain
