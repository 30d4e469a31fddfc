#include "collectives/network/hierarchical_group.h"

#include <algorithm>
#include <utility>

#include "collectives/network/packing.h"

namespace ringtrain {
namespace {

// Below, the stages are so short that blocks would only add messages.
constexpr size_t kOverlapFromBytes = 256 << 10;

Reduction unscaled(const Reduction& reduction, DType dtype) { return {dtype, reduction.reduce, 1.0}; }

// Long enough for the messages of the ring to be long; short enough for all stages to be at work most of the time.
size_t block_elements(const HierarchicalGroup::Parts& parts, size_t total, size_t element) {
  constexpr size_t kLine = 64, kMostBytes = 256 << 10, kFewestBytes = 64 << 10, kManyBlocks = 16;
  const auto lanes = static_cast<size_t>(parts.lanes), nodes = parts.ranks.size();
  const size_t fewest = lanes * kFewestBytes / element, most = lanes * nodes * kMostBytes / element;
  return std::clamp(total / kManyBlocks, fewest, most) / kLine * kLine;
}

std::vector<Block> cut(const HierarchicalGroup::Parts& parts, const std::vector<Piece>& arrays, size_t element) {
  size_t total = 0;
  for (const Piece& array : arrays) total += array.count;
  std::vector<Block> blocks;
  for (const Piece& array : arrays)
    for_each_part(array.count, block_elements(parts, total, element), [&](size_t begin, size_t count) {
      blocks.push_back({static_cast<const char*>(array.source) + begin * element,
                        static_cast<char*>(array.destination) + begin * element, parts.lane_counts(count)});
    });
  return blocks;
}

}  // namespace

// One allreduce with its three stages at work at the same time, each on another block.
class HierarchicalGroup::Overlapped {
 public:
  // What 16-bit floats are summed in.
  struct Wide {
    Scratch &block, &slices;
  };
  Overlapped(const Parts& parts, const Reduction& reduction, const std::vector<Piece>& arrays, const Wide& wide);
  void run();

 private:
  // What is left to be done between the nodes, and what comes of it.
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
  // How many blocks may be behind the one that is waited for: the ring needs one for each of its steps.
  const size_t ahead_;
  const std::vector<Block> blocks_;
  size_t longest_slice_ = 0;
  float *wide_block_ = nullptr, *wide_slices_ = nullptr;
  std::unique_ptr<Stream> stream_;  // null when this rank has no lane
};

HierarchicalGroup::Overlapped::Overlapped(const HierarchicalGroup::Parts& parts, const Reduction& reduction,
                                          const std::vector<Piece>& arrays, const Wide& wide)
    : parts_(parts),
      reduction_(reduction),
      is_wide_(is_half(reduction.dtype)),
      dtype_(is_wide_ ? DType::float32 : reduction.dtype),
      element_(size_of(reduction.dtype)),
      ahead_(2 * (parts.ranks.size() - 1) + 1),
      blocks_(cut(parts, arrays, element_)) {
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
  std::vector<Block> slices;
  for (size_t k = 0; k < blocks_.size(); ++k) {
    const Slice own = slice(k);
    slices.push_back({own.source, own.destination, even_slices(own.count, parts.nodes())});
  }
  stream_ = parts.cross->stream(reduction, dtype_, std::move(slices));
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

Counts HierarchicalGroup::Parts::lane_counts(size_t count) const {
  Counts counts = even_slices(count, lanes);
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
                     [&](const auto& of_node) { return of_node.size() == static_cast<size_t>(lanes); });
}

Counts HierarchicalGroup::Parts::of_own_lane(const Counts& counts) const {
  Counts own;
  for (const auto& of_node : ranks) own.push_back(counts[static_cast<size_t>(of_node[place()])]);
  return own;
}

void HierarchicalGroup::barrier() {
  parts_.node->barrier();
  if (parts_.place() == 0) parts_.cross->barrier();
  parts_.node->barrier();
}

void HierarchicalGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  reduce_packed(pieces, size_of(reduction.dtype), packed_,
                [&](const std::vector<Piece>& arrays) { reduce_arrays(reduction, arrays); });
}

void HierarchicalGroup::reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) {
  const size_t element = size_of(reduction.dtype);
  size_t count = 0;
  for (const Piece& array : arrays) count += array.count;
  if (parts_.may_overlap && count * element >= kOverlapFromBytes)
    return Overlapped(parts_, reduction, arrays, {wide_, wide_slices_}).run();
  for (const Piece& array : arrays) reduce_array(reduction, array);
}

void HierarchicalGroup::reduce_array(const Reduction& reduction, const Piece& array) {
  if (is_half(reduction.dtype)) {  // the sums of the nodes would be rounded, or overflow, on their way
    auto* wide = reinterpret_cast<float*>(wide_.get(array.count * sizeof(float)));
    widen(reduction.dtype, wide, array.source, array.count);
    reduce_array(unscaled(reduction, DType::float32), {wide, wide, array.count});
    return narrow(reduction.dtype, reduction.scale, array.destination, wide, array.count);
  }
  const Counts counts = parts_.lane_counts(array.count);
  const Counts bytes = in_bytes(counts, size_of(reduction.dtype));
  char* slice = static_cast<char*>(array.destination) + offsets_of(bytes)[parts_.place()];
  parts_.node->reduce_scatter(unscaled(reduction, reduction.dtype), array.source, slice, counts);
  if (parts_.cross) parts_.cross->allreduce(reduction, {{slice, slice, counts[parts_.place()]}});
  parts_.node->allgather(slice, array.destination, bytes);
}

}  // namespace ringtrain
