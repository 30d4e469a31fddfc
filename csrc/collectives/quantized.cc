#include "collectives/quantized.h"

#include <algorithm>

namespace ringtrain {
namespace {

using Tensor = Quantized::Tensor;

// The tensors with the sums of this node as their sources.
std::vector<Tensor> summed_on_node(const Group::Levels& levels, double factor, std::vector<Tensor> tensors) {
  const Reduction reduction = {DType::float32, Reduce::sum, factor};
  if (levels.node) {
    std::vector<Piece> pieces;
    for (const Tensor& tensor : tensors) pieces.push_back(tensor.piece);
    levels.node->allreduce(reduction, pieces);
  } else if (factor == 1.0) {
    return tensors;
  }
  for (Tensor& tensor : tensors) {
    Piece& piece = tensor.piece;
    if (!levels.node) scale(DType::float32, factor, piece.destination, piece.source, piece.count);
    piece.source = piece.destination;
  }
  return tensors;
}

}  // namespace

// One allreduce.
class Quantized::Operation {
 public:
  Operation(const Group::Levels& levels, const Quantizer& quantizer, double factor, const std::vector<Tensor>& sums,
            Scratch& memory);
  void run();

 private:
  // The part of one tensor that a column has, and the place of its codes among those of the column.
  struct Slice {
    const float* sum;
    float *residual, *result;
    size_t count, codes_begin;
  };
  struct Column {
    std::vector<Slice> slices = {};
    size_t bytes = 0;   // of the codes of one node
    size_t offset = 0;  // of the codes of all nodes
  };

  // Calls visit(slice, first element, count, offset of its codes) for what has codes in [begin, begin + bytes).
  template <typename Visit>
  void for_each_part(const Column& column, size_t begin, size_t bytes, Visit visit) const;
  uint8_t* codes(const Column& column, size_t node) const { return codes_ + column.offset + node * column.bytes; }
  void quantize_part(const Column& column, size_t node, size_t begin, size_t bytes);
  void add_up_part(const Column& column, size_t begin, size_t bytes);
  void gather_own_column(const Column& column);
  void gather_on_node();

  const Group::Levels levels_;
  const Quantizer quantizer_;
  const double factor_;
  const size_t nodes_, place_;
  std::vector<Column> columns_;
  uint8_t* codes_;  // of all columns, each with those of all nodes
};

Quantized::Operation::Operation(const Group::Levels& levels, const Quantizer& quantizer, double factor,
                                const std::vector<Tensor>& sums, Scratch& memory)
    : levels_(levels),
      quantizer_(quantizer),
      factor_(factor),
      nodes_(static_cast<size_t>(levels.nodes)),
      place_(levels.node ? static_cast<size_t>(levels.node->rank()) : 0),
      columns_(static_cast<size_t>(levels.columns)) {
  for (const Tensor& tensor : sums) {
    const Counts counts = even_slices(tensor.piece.count, levels.columns), offsets = offsets_of(counts);
    for (size_t i = 0; i < columns_.size(); ++i) {
      Column& column = columns_[i];
      column.slices.push_back({static_cast<const float*>(tensor.piece.source) + offsets[i],
                               tensor.residual + offsets[i], static_cast<float*>(tensor.piece.destination) + offsets[i],
                               counts[i], column.bytes});
      column.bytes += quantized_bytes(quantizer.kind, counts[i]);
    }
  }
  size_t total = 0;
  for (Column& column : columns_) {
    column.offset = total;
    total += nodes_ * column.bytes;
  }
  codes_ = reinterpret_cast<uint8_t*>(memory.get(total));
}

void Quantized::Operation::run() {
  if (place_ < columns_.size()) gather_own_column(columns_[place_]);
  if (!levels_.node) return;
  gather_on_node();
  for (const Column& column : columns_) add_up_part(column, 0, column.bytes);
}

// A rank that is alone on its node adds up what has come while the rest is on its way.
void Quantized::Operation::gather_own_column(const Column& column) {
  const size_t own = levels_.cross ? static_cast<size_t>(levels_.cross->rank()) : 0;
  const auto make = [&](size_t begin, size_t bytes) { quantize_part(column, own, begin, bytes); };
  const auto use = [&](size_t begin, size_t bytes) {
    if (!levels_.node) add_up_part(column, begin, bytes);
  };
  if (levels_.cross)
    levels_.cross->allgather_parts({make, use}, codes(column, 0), column.bytes);
  else
    make(0, column.bytes);
}

void Quantized::Operation::gather_on_node() {
  Counts bytes(static_cast<size_t>(levels_.node->size()));
  for (size_t i = 0; i < columns_.size(); ++i) bytes[i] = nodes_ * columns_[i].bytes;
  levels_.node->allgather(place_ < columns_.size() ? codes(columns_[place_], 0) : codes_, codes_, bytes);
}

template <typename Visit>
void Quantized::Operation::for_each_part(const Column& column, size_t begin, size_t bytes, Visit visit) const {
  constexpr size_t kWordBytes = 4;
  const size_t elements = elements_per_word(quantizer_.kind);
  const auto begins_after = [&](size_t offset, const Slice& slice) { return offset < slice.codes_begin; };
  auto slice = std::upper_bound(column.slices.begin(), column.slices.end(), begin, begins_after);
  if (slice != column.slices.begin()) --slice;
  for (; slice != column.slices.end() && slice->codes_begin < begin + bytes; ++slice) {
    const size_t from = std::max(begin, slice->codes_begin),
                 first = (from - slice->codes_begin) / kWordBytes * elements;
    if (first >= slice->count) continue;
    const size_t count = std::min(slice->count - first, (begin + bytes - from) / kWordBytes * elements);
    visit(*slice, first, count, from);
  }
}

void Quantized::Operation::quantize_part(const Column& column, size_t node, size_t begin, size_t bytes) {
  for_each_part(column, begin, bytes, [&](const Slice& slice, size_t first, size_t count, size_t offset) {
    quantize(quantizer_, slice.sum + first, slice.residual + first, count, codes(column, node) + offset);
  });
}

void Quantized::Operation::add_up_part(const Column& column, size_t begin, size_t bytes) {
  constexpr size_t kBlockBytes = 4096;  // what they mean stays in the cache
  for (size_t block = begin; block < begin + bytes; block += kBlockBytes)
    for_each_part(column, block, std::min(kBlockBytes, begin + bytes - block),
                  [&](const Slice& slice, size_t first, size_t count, size_t offset) {
                    float* result = slice.result + first;
                    dequantize(quantizer_, codes(column, 0) + offset, result, count);
                    for (size_t node = 1; node < nodes_; ++node)
                      add_dequantized(quantizer_, codes(column, node) + offset, result, count);
                    if (factor_ != 1.0) scale(DType::float32, factor_, result, result, count);
                  });
}

void Quantized::allreduce(Group& group, const Quantizer& quantizer, const Scales& scales,
                          const std::vector<Tensor>& tensors) {
  const Group::Levels levels = group.levels();
  Operation(levels, quantizer, scales.after, summed_on_node(levels, scales.before, tensors), codes_).run();
}

}  // namespace ringtrain
