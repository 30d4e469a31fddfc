// Halving and doubling, in blocks.
//
// n ranks stand in a circle, and a block is cut into n slices, of which rank r owns slice r.
//
// Halving, a reduce-scatter. A rank has the sums of some slices: first its own values of all n, beginning with its own
// slice, then that of the next rank, and so on. At distance d = .., 4, 2, 1, from the largest power of two below n
// down, of at most 2 d slices it sends those from the d-th on to the d-th next rank, whose first ones they are, and
// adds what comes from the d-th rank before it to its own first ones. So each slice is summed along a binomial tree to
// its owner, and what two ranks have for each other in the trees of all slices is sent together.
//
// Doubling, an allgather: the same steps backwards, at d = 1, 2, 4, .., without adding. A rank has the results of d
// slices, which it sends to the d-th rank before it, and receives as many from the d-th next one.
//
// Both take ceil(log2 n) steps for any n, and each rank sends 2 (n - 1) / n times the array, as in a ring, which takes
// 2 (n - 1) steps. A rank has connections to 2 ceil(log2 n) others. While one block waits for a partner, others are
// under way (pipeline.h).
//
// 16-bit floats are added in float32, and rounded once, by their owner. Contributions travel as they are, in the first
// step, and so do results; sums travel in float32: 2.5 times the array in place of the 2 of an exchange (exchange.cc),
// which needs connections to all.
//
// Sources: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025, where the
// memory for sums has no limit. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", 1997. Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
// in MPICH", 2005, whose partners differ in one bit, so that they need a power of two.
#include "collectives/network/halving.h"

#include <utility>

#include "kernels/copy.h"

