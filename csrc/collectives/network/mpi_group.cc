#include "collectives/network/mpi_group.h"

#include <cstring>
#include <utility>

#include "collectives/network/blocks.h"

namespace ringtrain {
namespace {

constexpr size_t kMostPerCall = 1 << 30;  // elements or bytes, below the largest int

std::vector<int> to_int(const Counts& counts) { return {counts.begin(), counts.end()}; }

}  // namespace

MpiGroup::MpiGroup(Peers peers)
    : FlatGroup(peers.rank(), peers.size()),
      peers_(std::move(peers)),
      mpi_(peers_.mpi()),
      communicator_(peers_.make_communicator()) {}

void MpiGroup::complete(MpiRequest request) {
  peers_.wait_until([&] { return mpi_.test(request); });
}

void MpiGroup::reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) {
  for (const Piece& array : arrays) {
    if (array.destination != array.source)
      std::memcpy(array.destination, array.source, array.count * size_of(reduction.dtype));
    allreduce_in_place(reduction, array.destination, array.count);
  }
}

void MpiGroup::allreduce_in_place(const Reduction& reduction, void* data, size_t count) {
  if (is_half(reduction.dtype)) {
    auto* wide = reinterpret_cast<float*>(wide_.get(count * sizeof(float)));
    widen(reduction.dtype, wide, data, count);
    allreduce_in_place({DType::float32, reduction.reduce, 1.0}, wide, count);
    return narrow(reduction.dtype, reduction.scale, data, wide, count);
  }
  for_each_part(count, kMostPerCall, [&](size_t begin, size_t length) {
    char* first = static_cast<char*>(data) + begin * size_of(reduction.dtype);
    complete(
        mpi_.iallreduce(first, static_cast<int>(length), reduction.dtype, reduction.reduce, communicator_.handle()));
  });
  if (reduction.scale != 1.0) scale(reduction.dtype, reduction.scale, data, data, count);
}

void MpiGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) {
  const size_t element = size_of(reduction.dtype), total = total_of(counts);
  char* whole = whole_.get(total * element);
  std::memcpy(whole, source, total * element);
  if (total > 0) allreduce_in_place(reduction, whole, total);
  std::memcpy(destination, whole + offsets_of(counts)[rank()] * element, counts[rank()] * element);
}

void MpiGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  counts_ = to_int(bytes);
  offsets_ = to_int(offsets_of(bytes));
  // MPI forbids the source to lie in the destination.
  char* own = whole_.get(bytes[rank()]);
  std::memcpy(own, source, bytes[rank()]);
  complete(mpi_.iallgather(own, counts_[rank()], destination, counts_, offsets_, communicator_.handle()));
}

void MpiGroup::broadcast(void* data, size_t bytes, int root) {
  for_each_part(bytes, kMostPerCall, [&](size_t begin, size_t length) {
    complete(mpi_.ibroadcast(static_cast<char*>(data) + begin, static_cast<int>(length), root, communicator_.handle()));
  });
}

void MpiGroup::alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) {
  counts_ = to_int(send_bytes);
  offsets_ = to_int(offsets_of(send_bytes));
  receive_counts_ = to_int(receive_bytes);
  receive_offsets_ = to_int(offsets_of(receive_bytes));
  complete(mpi_.ialltoall(source, counts_, offsets_, destination, receive_counts_, receive_offsets_,
                          communicator_.handle()));
}

void MpiGroup::barrier() { complete(mpi_.ibarrier(communicator_.handle())); }

}  // namespace ringtrain
