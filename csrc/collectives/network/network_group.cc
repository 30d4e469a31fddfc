#include "collectives/network/network_group.h"

#include <algorithm>
#include <utility>

#include "collectives/network/algorithms.h"
#include "collectives/network/exchange.h"
#include "collectives/network/halving.h"
#include "collectives/network/packing.h"
#include "collectives/network/ring.h"
#include "collectives/piece_layout.h"
#include "kernels/copy.h"

namespace ringtrain {
namespace {

constexpr size_t kLine = 64;          // elements: keeps chunks and slices on whole cache lines
constexpr size_t kChunksPerStep = 8;  // of one block
// Of halving.
constexpr size_t kFewBlocks = 4, kChunksPerBlock = 9, kChunksPerLongBlock = 18;

constexpr size_t kTreeBytes = 8 << 10;  // of a broadcast, for each rank: the chain takes as many steps

size_t rounded_up(size_t count) { return (count + kLine - 1) / kLine * kLine; }

}  // namespace

size_t NetworkGroup::block_elements(Way way, size_t total, size_t element) const {
  const size_t chunk = std::max(kLine, chunk_bytes_ / element / kLine * kLine);
  if (way != Way::halving) return chunk * kChunksPerStep * static_cast<size_t>(size());
  // In halving the first step has half of a block, whatever the number of ranks.
  const size_t few = rounded_up(total / kFewBlocks);
  return std::clamp(few, kChunksPerBlock * chunk, kChunksPerLongBlock * chunk);
}

// A short slice is cut, too, so that its chunks follow each other through the steps, unless that costs more than it
// hides. Where blocks are many, the first chunks may take longer: that is little beside all of them.
size_t NetworkGroup::chunk_elements(size_t longest_slice, size_t element, size_t blocks) const {
  constexpr size_t kFew = 4, kShortestBytes = 8 << 10, kMany = 8, kLongestBytes = 1 << 20;
  const bool is_long = blocks >= kMany && peers_.network().prefers_long_messages();
  const size_t bytes = is_long ? std::max(kLongestBytes, tuning_.ring_chunk_bytes) : tuning_.ring_chunk_bytes;
  const size_t limit = std::max(kLine, bytes / element / kLine * kLine);
  const size_t shorter = std::max(rounded_up(longest_slice / kFew), kShortestBytes / element);
  return std::min(limit, shorter);
}

std::unique_ptr<Pipeline> NetworkGroup::pipeline(Way way, Phases phases, const Summing& summing,
                                                 const Reduction& reduction, DType source_dtype,
                                                 std::vector<Block> blocks) {
  const bool narrows = summing.is_narrowed;
  const Reduction narrow = {wire_, reduction.reduce, reduction.scale};
  if (way == Way::halving) {
    const auto dtypes = narrows ? Halving::Dtypes::narrowed(wire_) : Halving::Dtypes::of(source_dtype, reduction.dtype);
    size_t longest = 0;
    for (const Block& block : blocks) longest = std::max(longest, rounded_up(total_of(block.counts)));
    const size_t most = std::max(kLine, tuning_.ring_chunk_bytes / size_of(dtypes.sum) / kLine * kLine);
    const size_t chunk = std::min(most, std::max(kLine, longest));
    char* slots = slots_.get(Halving::slots_bytes(peers_, dtypes, blocks, chunk));
    return std::make_unique<Halving>(peers_, phases, dtypes, reduction, std::move(blocks), chunk, slots);
  }
  size_t longest = 0;
  for (const Block& block : blocks)
    longest = std::max(longest, *std::max_element(block.counts.begin(), block.counts.end()));
  if (narrows) {
    const size_t chunk = chunk_elements(longest, size_of(wire_), blocks.size());
    Blocks cut(std::move(blocks), {sizeof(float), sizeof(float)}, chunk);
    char* slots = slots_.get(NarrowExchange::slots_bytes(peers_, wire_, chunk));
    return std::make_unique<NarrowExchange>(peers_, summing.order, narrow, std::move(cut),
                                            Exchange::Work{slots, mine_});
  }
  const size_t source_bytes = size_of(source_dtype), bytes = size_of(reduction.dtype);
  const size_t chunk = chunk_elements(longest, source_bytes, blocks.size());
  Blocks cut(std::move(blocks), {source_bytes, bytes}, chunk);
  if (way == Way::exchange) {
    char* slots = slots_.get(Exchange::slots_bytes(peers_, source_dtype, chunk));
    return std::make_unique<Exchange>(peers_, phases, summing.order, reduction, source_dtype, std::move(cut),
                                      Exchange::Work{slots, mine_});
  }
  char* slots = slots_.get(Ring::slots_bytes(chunk * bytes));
  return std::make_unique<Ring>(peers_, phases, reduction, std::move(cut), slots);
}

Counts NetworkGroup::slices(Way way, size_t count) const {
  if (way == Way::halving) return even_slices(count, size());
  return (way == Way::exchange ? exchange_shares_ : ring_shares_).slices(count);
}

void NetworkGroup::run_in_blocks(Way way, Phases phases, const Summing& summing, const Reduction& reduction,
                                 std::vector<Block> blocks) {
  const auto messages = pipeline(way, phases, summing, reduction, reduction.dtype, std::move(blocks));
  messages->release_all();
  run(peers_, *messages);
}

std::unique_ptr<Stream> NetworkGroup::stream(Way way, const Summing& summing, const Reduction& reduction,
                                             DType source_dtype, const std::vector<Piece>& blocks) {
  std::vector<Block> cut;
  for (const Piece& block : blocks)
    cut.push_back(
        {static_cast<const char*>(block.source), static_cast<char*>(block.destination), slices(way, block.count)});
  return std::make_unique<Stream>(peers_,
                                  pipeline(way, Phases::both, summing, reduction, source_dtype, std::move(cut)));
}

const char* const NetworkGroup::of_16_bit_floats = " of 16-bit floats";

AlgorithmChoices NetworkGroup::choices(const Setup& setup, const Tuning& tuning, size_t size) {
  const Chooser chooser = setup.chooser(size, tuning);
  const auto name = [&](bool is_allreduce, Way way) -> std::string {
    if (way == Way::library) return "that of MPI; a ring for what MPI cannot reduce";
    if (way == Way::exchange) return "each rank gets its slice of all others, and sends its sum to all";
    const std::string measured = setup.algorithm == "measured" ? ", or that of MPI if it was faster at the start" : "";
    if (way == Way::ring) return "ring" + measured;
    if (!is_allreduce) return "recursive halving" + measured;
    return (way == Way::doubling ? "recursive doubling" : "halving and doubling") + measured;
  };
  AlgorithmChoices all;
  const auto add = [&](bool is_allreduce, bool is_16_bit) {
    const DType wire = is_16_bit ? DType::float16 : setup.wire;
    Setup of_dtype = setup;
    of_dtype.wire = wire;
    const Reduction sum = {is_16_bit ? DType::float16 : DType::float32};
    const auto way_of = [&](size_t bytes) {
      const size_t count = bytes / size_of(sum.dtype);
      return is_allreduce ? chooser.for_allreduce(sum, count) : chooser.for_reduce_scatter(sum, count);
    };
    std::string before;
    for (const Chooser::Choice& choice : Chooser::choices(way_of)) {
      std::string algorithm = name(is_allreduce, choice.way);
      if (algorithm == before) continue;
      before = algorithm;
      std::string options = "allreduce_algorithm, ring_from_kb, link_hop_us, link_gbit, ring_chunk_kb";
      if (chooser.adds_by_ranks(sum)) options = "reduction_order, ring_chunk_kb";
      if (is_allreduce && (choice.way == Way::ring || choice.way == Way::exchange)) {
        algorithm += of_dtype.shares_text(size);
        options += ", link_rates";
      }
      if (is_allreduce && !is_16_bit && choice.way != Way::doubling && choice.way != Way::library) {
        if (is_half(wire)) algorithm += "; sums of float32 travel as " + std::string(name_of(wire));
        options += ", wire_format";
      }
      all.push_back({(is_allreduce ? "allreduce" : "reducescatter") + std::string(is_16_bit ? of_16_bit_floats : ""),
                     choice.from_bytes, algorithm, options});
    }
  };
  for (const bool is_allreduce : {true, false}) {
    add(is_allreduce, false);
    if (setup.algorithm != "doubling" && setup.algorithm != "mpi") add(is_allreduce, true);
  }
  const bool has_short = chooser.has_short_moves();
  for (const Chooser::Choice& choice : Chooser::choices([&](size_t bytes) { return chooser.for_allgather(bytes); })) {
    const bool is_ring = choice.way == Way::ring;
    all.push_back({"allgather", choice.from_bytes, is_ring ? "ring" : "recursive doubling",
                   "allreduce_algorithm=ring, ring_from_kb, link_hop_us, link_gbit, ring_chunk_kb"});
  }
  if (has_short) all.push_back({"broadcast", 0, "binomial tree", "allreduce_algorithm=ring"});
  all.push_back({"broadcast", has_short ? kTreeBytes * size : 0, "chain", "ring_chunk_kb"});
  all.push_back({"alltoall", 0, "each pair of ranks in turn", "ring_chunk_kb"});
  return all;
}

NetworkGroup::NetworkGroup(Endpoint peers, const Tuning& tuning, const Setup& setup)
    : Group(peers.rank(), peers.size()),
      peers_(std::move(peers)),
      tuning_(tuning),
      wire_(setup.wire),
      chunk_bytes_(setup.chunk_bytes),
      ring_shares_(setup.ring_shares(static_cast<size_t>(size()))),
      exchange_shares_(setup.exchange_shares(static_cast<size_t>(size()))),
      chooser_(setup.chooser(static_cast<size_t>(size()), tuning)) {
  const bool may_be_library = setup.algorithm == "measured" && peers_.network().collectives();
  if (setup.algorithm == "mpi" || may_be_library) library_.emplace(peers_);
}

void NetworkGroup::measure() {
  if (!library_) return;
  constexpr size_t kSmallBytes = 4 << 10, kLargeBytes = 512 << 10;
  if (is_library_clearly_faster(kLargeBytes, chooser_.for_allreduce({DType::uint8}, kLargeBytes)))
    chooser_.prefer_library(true);
  else if (is_library_clearly_faster(kSmallBytes, Way::doubling))
    chooser_.prefer_library(false);
}

bool NetworkGroup::is_library_clearly_faster(size_t bytes, Way other) {
  char* data = whole_.get(bytes);
  const auto seconds = [&](Way way) {
    const auto work = [&] { reduce_arrays(way, {}, {DType::uint8}, {{data, data, bytes}}); };
    return probe_s(work, [&](double seconds) {
      auto* value = reinterpret_cast<double*>(data);
      *value = seconds;
      reduce_arrays(Way::ring, {}, {DType::float64, Reduce::max}, {{value, value, 1}});
      return *value;
    });
  };
  const double other_s = seconds(other);
  return seconds(Way::library) < 0.8 * other_s;
}

void NetworkGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  for_each_kind(
      pieces, [&](const Piece& piece) { return chooser_.summing(reduction, piece.count); },
      [&](const Summing& summing, const std::vector<Piece>& some) { allreduce_of(summing, reduction, some); });
}

