#include "collectives/nccl_group.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "fabric/run_apart.h"
#include "kernels/half.h"

namespace ringtrain {
namespace {

constexpr int kSuccess = 0, kByte = 0;
constexpr int kAverage = 4;  // ncclAvg: each rank's values are divided before they are added

// A factor as a value of the dtype that it multiplies.
struct Factor {
  alignas(8) char bytes[8] = {};

  Factor(DType dtype, double factor) {
    const auto single = static_cast<float>(factor);
    if (dtype == DType::float64) std::memcpy(bytes, &factor, sizeof factor);
    if (dtype == DType::float32) std::memcpy(bytes, &single, sizeof single);
    if (is_half(dtype)) narrow(dtype, 1.0, bytes, &single, 1);
  }

  // Whether about as much of it is left as the dtype holds.
  static bool fits(DType dtype, double factor) {
    if (dtype != DType::float16) return true;
    constexpr double kSmallestNormal = 6.1035e-5, kLargest = 65504;
    return std::abs(factor) >= kSmallestNormal && std::abs(factor) <= kLargest;
  }
};

// What NCCL calls the operation, as long as it lives.
class Operation {
 public:
  Operation(const NcclLibrary& library, NcclHandle comm, const Reduction& reduction, int size)
      : library_(library), comm_(comm), number_(NcclLibrary::operation_of(reduction.dtype, reduction.reduce)) {
    if (reduction.scale == 1.0 || !is_float(reduction.dtype)) return;
    if (reduction.scale == 1.0 / size) {
      number_ = kAverage;
      return;
    }
    constexpr int kHostImmediate = 1;
    Factor factor(reduction.dtype, reduction.scale);
    code_ = library.RedOpCreatePreMulSum(&number_, factor.bytes, NcclLibrary::type_of(reduction.dtype), kHostImmediate,
                                         comm);
    is_own_ = code_ == kSuccess;
  }
  ~Operation() {
    if (is_own_) library_.RedOpDestroy(number_, comm_);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  int code() const { return code_; }
  int number() const { return number_; }

 private:
  const NcclLibrary& library_;
  const NcclHandle comm_;
  int number_;
  int code_ = kSuccess;
  bool is_own_ = false;
};

// Several calls as one.
template <typename Each>
int as_group(const NcclLibrary& library, size_t count, Each each) {
  int code = library.GroupStart();
  for (size_t i = 0; i < count && code == kSuccess; ++i) code = each(i);
  const int ended = library.GroupEnd();
  return code == kSuccess ? ended : code;
}

bool are_equal(const Counts& counts) {
  for (const size_t count : counts)
    if (count != counts.front()) return false;
  return true;
}

uint64_t order_of_magnitude(size_t bytes) {
  uint64_t order = 0;
  for (; bytes > 0; bytes >>= 1) ++order;
  return order;
}

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<NcclComm> comm, std::shared_ptr<GpuPool> pool, std::shared_ptr<NcclMemory> memory,
                     Watch& watch)
    : Group(comm->rank(), comm->size()),
      comm_(std::move(comm)),
      pool_(std::move(pool)),
      memory_(std::move(memory)),
      watch_(watch),
      packed_(*comm_, *pool_, watch) {}

bool NcclGroup::can(const Reduction& reduction) {
  if (NcclLibrary::type_of(reduction.dtype) < 0) return false;
  if (reduction.scale == 1.0 || reduction.dtype == DType::boolean) return true;
  return reduction.reduce == Reduce::sum && is_float(reduction.dtype) && Factor::fits(reduction.dtype, reduction.scale);
}

template <typename Call>
void NcclGroup::enqueue(Kind kind, size_t bytes, const char* name, Call call) {
  memory_->introduce_to(*comm_);
  const uint64_t what = static_cast<uint64_t>(kind) << 32 | order_of_magnitude(bytes);
  if (done_before_.count(what)) return comm_->library().check(call(), name);
  enqueue_apart(name, call);
  done_before_.insert(what);
}

template <typename Call>
void NcclGroup::enqueue_apart(const char* name, Call call) {
  const auto apart = [gpu = comm_->gpu(), call] {
    const Gpu::Current current(*gpu);
    return call();
  };
  comm_->library().check(run_apart(apart, watch_), name);
}

void NcclGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  const Gpu& gpu = *comm_->gpu();
  const size_t element = size_of(reduction.dtype);
  std::vector<Piece> arrays, small;
  size_t small_bytes = 0, total_bytes = 0;
  for (const Piece& piece : pieces) {
    const size_t bytes = piece.count * element;
    if (bytes == 0) continue;
    total_bytes += bytes;
    const bool is_small = bytes < pack_below_bytes_;
    (is_small ? small : arrays).push_back(piece);
    if (is_small) small_bytes += bytes;
  }
  if (total_bytes == 0) return;
  if (small.size() == 1) arrays.push_back(small.front());
  if (small.size() > 1) {
    char* next = packed_.get(small_bytes);
    arrays.push_back({next, next, small_bytes / element});
    for (const Piece& piece : small) {
      gpu.copy(next, piece.source, piece.count * element, gpu.stream());
      next += piece.count * element;
    }
  }
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = gpu.stream(), size = size(),
                     reduction, arrays] {
    const Operation operation(library, comm, reduction, size);
    if (operation.code() != kSuccess) return operation.code();
    return as_group(library, arrays.size(), [&](size_t i) {
      return library.AllReduce(arrays[i].source, arrays[i].destination, arrays[i].count,
                               NcclLibrary::type_of(reduction.dtype), operation.number(), comm, stream);
    });
  };
  enqueue(Kind::allreduce, total_bytes, "ncclAllReduce", call);
  if (small.size() <= 1) return;
  const char* next = static_cast<const char*>(arrays.back().source);
  for (const Piece& piece : small) {
    gpu.copy(piece.destination, next, piece.count * element, gpu.stream());
    next += piece.count * element;
  }
}

void NcclGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                               const Counts& counts) {
  const size_t element = size_of(reduction.dtype);
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(),
                     rank = static_cast<size_t>(rank()), size = size(), reduction, source, destination, counts,
                     element] {
    const Operation operation(library, comm, reduction, size);
    if (operation.code() != kSuccess) return operation.code();
    const int type = NcclLibrary::type_of(reduction.dtype);
    if (are_equal(counts))
      return library.ReduceScatter(source, destination, counts.front(), type, operation.number(), comm, stream);
    const Counts offsets = offsets_of(counts);
    return as_group(library, counts.size(), [&](size_t r) {
      if (counts[r] == 0) return kSuccess;
      const char* slice = static_cast<const char*>(source) + offsets[r] * element;
      void* to = r == rank ? destination : nullptr;
      return library.Reduce_(slice, to, counts[r], type, operation.number(), static_cast<int>(r), comm, stream);
    });
  };
  if (total_of(counts) > 0) enqueue(Kind::reduce_scatter, total_of(counts) * element, "ncclReduceScatter", call);
}

void NcclGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(), source,
                     destination, bytes] {
    if (are_equal(bytes)) return library.AllGather(source, destination, bytes.front(), kByte, comm, stream);
    const Counts offsets = offsets_of(bytes);
    return as_group(library, bytes.size(), [&](size_t r) {
      if (bytes[r] == 0) return kSuccess;
      return library.Broadcast(source, static_cast<char*>(destination) + offsets[r], bytes[r], kByte,
                               static_cast<int>(r), comm, stream);
    });
  };
  if (total_of(bytes) > 0) enqueue(Kind::allgather, total_of(bytes), "ncclAllGather", call);
}

void NcclGroup::broadcast(void* data, size_t bytes, int root) {
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(), data, bytes,
                     root] { return library.Broadcast(data, data, bytes, kByte, root, comm, stream); };
  if (bytes > 0) enqueue(Kind::broadcast, bytes, "ncclBroadcast", call);
}

// Any two ranks may have something for each other for the first time, and these two alone know that.
void NcclGroup::alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) {
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(), source,
                     send_bytes, destination, receive_bytes] {
    const Counts from = offsets_of(send_bytes), to = offsets_of(receive_bytes);
    return as_group(library, send_bytes.size(), [&](size_t r) {
      const int peer = static_cast<int>(r);
      int code = kSuccess;
      if (send_bytes[r] > 0)
        code = library.Send(static_cast<const char*>(source) + from[r], send_bytes[r], kByte, peer, comm, stream);
      if (code == kSuccess && receive_bytes[r] > 0)
        code = library.Recv(static_cast<char*>(destination) + to[r], receive_bytes[r], kByte, peer, comm, stream);
      return code;
    });
  };
  enqueue_apart("ncclSend and ncclRecv", call);
}

void NcclGroup::barrier() {
  char* one = packed_.get(1);
  allreduce({DType::uint8}, {{one, one, 1}});
}

}  // namespace ringtrain
