// The ring.
//
// n ranks stand in a ring. Each sends only to its right neighbour and receives only from its left one. The array is cut
// into n slices, and the work is done in steps.
//
// Reduce-scatter, n - 1 steps: in step s rank r sends slice r - s to the right and receives slice r - s - 1 from the
// left, to which it adds its own values (all modulo n). What it received and added in one step is what it sends in the
// next. After the last step it holds the complete sum of slice r + 1. So each slice travels once round the ring and
// every rank adds its share as it passes.
//
// Allgather, n - 1 steps: in step s rank r sends slice r + 1 - s and receives slice r - s, now complete, into its
// place.
//
// Each rank sends 2 (n - 1) / n times the array, the least that any allreduce can do, and every link is busy in every
// step. Steps are not separated by anything: a slice is cut into m chunks, chunk c of a step may be sent as soon as
// chunk c of the step before has arrived and been added, and several chunks are under way all the time, so that a slow
// moment of one neighbour is not felt by the next.
//
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
#include "collectives/ring_group.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

// Slices of an array of `counts` elements each, cut into chunks; all slices count as having as many chunks as the
// longest one, the last of them empty.
class Slices {
 public:
  Slices(char* data, const Counts& counts, size_t element, size_t chunk)
      : data_(data),
        counts_(counts),
        offsets_(offsets_of(counts)),
        element_(element),
        chunk_(chunk),
        chunks_((*std::max_element(counts.begin(), counts.end()) + chunk - 1) / chunk) {}

  size_t chunks_per_slice() const { return chunks_; }
  size_t chunk_bytes() const { return chunk_ * element_; }

  Span chunk(int slice, size_t c) const {
    const size_t begin = std::min(counts_[slice], c * chunk_), end = std::min(counts_[slice], (c + 1) * chunk_);
    return {data_ + (offsets_[slice] + begin) * element_, (end - begin) * element_};
  }

 private:
  char* const data_;
  const Counts& counts_;
  const Counts offsets_;
  const size_t element_, chunk_, chunks_;
};

// Message i belongs to chunk i % m of step i / m, for m chunks per slice.
class RingMessages : public Messages {
 public:
  RingMessages(const Slices& slices, int size) : slices_(slices), size_(size), m_(slices.chunks_per_slice()) {}

  size_t count() const override { return static_cast<size_t>(size_ - 1) * m_; }
  Span outgoing(size_t i) override { return slices_.chunk(wrap(first_outgoing() - step(i)), i % m_); }
  size_t may_send(size_t arrived) const override { return arrived + m_; }

 protected:
  virtual int first_outgoing() const = 0;
  Span target(size_t i) const { return slices_.chunk(wrap(first_outgoing() - step(i) - 1), i % m_); }
  bool is_last_step(size_t i) const { return step(i) == size_ - 2; }

  const Slices& slices_;

 private:
  int step(size_t i) const { return static_cast<int>(i / m_); }
  int wrap(int slice) const { return ((slice % size_) + size_) % size_; }

  const int size_;
  const size_t m_;
};

class ReduceMessages final : public RingMessages {
 public:
  ReduceMessages(const Slices& slices, int size, int owned, const Reduction& reduction, char* scratch)
      : RingMessages(slices, size), owned_(owned), reduction_(reduction), scratch_(scratch) {}

  Span incoming(size_t i) override { return {slot(i), target(i).bytes}; }

  void arrived(size_t i) override {
    const Span own = target(i);
    if (own.bytes == 0) return;
    Reduction reduction = reduction_;
    if (!is_last_step(i)) reduction.scale = 1.0;
    const void* sources[] = {slot(i), own.data};
    void* destination = own.data;
    reduce(reduction, &destination, 1, sources, 2, own.bytes / size_of(reduction.dtype));
  }

 private:
  int first_outgoing() const override { return owned_ - 1; }
  char* slot(size_t i) const { return scratch_ + (i % Flow::kWindow) * slices_.chunk_bytes(); }

  const int owned_;
  const Reduction& reduction_;
  char* const scratch_;
};

class GatherMessages final : public RingMessages {
 public:
  GatherMessages(const Slices& slices, int size, int owned) : RingMessages(slices, size), owned_(owned) {}
  Span incoming(size_t i) override { return target(i); }

 private:
  int first_outgoing() const override { return owned_; }
  const int owned_;
};

// The chunks of one piece of memory each way, independent of each other.
class PlainMessages final : public Messages {
 public:
  PlainMessages(Span outgoing, Span incoming, size_t chunk) : outgoing_(outgoing), incoming_(incoming), chunk_(chunk) {}
  size_t count() const override { return (std::max(outgoing_.bytes, incoming_.bytes) + chunk_ - 1) / chunk_; }
  Span outgoing(size_t i) override { return part(outgoing_, i); }
  Span incoming(size_t i) override { return part(incoming_, i); }
  size_t may_send(size_t) const override { return count(); }

 private:
  Span part(Span whole, size_t i) const {
    const size_t begin = std::min(whole.bytes, i * chunk_);
    return {whole.data + begin, std::min(chunk_, whole.bytes - begin)};
  }

  const Span outgoing_, incoming_;
  const size_t chunk_;
};

// What comes from the left goes on to the right, chunk by chunk; the first of the chain only sends, the last only
// receives.
class ChainMessages final : public Messages {
 public:
  ChainMessages(Span data, size_t chunk, bool is_first, bool is_last)
      : plain_(is_last ? Span{} : data, is_first ? Span{} : data, chunk), is_first_(is_first) {}
  size_t count() const override { return plain_.count(); }
  Span outgoing(size_t i) override { return plain_.outgoing(i); }
  Span incoming(size_t i) override { return plain_.incoming(i); }
  size_t may_send(size_t arrived) const override { return is_first_ ? count() : arrived; }

