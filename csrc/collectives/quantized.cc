#include "collectives/quantized.h"

#include <algorithm>

namespace ringtrain {
namespace {

using Tensor = Quantized::Tensor;

// Calls visit(lane, begin, count) for each slice of the tensor that is not empty. Slices begin on whole words of codes.
template <typename Visit>
void for_each_slice(const Tensor& tensor, int lanes, Visit visit) {
  const Counts counts = even_slices(tensor.piece.count, lanes), offsets = offsets_of(counts);
  for (size_t lane = 0; lane < counts.size(); ++lane)
    if (counts[lane] > 0) visit(lane, offsets[lane], counts[lane]);
}

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

size_t place_of(const Group::Levels& levels) { return levels.node ? static_cast<size_t>(levels.node->rank()) : 0; }

void add_up(const Quantizer& quantizer, double factor, const std::vector<const uint8_t*>& codes, float* values,
            size_t count) {
  constexpr size_t kBlock = 1 << 14;  // stays in the cache, and begins on a whole word
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t some = std::min(kBlock, count - begin), offset = quantized_bytes(quantizer.kind, begin);
    dequantize(quantizer, codes.front() + offset, values + begin, some);
    for (size_t node = 1; node < codes.size(); ++node)
      add_dequantized(quantizer, codes[node] + offset, values + begin, some);
    if (factor != 1.0) scale(DType::float32, factor, values + begin, values + begin, some);
  }
}

}  // namespace

Quantized::Codes Quantized::make_room(const Group::Levels& levels, const Quantizer& quantizer,
                                      const std::vector<Tensor>& tensors) {
  Codes codes;
  codes.nodes = static_cast<size_t>(levels.nodes);
  codes.lane_bytes.resize(static_cast<size_t>(levels.lanes));
  for (const Tensor& tensor : tensors)
    for_each_slice(tensor, levels.lanes, [&](size_t lane, size_t, size_t count) {
      codes.lane_bytes[lane] += quantized_bytes(quantizer.kind, count);
    });
  Counts all = in_bytes(codes.lane_bytes, codes.nodes);
  codes.offsets = offsets_of(all);
  codes.data = reinterpret_cast<uint8_t*>(codes_.get(total_of(all)));
  return codes;
}

void Quantized::allreduce(Group& group, const Quantizer& quantizer, const Scales& scales,
                          const std::vector<Tensor>& tensors) {
  const Group::Levels levels = group.levels();
  const std::vector<Tensor> sums = summed_on_node(levels, scales.before, tensors);
  const Codes codes = make_room(levels, quantizer, tensors);
  const size_t place = place_of(levels);

  if (place < codes.lane_bytes.size()) {
    const size_t own = levels.cross ? static_cast<size_t>(levels.cross->rank()) : 0;
    uint8_t* next = codes.of(place, own);
    for (const Tensor& sum : sums)
      for_each_slice(sum, levels.lanes, [&](size_t lane, size_t begin, size_t count) {
        if (lane != place) return;
        quantize(quantizer, static_cast<const float*>(sum.piece.source) + begin, sum.residual + begin, count, next);
        next += quantized_bytes(quantizer.kind, count);
      });
    if (levels.cross)
      levels.cross->allgather(codes.of(place, own), codes.of(place, 0), Counts(codes.nodes, codes.lane_bytes[place]));
  }
  if (levels.node) {
    Counts bytes = in_bytes(codes.lane_bytes, codes.nodes);
    bytes.resize(static_cast<size_t>(levels.node->size()));
    levels.node->allgather(place < codes.lane_bytes.size() ? codes.of(place, 0) : codes.data, codes.data, bytes);
  }

  Counts next(codes.lane_bytes.size());
  std::vector<const uint8_t*> of_nodes(codes.nodes);
  for (const Tensor& tensor : tensors)
    for_each_slice(tensor, levels.lanes, [&](size_t lane, size_t begin, size_t count) {
      for (size_t node = 0; node < codes.nodes; ++node) of_nodes[node] = codes.of(lane, node) + next[lane];
      next[lane] += quantized_bytes(quantizer.kind, count);
      add_up(quantizer, scales.after, of_nodes, static_cast<float*>(tensor.piece.destination) + begin, count);
    });
}

}  // namespace ringtrain
