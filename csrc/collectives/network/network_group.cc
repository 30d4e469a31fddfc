#include "collectives/network/network_group.h"

#include <algorithm>
#include <utility>

#include "collectives/group.h"
#include "collectives/network/algorithms.h"
#include "collectives/network/exchange.h"
#include "collectives/network/packing.h"
#include "collectives/network/ring.h"
#include "collectives/piece_layout.h"
#include "kernels/copy.h"

namespace ringtrain {
namespace {

constexpr size_t kLine = 64;          // elements: keeps chunks and slices on whole cache lines
constexpr size_t kChunksPerStep = 8;  // of one block

constexpr size_t kRingGatherBytes = 64 << 10;  // from here on an allgather goes round the ring
constexpr size_t kTreeBytes = 8 << 10;         // of a broadcast, for each rank: the chain takes as many steps

size_t rounded_up(size_t count) { return (count + kLine - 1) / kLine * kLine; }

}  // namespace

size_t NetworkGroup::block_elements(DType dtype) const {
  const size_t chunk = std::max(kLine, tuning_.ring_chunk_bytes / size_of(dtype) / kLine * kLine);
  return chunk * kChunksPerStep * static_cast<size_t>(size());
}

// A short slice is cut, too, so that its chunks follow each other through the steps, unless that costs more than it
// hides.
size_t NetworkGroup::chunk_elements(size_t longest_slice, size_t element) const {
  constexpr size_t kFew = 4, kShortestBytes = 8 << 10;
  const size_t limit = std::max(kLine, tuning_.ring_chunk_bytes / element / kLine * kLine);
  const size_t shorter = std::max(rounded_up(longest_slice / kFew), kShortestBytes / element);
  return std::min(limit, shorter);
}

std::unique_ptr<Pipeline> NetworkGroup::pipeline(Phases phases, const Reduction& reduction, DType source_dtype,
                                                 std::vector<Block> blocks) {
  size_t longest = 0;
  for (const Block& block : blocks)
    longest = std::max(longest, *std::max_element(block.counts.begin(), block.counts.end()));
  if (phases == Phases::both && is_narrowed(reduction)) {
    const size_t chunk = chunk_elements(longest, size_of(wire_));
    Blocks cut(std::move(blocks), {sizeof(float), sizeof(float)}, chunk);
    char* slots = slots_.get(NarrowExchange::slots_bytes(peers_, chunk));
    const Reduction narrow = {wire_, reduction.reduce, reduction.scale};
    return std::make_unique<NarrowExchange>(peers_, narrow, std::move(cut), slots);
  }
  const size_t source_bytes = size_of(source_dtype), bytes = size_of(reduction.dtype);
  const size_t chunk = chunk_elements(longest, source_bytes);
  Blocks cut(std::move(blocks), {source_bytes, bytes}, chunk);
  if (is_half(reduction.dtype)) {
    char* slots = slots_.get(Exchange::slots_bytes(peers_, chunk));
    return std::make_unique<Exchange>(peers_, phases, reduction, source_dtype, std::move(cut), slots);
  }
  char* slots = slots_.get(Ring::slots_bytes(chunk * bytes));
  return std::make_unique<Ring>(peers_, phases, reduction, std::move(cut), slots);
}

bool NetworkGroup::is_narrowed(const Reduction& reduction) const {
  return is_half(wire_) && reduction.dtype == DType::float32 && reduction.reduce == Reduce::sum;
}

Counts NetworkGroup::slices(const Reduction& reduction, size_t count) const {
  const bool is_exchanged = is_half(reduction.dtype) || is_narrowed(reduction);
  return (is_exchanged ? exchange_shares_ : ring_shares_).slices(count);
}

void NetworkGroup::run_ring(Phases phases, const Reduction& reduction, std::vector<Block> blocks) {
  const auto messages = pipeline(phases, reduction, reduction.dtype, std::move(blocks));
  messages->release_all();
  run(peers_, *messages);
}

std::unique_ptr<Stream> NetworkGroup::stream(const Reduction& reduction, DType source_dtype,
                                             std::vector<Block> blocks) {
  return std::make_unique<Stream>(peers_, pipeline(Phases::both, reduction, source_dtype, std::move(blocks)));
}

NetworkGroup::Ways NetworkGroup::Ways::of(const std::string& algorithm) {
  if (algorithm == "ring") return {Way::ring, Way::ring};
  if (algorithm == "doubling") return {Way::doubling, Way::doubling};
  if (algorithm == "mpi") return {Way::library, Way::library};
  return {Way::doubling, Way::ring};
}

const char* const NetworkGroup::of_16_bit_floats = " of 16-bit floats";

AlgorithmChoices NetworkGroup::choices(const Setup& setup, const Tuning& tuning, size_t size) {
  const Ways ways = Ways::of(setup.algorithm);
  const DType wire = setup.wire;
  const auto name = [&](const std::string& operation, Way way) -> std::string {
    const std::string measured = setup.algorithm == "measured" ? ", or that of MPI if it was faster at the start" : "";
    if (way == Way::library) return "that of MPI; a ring for what MPI cannot reduce";
    if (way == Way::doubling) return (operation == "allreduce" ? "recursive doubling" : "recursive halving") + measured;
    return "ring" + measured;
  };
  const std::string options = "allreduce_algorithm, ring_from_kb, ring_chunk_kb";
  const std::string exchange = "each rank gets its slice of all others, and sends its sum to all";
  const size_t large = ways.large == ways.small ? 0 : tuning.ring_from_bytes;
  const std::string travels = is_half(wire) ? "; sums of float32 travel as " + std::string(name_of(wire)) : "";
  AlgorithmChoices all;
  for (const std::string operation : {"allreduce", "reducescatter"}) {
    const bool may_be_narrow = operation == "allreduce" && ways.large == Way::ring;
    const std::string of_shares = may_be_narrow ? ", link_rates" : "";
    if (large > 0) all.push_back({operation, 0, name(operation, ways.small), options});
    all.push_back({operation, large,
                   name(operation, ways.large) + (may_be_narrow ? setup.shares_text(size) + travels : ""),
                   options + of_shares + (may_be_narrow ? ", wire_format" : "")});
    if (ways.large != Way::ring) continue;
    const Setup narrow = {setup.algorithm, DType::float16, setup.rates};
    all.push_back({operation + of_16_bit_floats, large, exchange + (may_be_narrow ? narrow.shares_text(size) : ""),
                   options + of_shares});
  }
  const bool has_short = ways.has_short_moves();
  if (has_short) all.push_back({"allgather", 0, "recursive doubling", "allreduce_algorithm=ring"});
  all.push_back({"allgather", has_short ? kRingGatherBytes : 0, "ring", "ring_chunk_kb"});
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
      ring_shares_(setup.ring_shares(static_cast<size_t>(size()))),
      exchange_shares_(setup.exchange_shares(static_cast<size_t>(size()))),
      ways_(Ways::of(setup.algorithm)) {
  const bool may_be_library = setup.algorithm == "measured" && peers_.network().collectives();
  if (setup.algorithm == "mpi" || may_be_library) library_.emplace(peers_);
}

void NetworkGroup::measure() {
  if (!library_) return;
  constexpr size_t kSmallBytes = 4 << 10, kLargeBytes = 512 << 10;
  if (is_library_clearly_faster(kLargeBytes, Way::ring))
    ways_ = {Way::library, Way::library};
  else if (is_library_clearly_faster(kSmallBytes, Way::doubling))
    ways_.small = Way::library;
}

bool NetworkGroup::is_library_clearly_faster(size_t bytes, Way other) {
  char* data = whole_.get(bytes);
  const auto seconds = [&](Way way) {
    const auto work = [&] { reduce_arrays(way, {DType::uint8}, {{data, data, bytes}}); };
    return probe_s(work, [&](double seconds) {
      auto* value = reinterpret_cast<double*>(data);
      *value = seconds;
      reduce_arrays(Way::ring, {DType::float64, Reduce::max}, {{value, value, 1}});
      return *value;
    });
  };
  const double other_s = seconds(other);
  return seconds(Way::library) < 0.8 * other_s;
}

NetworkGroup::Way NetworkGroup::way_for(const Reduction& reduction, size_t count) const {
  const bool is_large = count * size_of(reduction.dtype) >= tuning_.ring_from_bytes;
  const Way way = is_large ? ways_.large : ways_.small;
  return way == Way::library && !Library::can(reduction) ? Way::ring : way;
}

void NetworkGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  size_t count = 0;
  for (const Piece& piece : pieces) count += piece.count;
  const Way way = way_for(reduction, count);
  reduce_packed(pieces, size_of(reduction.dtype), packed_,
                [&](const std::vector<Piece>& arrays) { reduce_arrays(way, reduction, arrays); });
}

bool NetworkGroup::reduce_values(const Reduction& reduction, const Sources& sources, void* destination, size_t count) {
  if (way_for(reduction, count) != Way::doubling) return false;
  reduce_as_by_doubling(reduction, sources, destination, count, mine_);
  return true;
}

void NetworkGroup::reduce_arrays(Way way, const Reduction& reduction, const std::vector<Piece>& arrays) {
  if (way == Way::ring) return reduce_by_ring(reduction, arrays);
  for (const Piece& array : arrays) {
    if (way == Way::library)
      library_->allreduce(reduction, array);
    else
      allreduce_by_doubling(peers_, reduction, array, tuning_.ring_chunk_bytes, {mine_, theirs_});
  }
}

void NetworkGroup::reduce_by_ring(const Reduction& reduction, const std::vector<Piece>& arrays) {
  const size_t element = size_of(reduction.dtype);
  std::vector<Block> blocks;
  for (const Piece& array : arrays)
    for_each_part(array.count, block_elements(reduction.dtype), [&](size_t begin, size_t count) {
      blocks.push_back({static_cast<const char*>(array.source) + begin * element,
                        static_cast<char*>(array.destination) + begin * element, slices(reduction, count)});
    });
  run_ring(Phases::both, reduction, std::move(blocks));
}

void NetworkGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                                  const Counts& counts) {
  const size_t total = total_of(counts), element = size_of(reduction.dtype);
  if (total == 0) return;
  const Way way = way_for(reduction, total);
  if (way == Way::doubling)
    return reduce_scatter_by_halving(peers_, reduction, {source, destination, counts}, tuning_.ring_chunk_bytes,
                                     {mine_, theirs_});
  char* whole = whole_.get(total * element);
  if (way == Way::ring)
    run_ring(Phases::reduce_scatter, reduction, {{static_cast<const char*>(source), whole, counts}});
  else
    reduce_arrays(way, reduction, {{source, whole, total}});
  copy(destination, whole + offsets_of(counts)[rank()] * element, counts[rank()] * element);
}