void NetworkGroup::allreduce_of(const Summing& summing, const Reduction& reduction, const std::vector<Piece>& pieces) {
  const Way way = chooser_.for_summing(summing, reduction, count_of(pieces));
  if (has_owners(summing.order)) return reduce_by_owners(way, summing, reduction, pieces);
  reduce_packed(pieces, size_of(reduction.dtype), packed_,
                [&](const std::vector<Piece>& arrays) { reduce_arrays(way, summing, reduction, arrays); });
}

bool NetworkGroup::reduce_values(const Reduction& reduction, const Sources& sources, void* destination, size_t count) {
  const Summing summing = chooser_.summing(reduction, count);
  const bool is_by_ranks = summing.order == Order::ranks && !summing.is_narrowed;
  if (is_by_ranks)
    reduce(reduction, &destination, 1, sources.data(), size(), count);
  else if (chooser_.for_summing(summing, reduction, count) == Way::doubling)
    reduce_by_tree(reduction, reduction.dtype, sources, destination, count, mine_);
  else
    return false;
  return true;
}

void NetworkGroup::reduce_arrays(Way way, const Summing& summing, const Reduction& reduction,
                                 const std::vector<Piece>& arrays) {
  if (way != Way::doubling && way != Way::library) return reduce_in_blocks(way, summing, reduction, arrays);
  for (const Piece& array : arrays) {
    if (way == Way::library)
      library_->allreduce(reduction, array);
    else
      allreduce_by_doubling(peers_, reduction, array, tuning_.ring_chunk_bytes, {mine_, theirs_});
  }
}

