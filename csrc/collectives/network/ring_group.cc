#include "collectives/network/ring_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/network/exchange.h"
#include "collectives/network/ring.h"

namespace ringtrain {
namespace {

constexpr size_t kLine = 64;          // elements: keeps chunks and slices on whole cache lines
constexpr size_t kChunksPerStep = 8;  // of one block

size_t rounded_up(size_t count) { return (count + kLine - 1) / kLine * kLine; }

// What comes from the left goes on to the right, chunk by chunk; the first of the chain only sends, the last only
// receives.
class Chain final : public Messages {
 public:
  // `data.peer`: who has it.
  Chain(const Peers& peers, const Message& data, size_t chunk_bytes)
      : peers_(peers),
        data_(data),
        chunk_bytes_(chunk_bytes),
        is_first_(peers.rank() == data.peer),
        is_last_(peers.wrap(peers.rank() + 1) == data.peer) {}
  size_t count() const override { return (data_.bytes + chunk_bytes_ - 1) / chunk_bytes_; }
  Message outgoing(size_t i) override { return is_last_ ? Message{} : part(i, peers_.rank() + 1); }
  Message incoming(size_t i) override { return is_first_ ? Message{} : part(i, peers_.rank() - 1); }
  bool may_send(size_t i, size_t arrived) const override { return is_first_ || i < arrived; }

 private:
  Message part(size_t i, int peer) const {
    const size_t begin = i * chunk_bytes_;
    return {data_.data + begin, std::min(chunk_bytes_, data_.bytes - begin), peers_.wrap(peer)};
  }

  const Peers& peers_;
  const Message data_;
  const size_t chunk_bytes_;
  const bool is_first_, is_last_;
};

}  // namespace

size_t RingGroup::block_elements(DType dtype) const {
  const size_t chunk = std::max(kLine, tuning_.ring_chunk_bytes / size_of(dtype) / kLine * kLine);
  return chunk * kChunksPerStep * static_cast<size_t>(size());
}

// A short slice is cut, too, so that its chunks follow each other through the steps, unless that costs more than it
// hides.
size_t RingGroup::chunk_elements(size_t longest_slice, size_t element) const {
  constexpr size_t kFew = 4, kShortestBytes = 8 << 10;
  const size_t limit = std::max(kLine, tuning_.ring_chunk_bytes / element / kLine * kLine);
  const size_t shorter = std::max(rounded_up(longest_slice / kFew), kShortestBytes / element);
  return std::min(limit, shorter);
}

std::unique_ptr<Pipeline> RingGroup::pipeline(Part part, const Reduction& reduction, DType source_dtype,
                                              std::vector<Block> blocks) {
  size_t longest = 0;
  for (const Block& block : blocks)
    longest = std::max(longest, *std::max_element(block.counts.begin(), block.counts.end()));
  const size_t source_bytes = size_of(source_dtype), bytes = size_of(reduction.dtype);
  const size_t chunk = chunk_elements(longest, source_bytes);
  Blocks cut(std::move(blocks), {source_bytes, bytes}, chunk);
  if (is_half(reduction.dtype)) {
    char* slots = slots_.get(Exchange::slots_bytes(peers_, chunk));
    return std::make_unique<Exchange>(peers_, part, reduction, source_dtype, std::move(cut), slots);
  }
  char* slots = slots_.get(Ring::slots_bytes(chunk * bytes));
  return std::make_unique<Ring>(peers_, part, reduction, std::move(cut), slots);
}

void RingGroup::run(Part part, const Reduction& reduction, std::vector<Block> blocks) {
  const auto messages = pipeline(part, reduction, reduction.dtype, std::move(blocks));
  messages->release_all();
  peers_.run(*messages);
}

std::unique_ptr<Stream> RingGroup::stream(const Reduction& reduction, DType source_dtype, std::vector<Block> blocks) {
  return std::make_unique<Stream>(peers_, pipeline(Part::both, reduction, source_dtype, std::move(blocks)));
}

void RingGroup::reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) {
  const size_t element = size_of(reduction.dtype);
  std::vector<Block> blocks;
  for (const Piece& array : arrays)
    for_each_part(array.count, block_elements(reduction.dtype), [&](size_t begin, size_t count) {
      blocks.push_back({static_cast<const char*>(array.source) + begin * element,
                        static_cast<char*>(array.destination) + begin * element, even_slices(count, size())});
    });
  run(Part::both, reduction, std::move(blocks));
}

void RingGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                               const Counts& counts) {
  if (total_of(counts) == 0) return;
  const Counts bytes = in_bytes(counts, size_of(reduction.dtype));
  char* whole = whole_.get(total_of(bytes));
  run(Part::reduce_scatter, reduction, {{static_cast<const char*>(source), whole, counts}});
  std::memcpy(destination, whole + offsets_of(bytes)[rank()], bytes[rank()]);
}

void RingGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  if (total_of(bytes) == 0) return;
  char* all = static_cast<char*>(destination);
  char* own = all + offsets_of(bytes)[rank()];
  if (own != source && bytes[rank()] > 0) std::memcpy(own, source, bytes[rank()]);
  run(Part::allgather, {DType::uint8}, {{all, all, bytes}});
}

void RingGroup::broadcast(void* data, size_t bytes, int root) {
  Chain messages(peers_, {static_cast<char*>(data), bytes, root}, chunk_elements(bytes, 1));
  peers_.run(messages);
}

void RingGroup::alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) {
  const Counts send_offsets = offsets_of(send_bytes), receive_offsets = offsets_of(receive_bytes);
  char* out = const_cast<char*>(static_cast<const char*>(source));  // MPI only reads what it sends
  char* in = static_cast<char*>(destination);
  if (send_bytes[rank()] > 0) std::memcpy(in + receive_offsets[rank()], out + send_offsets[rank()], send_bytes[rank()]);
  for (int i = 1; i < size(); ++i) {
    const int to = peers_.wrap(rank() + i), from = peers_.wrap(rank() - i);
    peers_.exchange({out + send_offsets[to], send_bytes[to], to},
                    {in + receive_offsets[from], receive_bytes[from], from}, tuning_.ring_chunk_bytes);
  }
}

void RingGroup::barrier() {
  char* token = slots_.get(2);
  for (int distance = 1; distance < size(); distance *= 2)
    peers_.exchange({&token[0], 1, peers_.wrap(rank() + distance)}, {&token[1], 1, peers_.wrap(rank() - distance)}, 1);
}

}  // namespace ringtrain