void NetworkGroup::reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) {
  scatter_packed(arrays, rank(), size_of(reduction.dtype), packed_, [&](const Scattering& array) {
    reduce_scatter(reduction, array.source, array.destination, array.counts);
  });
}

void NetworkGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  if (ways_.has_short_moves() && total_of(bytes) < kRingGatherBytes)
    return allgather_by_doubling(peers_, source, destination, bytes, whole_);
  if (total_of(bytes) == 0) return;
  char* all = static_cast<char*>(destination);
  char* own = all + offsets_of(bytes)[rank()];
  copy(own, source, bytes[rank()]);
  run_ring(Phases::allgather, {DType::uint8}, {{all, all, bytes}});
}

void NetworkGroup::allgather_all(const std::vector<Gathering>& arrays) {
  gather_packed(arrays, rank(), packed_,
                [&](const Gathering& array) { allgather(array.source, array.destination, array.bytes); });
}

void NetworkGroup::allgather_parts(const Parts& parts, void* destination, size_t bytes) {
  constexpr size_t kLineBytes = 64;
  const size_t part_bytes = std::max(kLineBytes, tuning_.ring_chunk_bytes / kLineBytes * kLineBytes);
  MadeParts messages(peers_, parts, static_cast<char*>(destination), bytes, part_bytes);
  run(peers_, messages);
}

void NetworkGroup::broadcast_all(const std::vector<Piece>& pieces, int root) {
  const PieceLayout layout(pieces, 1);
  const bool is_short = ways_.has_short_moves() && layout.total() < kTreeBytes * static_cast<size_t>(size());
  if (!is_short) {
    const size_t chunk = chunk_elements(layout.total(), 1);
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