void NetworkGroup::cut(Way way, const Piece& array, size_t element, size_t total, std::vector<Block>& blocks) const {
  for_each_part(array.count, block_elements(way, total, element), [&](size_t begin, size_t count) {
    blocks.push_back({static_cast<const char*>(array.source) + begin * element,
                      static_cast<char*>(array.destination) + begin * element, slices(way, count)});
  });
}

void NetworkGroup::reduce_in_blocks(Way way, const Summing& summing, const Reduction& reduction,
                                    const std::vector<Piece>& arrays) {
  std::vector<Block> blocks;
  for (const Piece& array : arrays) cut(way, array, size_of(reduction.dtype), count_of(arrays), blocks);
  run_in_blocks(way, Phases::both, summing, reduction, std::move(blocks));
}

void NetworkGroup::reduce_by_owners(Way way, const Summing& summing, const Reduction& reduction,
                                    const std::vector<Piece>& pieces) {
  const size_t element = size_of(reduction.dtype);
  const auto is_small = [&](const Piece& piece) { return piece.count > 0 && piece.count * element < kLargeBytes; };
  const bool joins = std::count_if(pieces.begin(), pieces.end(), is_small) > 1;
  std::vector<Block> blocks, small;
  for (const Piece& piece : pieces) cut(way, piece, element, piece.count, joins && is_small(piece) ? small : blocks);
  const size_t most = block_elements(way, count_of(pieces), element);
  const JoinedBlocks joined(std::move(small), most, element, packed_);
  blocks.insert(blocks.end(), joined.joined().begin(), joined.joined().end());
  if (blocks.empty()) return;
  run_in_blocks(way, Phases::both, summing, reduction, std::move(blocks));
  joined.unpack();
}

void NetworkGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                                  const Counts& counts) {
  reduce_scatter_by(chooser_.for_reduce_scatter(reduction, total_of(counts)), reduction, {source, destination, counts});
}

void NetworkGroup::reduce_scatter_by(Way way, const Reduction& reduction, const Scattering& array) {
  const size_t total = total_of(array.counts), element = size_of(reduction.dtype), own = static_cast<size_t>(rank());
  if (total == 0) return;
  char* whole = whole_.get(total * element);
  if (way == Way::library)
    reduce_arrays(way, {}, reduction, {{array.source, whole, total}});
  else
    run_in_blocks(way, Phases::reduce_scatter, {}, reduction,
                  {{static_cast<const char*>(array.source), whole, array.counts}});
  copy(array.destination, whole + offsets_of(array.counts)[own] * element, array.counts[own] * element);
}

void NetworkGroup::reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) {
  for_each_way(chooser_, reduction, 1, arrays, [&](Way way, const std::vector<Scattering>& some) {
    scatter_packed(some, rank(), size_of(reduction.dtype), packed_,
                   [&](const Scattering& array) { reduce_scatter_by(way, reduction, array); });
  });
}

void NetworkGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  const size_t total = total_of(bytes);
  if (total == 0) return;
  char* all = static_cast<char*>(destination);
  copy(all + offsets_of(bytes)[rank()], source, bytes[rank()]);
  run_in_blocks(chooser_.for_allgather(total), Phases::allgather, {}, {DType::uint8}, {{all, all, bytes}});
}

void NetworkGroup::allgather_all(const std::vector<Gathering>& arrays) {
  gather_packed(arrays, rank(), packed_,
                [&](const Gathering& array) { allgather(array.source, array.destination, array.bytes); });
}

// Parts go straight to all others, unless those are too many.
void NetworkGroup::allgather_parts(const Parts& parts, void* destination, size_t bytes) {
  if (!chooser_.may_exchange()) return Group::allgather_parts(parts, destination, bytes);
  constexpr size_t kLineBytes = 64;
  const size_t part_bytes = std::max(kLineBytes, tuning_.ring_chunk_bytes / kLineBytes * kLineBytes);
  MadeParts messages(peers_, parts, static_cast<char*>(destination), bytes, part_bytes);
  run(peers_, messages);
}

void NetworkGroup::broadcast_all(const std::vector<Piece>& pieces, int root) {
  const PieceLayout layout(pieces, 1);
  const bool is_short = chooser_.has_short_moves() && layout.total() < kTreeBytes * static_cast<size_t>(size());
  if (!is_short) {
    const size_t chunk = chunk_elements(layout.total(), 1, 1);
    return broadcast_by_chain(peers_, layout, root, chunk, slots_.get(chain_slots_bytes(chunk)));
  }
  reduce_packed(pieces, 1, packed_, [&](const std::vector<Piece>& arrays) {
    for (const Piece& array : arrays)
      broadcast_by_tree(peers_, {static_cast<char*>(array.destination), array.count, root});
  });
}

void NetworkGroup::alltoall(const void* source, const Counts& send_bytes, void* destination,
                            const Counts& receive_bytes) {
  const Counts send_offsets = offsets_of(send_bytes), receive_offsets = offsets_of(receive_bytes);
  char* out = const_cast<char*>(static_cast<const char*>(source));  // it is only read
  char* in = static_cast<char*>(destination);
  copy(in + receive_offsets[rank()], out + send_offsets[rank()], send_bytes[rank()]);
  for (int i = 1; i < size(); ++i) {
    const int to = peers_.wrap(rank() + i), from = peers_.wrap(rank() - i);
    exchange(peers_, {out + send_offsets[to], send_bytes[to], to},
             {in + receive_offsets[from], receive_bytes[from], from}, tuning_.ring_chunk_bytes);
  }
}

void NetworkGroup::barrier() { barrier_by_dissemination(peers_, slots_); }

}  // namespace ringtrain