namespace ringtrain {
namespace {

size_t longest_of(const Halving::Dtypes& dtypes) {
  return std::max({size_of(dtypes.contribution), size_of(dtypes.sum), size_of(dtypes.result)});
}

// Steps of this many ranks: the exponent of the power of two that is not below them.
size_t half_of(int ranks) {
  size_t steps = 0;
  while (1 << steps < ranks) ++steps;
  return steps;
}

}  // namespace

Halving::Dtypes Halving::Dtypes::of(DType source, DType reduced) {
  return {source, source, wide(reduced), reduced, reduced};
}

Halving::Dtypes Halving::Dtypes::narrowed(DType wire) {
  return {DType::float32, wire, DType::float32, wire, DType::float32};
}

size_t Halving::sums_of(int ranks, size_t blocks) { return std::min(blocks, half_of(ranks) + 1); }

size_t Halving::slots_bytes(const Endpoint& peers, const Dtypes& dtypes, const std::vector<Block>& blocks,
                            size_t chunk_elements) {
  const size_t slots = kSlots * chunk_elements * longest_of(dtypes);
  if (dtypes.sum == dtypes.destination) return slots;
  size_t longest = 0;
  for (const Block& block : blocks) longest = std::max(longest, total_of(block.counts));
  return slots + sums_of(peers.size(), blocks.size()) * longest * size_of(dtypes.sum);
}

Halving::Halving(const Endpoint& peers, Phases phases, const Dtypes& dtypes, const Reduction& reduction,
                 std::vector<Block> blocks, size_t chunk_elements, char* slots)
    : Pipeline(blocks.size(), phases == Phases::allgather ? half_of(peers.size()) : 0,
               (phases == Phases::reduce_scatter ? 1 : 2) * half_of(peers.size())),
      peers_(peers),
      dtypes_(dtypes),
      reduction_(reduction),
      blocks_(std::move(blocks)),
      chunk_elements_(chunk_elements),
      slot_bytes_(chunk_elements * longest_of(dtypes)),
      half_(half_of(peers.size())),
      slots_(slots) {
  for (const Block& block : blocks_) {
    offsets_.push_back(offsets_of(block.counts));
    totals_.push_back(total_of(block.counts));
    longest_block_ = std::max(longest_block_, totals_.back());
  }
  lay_out([&](size_t block, size_t step) {
    return std::max({size_t{1}, chunks_in(block, sent(step)), chunks_in(block, received(step))});
  });
}

Halving::Slices Halving::sent(size_t step) const {
  const int d = distance(step), size = peers_.size();
  return is_summing(step) ? Slices{d, std::min(2 * d, size)} : Slices{0, std::min(d, size - d)};
}

Halving::Slices Halving::received(size_t step) const {
  const int d = distance(step), size = peers_.size();
  return is_summing(step) ? Slices{0, std::min(d, size - d)} : Slices{d, std::min(2 * d, size)};
}

Halving::Range Halving::range_of(size_t block, const Slices& slices) const {
  const auto begin_of = [&](int slice) {
    const int place = peers_.rank() + slice, size = peers_.size();
    return offsets_[block][static_cast<size_t>(place % size)] + (place < size ? 0 : totals_[block]);
  };
  const size_t begin = begin_of(slices.begin), end = begin_of(slices.end);
  return {totals_[block] == 0 ? 0 : begin % totals_[block], end - begin};
}

Halving::Range Halving::chunk(size_t block, const Slices& slices, size_t index) const {
  const Range whole = range_of(block, slices);
  const Chunk part = chunk_of(whole.count, chunk_elements_, index);
  const size_t begin = whole.begin + part.offset;
  return {begin < totals_[block] ? begin : begin - totals_[block], part.count};
}

DType Halving::travels_as(size_t step) const {
  if (!is_summing(step)) return dtypes_.result;
  return step == 0 ? dtypes_.contribution : dtypes_.sum;
}

char* Halving::source(const Position& at, const Range& range) const {
  return const_cast<char*>(blocks_[at.block].source) + range.begin * size_of(dtypes_.source);
}

char* Halving::destination(const Position& at, const Range& range) const {
  return blocks_[at.block].destination + range.begin * size_of(dtypes_.destination);
}

char* Halving::sum(const Position& at, const Range& range) const {
  if (dtypes_.sum == dtypes_.destination) return destination(at, range);
  const size_t area = at.block % sums_of(peers_.size(), blocks_.size());
  return slot(kSlots) + (area * longest_block_ + range.begin) * size_of(dtypes_.sum);
}

Message Halving::outgoing(size_t i) {
  const Position at = position_of(i);
  const Range range = chunk(at.block, sent(at.step), at.index);
  const DType dtype = travels_as(at.step);
  const bool is_source = at.step == 0, is_sum = is_summing(at.step) && !is_source;
  const DType given = is_source ? dtypes_.source : is_sum ? dtypes_.sum : dtypes_.destination;
  const auto data = [&](const Range& part) {
    return is_source ? source(at, part) : is_sum ? sum(at, part) : destination(at, part);
  };
  const int peer = peers_.wrap(peers_.rank() + (is_summing(at.step) ? 1 : -1) * distance(at.step));
  const size_t bytes = range.count * size_of(dtype);
  if (given == dtype && !wraps(at.block, range)) return {data(range), bytes, peer};
  for_each_part_of(at.block, range, [&](const Range& part, size_t before) {
    convert(data(part), given, slot_out(i) + before * size_of(dtype), dtype, part.count);
  });
  return {slot_out(i), bytes, peer};
}

Message Halving::incoming(size_t i) {
  const Position at = position_of(i);
  const Range range = chunk(at.block, received(at.step), at.index);
  const int peer = peers_.wrap(peers_.rank() - (is_summing(at.step) ? 1 : -1) * distance(at.step));
  return {goes_to_its_place(at, range) ? destination(at, range) : slot_in(i),
          range.count * size_of(travels_as(at.step)), peer};
}

bool Halving::goes_to_its_place(const Position& at, const Range& range) const {
  return !is_summing(at.step) && dtypes_.result == dtypes_.destination && !wraps(at.block, range);
}

void Halving::arrived(size_t i) {
  const Position at = position_of(i);
  if (at.step == 0 && at.index == 0) take_rest(at);
  const Range range = chunk(at.block, received(at.step), at.index);
  if (goes_to_its_place(at, range)) return;
  for_each_part_of(at.block, range, [&](const Range& part, size_t before) {
    const char* data = slot_in(i) + before * size_of(travels_as(at.step));
    if (is_summing(at.step)) return add(at, part, data);
    convert(data, dtypes_.result, destination(at, part), dtypes_.destination, part.count);
  });
}

// Takes the slices that this rank neither sends in the first step nor adds to: none where n is a power of two.
void Halving::take_rest(const Position& at) {
  const Slices rest = {received(0).end, sent(0).begin};
  for (size_t i = 0; i < chunks_in(at.block, rest); ++i)
    for_each_part_of(at.block, chunk(at.block, rest, i), [&](const Range& part, size_t) { take(at, part); });
}

void Halving::take(const Position& at, const Range& range) {
  const void* given = source(at, range);
  if (dtypes_.contribution != dtypes_.source) {
    convert(given, dtypes_.source, narrow_slot(), dtypes_.contribution, range.count);
    given = narrow_slot();
  }
  convert(given, dtypes_.contribution, sum(at, range), dtypes_.sum, range.count);
}

void Halving::add(const Position& at, const Range& range, const char* arrived) {
  const DType dtype = travels_as(at.step);
  const bool is_last = at.step + 1 == half_, is_wide = dtypes_.sum != dtypes_.result;
  if (at.step == 0 && is_wide) take(at, range);
  if (dtype != dtypes_.sum) {
    convert(arrived, dtype, wide_slot(), dtypes_.sum, range.count);
    arrived = wide_slot();
  }
  const void* own = at.step == 0 && !is_wide ? source(at, range) : sum(at, range);
  const void* both[] = {own, arrived};
  void* total = sum(at, range);
  const double scale = is_last && !is_wide ? reduction_.scale : 1.0;
  reduce({dtypes_.sum, reduction_.reduce, scale}, &total, 1, both, 2, range.count);
  if (is_last && is_wide) finish(at, range);
}

// Rounded once, also where the destination is wider.
void Halving::finish(const Position& at, const Range& range) {
  const auto* total = reinterpret_cast<const float*>(sum(at, range));
  const bool is_narrowed = dtypes_.result != dtypes_.destination;
  void* result = is_narrowed ? narrow_slot() : destination(at, range);
  narrow(dtypes_.result, reduction_.scale, result, total, range.count);
  if (is_narrowed) convert(result, dtypes_.result, destination(at, range), dtypes_.destination, range.count);
}

// Memory for sums is free when the block that had it has sent its last ones. A result overwrites what the step of the
// same distance has sent.
bool Halving::is_free(const Position& incoming, size_t sent) const {
  const auto has_sent = [&](size_t block, size_t step) { return end_message(block, step) <= sent; };
  if (is_summing(incoming.step)) {
    const size_t sums = sums_of(peers_.size(), blocks_.size());
    return dtypes_.sum == dtypes_.destination || incoming.step > 0 || incoming.block < sums ||
           has_sent(incoming.block - sums, half_ - 1);
  }
  return first_step() >= half_ || has_sent(incoming.block, 2 * half_ - 1 - incoming.step);
}

}  // namespace ringtrain