 private:
  PlainMessages plain_;
  const bool is_first_;
};

}  // namespace

RingGroup::RingGroup(Mpi& mpi, std::vector<int> ranks, int rank, int tag, size_t chunk_bytes, Watch& watch)
    : FlatGroup(rank, static_cast<int>(ranks.size())),
      mpi_(mpi),
      ranks_(std::move(ranks)),
      tag_(tag),
      chunk_bytes_(chunk_bytes),
      watch_(watch) {}

size_t RingGroup::chunk_elements(DType dtype) const { return std::max<size_t>(1, chunk_bytes_ / size_of(dtype)); }

void RingGroup::run(Messages& messages, int to, int from) {
  Flow flow(mpi_, {ranks_[wrap(to)], ranks_[wrap(from)], tag_, mpi_.world()}, messages);
  while (!flow.is_done()) waiter_.poll([&] { return flow.step(); }, &watch_);
}

void RingGroup::reduce_slices(const Reduction& reduction, char* data, const Counts& counts, int shift) {
  if (is_half(reduction.dtype)) return reduce_half_slices(reduction, data, counts, shift);
  const Slices slices(data, counts, size_of(reduction.dtype), chunk_elements(reduction.dtype));
  char* scratch = incoming_.get(Flow::kWindow * slices.chunk_bytes());
  ReduceMessages messages(slices, size(), wrap(rank() + shift), reduction, scratch);
  run(messages, rank() + 1, rank() - 1);
}

void RingGroup::reduce_half_slices(const Reduction& reduction, char* data, const Counts& counts, int shift) {
  const size_t element = size_of(reduction.dtype);
  const Counts offsets = offsets_of(counts);
  const int owned = wrap(rank() + shift);
  const size_t owned_bytes = counts[owned] * element;
  char* scratch = incoming_.get(owned_bytes * static_cast<size_t>(size()));
  for (int i = 1; i < size(); ++i) {
    const int to = wrap(rank() + i), from = wrap(rank() - i), slice = wrap(to + shift);
    PlainMessages messages({data + offsets[slice] * element, counts[slice] * element},
                           {scratch + owned_bytes * static_cast<size_t>(from), owned_bytes}, chunk_bytes_);
    run(messages, to, from);
  }
  char* own = data + offsets[owned] * element;
  std::vector<const void*> sources(static_cast<size_t>(size()));
  for (int peer = 0; peer < size(); ++peer)
    sources[peer] = peer == rank() ? own : scratch + owned_bytes * static_cast<size_t>(peer);
  void* destination = own;
  reduce(reduction, &destination, 1, sources.data(), size(), counts[owned]);
}

void RingGroup::gather_slices(char* data, const Counts& bytes, int shift) {
  const Slices slices(data, bytes, 1, chunk_bytes_);
  GatherMessages messages(slices, size(), wrap(rank() + shift));
  run(messages, rank() + 1, rank() - 1);
}

void RingGroup::allreduce_in_place(const Reduction& reduction, void* data, size_t count) {
  const Counts counts = even_slices(count, size());
  reduce_slices(reduction, static_cast<char*>(data), counts, 1);
  gather_slices(static_cast<char*>(data), in_bytes(counts, size_of(reduction.dtype)), 1);
}

void RingGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                               const Counts& counts) {
  const size_t element = size_of(reduction.dtype), bytes = total_of(counts) * element;
  char* whole = whole_.get(bytes);
  std::memcpy(whole, source, bytes);
  reduce_slices(reduction, whole, counts, 0);
  std::memcpy(destination, whole + offsets_of(counts)[rank()] * element, counts[rank()] * element);
}

void RingGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  char* own = static_cast<char*>(destination) + offsets_of(bytes)[rank()];
  if (own != source && bytes[rank()] > 0) std::memcpy(own, source, bytes[rank()]);
  gather_slices(static_cast<char*>(destination), bytes, 0);
}

void RingGroup::broadcast(void* data, size_t bytes, int root) {
  const int place = wrap(rank() - root);
  ChainMessages messages({static_cast<char*>(data), bytes}, chunk_bytes_, place == 0, place == size() - 1);
  run(messages, rank() + 1, rank() - 1);
}

void RingGroup::alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) {
  const Counts send_offsets = offsets_of(send_bytes), receive_offsets = offsets_of(receive_bytes);
  char* out = const_cast<char*>(static_cast<const char*>(source));  // MPI only reads what it sends
  char* in = static_cast<char*>(destination);
  if (send_bytes[rank()] > 0) std::memcpy(in + receive_offsets[rank()], out + send_offsets[rank()], send_bytes[rank()]);
  for (int i = 1; i < size(); ++i) {
    const int to = wrap(rank() + i), from = wrap(rank() - i);
    PlainMessages messages({out + send_offsets[to], send_bytes[to]}, {in + receive_offsets[from], receive_bytes[from]},
                           chunk_bytes_);
    run(messages, to, from);
  }
}

void RingGroup::barrier() {
  char token[2] = {};
  for (int distance = 1; distance < size(); distance *= 2) {
    PlainMessages messages({&token[0], 1}, {&token[1], 1}, 1);
    run(messages, rank() + distance, rank() - distance);
  }
}

}  // namespace ringtrain
