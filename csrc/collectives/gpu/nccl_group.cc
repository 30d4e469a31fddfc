#include "collectives/gpu/nccl_group.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

namespace ringtrain {
namespace {

constexpr int kSuccess = 0, kByte = 0;
constexpr size_t kBytes = 16 << 20;

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

// NCCL's name of the operation, valid as long as this lives.
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

}  // namespace

NcclBuffer::~NcclBuffer() {
  try {
    drop();
  } catch (const Error&) {
    // Nobody answers any more: it goes with the process.
  }
}

bool NcclBuffer::prepare() {
  const NcclLibrary& library = comm_.library();
  if (!library.MemAlloc || !library.CommRegister) return false;
  if (library.MemAlloc(&memory_, kBytes) != kSuccess) {
    memory_ = nullptr;
    return false;
  }
  const std::optional<void*> registration = comm_.register_buffer(memory_, kBytes);
  registration_ = registration.value_or(nullptr);
  if (!registration) drop();
  return registration.has_value();
}

void NcclBuffer::drop() {
  comm_.deregister(registration_);
  if (memory_) comm_.library().MemFree(memory_);
  registration_ = memory_ = nullptr;
}

char* NcclBuffer::get(size_t bytes) {
  if (memory_ && bytes <= kBytes) return static_cast<char*>(memory_);
  block_.reset();
  block_ = pool_.take(bytes);
  return block_->data();
}

NcclGroup::NcclGroup(std::shared_ptr<NcclComm> comm, std::shared_ptr<GpuPool> pool, std::shared_ptr<NcclMemory> memory,
                     int key)
    : Group(comm->rank(), comm->size()),
      comm_(std::move(comm)),
      pool_(std::move(pool)),
      memory_(std::move(memory)),
      key_(key),
      packed_(*comm_, *pool_) {}

NcclGroup::~NcclGroup() {
  memory_->note_deregistered(key_);
  try {
    for (void* registration : registrations_) comm_->deregister(registration);
  } catch (const Error&) {
    // Nobody answers any more.
  }
}

bool NcclGroup::can(const Reduction& reduction) {
  if (NcclLibrary::type_of(reduction.dtype) < 0) return false;
  if (reduction.scale == 1.0 || reduction.dtype == DType::boolean) return true;
  return reduction.reduce == Reduce::sum && is_float(reduction.dtype) && Factor::fits(reduction.dtype, reduction.scale);
}

void NcclGroup::enqueue(const char* name, size_t arrays, std::function<int()> call) {
  constexpr size_t kOfKernel = 4;  // arrays that one kernel of NCCL takes at least: 2.30 makes 22 kernels of 161 arrays
  register_new_slabs();
  comm_->gpu()->note_commands(1 + arrays / kOfKernel);
  comm_->caller().run(name, comm_->handle(), std::move(call));
}

// A slab is worked in from the first operation on that is submitted after this, and only if all ranks know theirs:
// where NCCL refuses one on some rank, what is there is copied on all.
void NcclGroup::register_new_slabs() {
  for (const auto& [data, bytes] : memory_->slabs_after(registrations_.size())) {
    const std::optional<void*> registration = comm_->register_buffer(data, bytes);
    if (registration) memory_->note_registered(registrations_.size(), key_);
    registrations_.push_back(registration.value_or(nullptr));
  }
}

const void* NcclGroup::readable(const void* source, size_t bytes, GpuBlocks& blocks) {
  if (bytes == 0 || !memory_->holds(source, bytes)) return source;
  blocks.push_back(pool_->take(bytes));
  deliver(blocks.back()->data(), source, bytes);
  return blocks.back()->data();
}

void* NcclGroup::writable(void* destination, size_t bytes, GpuBlocks& blocks) {
  if (bytes == 0 || !memory_->holds(destination, bytes)) return destination;
  blocks.push_back(pool_->take(bytes));
  return blocks.back()->data();
}

void NcclGroup::deliver(void* destination, const void* written, size_t bytes) {
  comm_->gpu()->copy(destination, written, bytes, comm_->gpu()->stream());
}

void NcclGroup::allreduce_registered(const Reduction& reduction, const std::vector<Piece>& pieces) {
  if (!can(reduction)) return fallback_->allreduce_registered(reduction, pieces);
  reduce_arrays(reduction, pieces);
}

void NcclGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  if (!can(reduction)) return fallback_->allreduce(reduction, pieces);
  const size_t element = size_of(reduction.dtype);
  std::vector<Piece> arrays, small;
  std::vector<Piece> written;  // what was worked on elsewhere, and where it belongs
  size_t small_bytes = 0;
  GpuBlocks blocks;
  const auto is_small = [&](const Piece& piece) {
    return piece.count > 0 && piece.count * element < pack_below_bytes_;
  };
  const bool packs = std::count_if(pieces.begin(), pieces.end(), is_small) > 1;
  for (const Piece& piece : pieces) {
    const size_t bytes = piece.count * element;
    if (packs && is_small(piece)) {
      small.push_back(piece);
      small_bytes += bytes;
      continue;
    }
    const void* source = readable(piece.source, bytes, blocks);
    void* destination = writable(piece.destination, bytes, blocks);
    arrays.push_back({source, destination, piece.count});
    if (destination != piece.destination) written.push_back({destination, piece.destination, piece.count});
  }
  if (!small.empty()) {
    char* next = packed_.get(small_bytes);
    arrays.push_back({next, next, small_bytes / element});
    for (const Piece& piece : small) {
      deliver(next, piece.source, piece.count * element);
      written.push_back({next, piece.destination, piece.count});
      next += piece.count * element;
    }
  }
  reduce_arrays(reduction, arrays);
  for (const Piece& piece : written) deliver(piece.destination, piece.source, piece.count * element);
}

void NcclGroup::reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) {
  const auto is_empty = [](const Piece& array) { return array.count == 0; };
  if (std::all_of(arrays.begin(), arrays.end(), is_empty)) return;
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(),
                     size = size(), reduction, arrays] {
    const Operation operation(library, comm, reduction, size);
    if (operation.code() != kSuccess) return operation.code();
    return as_group(library, arrays.size(), [&](size_t i) {
      if (arrays[i].count == 0) return kSuccess;
      return library.AllReduce(arrays[i].source, arrays[i].destination, arrays[i].count,
                               NcclLibrary::type_of(reduction.dtype), operation.number(), comm, stream);
    });
  };
  enqueue("ncclAllReduce", arrays.size(), call);
}

void NcclGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                               const Counts& counts) {
  if (!can(reduction)) return fallback_->reduce_scatter(reduction, source, destination, counts);
  const size_t element = size_of(reduction.dtype), total = total_of(counts) * element;
  const auto rank = static_cast<size_t>(this->rank());
  if (total == 0) return;
  GpuBlocks blocks;
  const void* from = readable(source, total, blocks);
  void* to = writable(destination, counts[rank] * element, blocks);
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(), rank,
                     size = size(), reduction, from, to, counts, element] {
    const Operation operation(library, comm, reduction, size);
    if (operation.code() != kSuccess) return operation.code();
    const int type = NcclLibrary::type_of(reduction.dtype);
    if (are_equal(counts))
      return library.ReduceScatter(from, to, counts.front(), type, operation.number(), comm, stream);
    const Counts offsets = offsets_of(counts);
    return as_group(library, counts.size(), [&](size_t r) {
      if (counts[r] == 0) return kSuccess;
      const char* slice = static_cast<const char*>(from) + offsets[r] * element;
      void* result = r == rank ? to : nullptr;
      return library.Reduce_(slice, result, counts[r], type, operation.number(), static_cast<int>(r), comm, stream);
    });
  };
  enqueue("ncclReduceScatter", counts.size(), call);
  deliver(destination, to, counts[rank] * element);
}

void NcclGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  const size_t total = total_of(bytes);
  if (total == 0) return;
  GpuBlocks blocks;
  const void* from = readable(source, bytes[static_cast<size_t>(rank())], blocks);
  void* to = writable(destination, total, blocks);
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(), from, to,
                     bytes] {
    if (are_equal(bytes)) return library.AllGather(from, to, bytes.front(), kByte, comm, stream);
    const Counts offsets = offsets_of(bytes);
    return as_group(library, bytes.size(), [&](size_t r) {
      if (bytes[r] == 0) return kSuccess;
      return library.Broadcast(from, static_cast<char*>(to) + offsets[r], bytes[r], kByte, static_cast<int>(r), comm,
                               stream);
    });
  };
  enqueue("ncclAllGather", bytes.size(), call);
  deliver(destination, to, total);
}

void NcclGroup::broadcast(void* data, size_t bytes, int root) {
  if (bytes == 0) return;
  GpuBlocks blocks;
  void* at = const_cast<void*>(readable(data, bytes, blocks));
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(), at, bytes,
                     root] { return library.Broadcast(at, at, bytes, kByte, root, comm, stream); };
  enqueue("ncclBroadcast", 1, call);
  deliver(data, at, bytes);
}

void NcclGroup::alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) {
  GpuBlocks blocks;
  const void* from = readable(source, total_of(send_bytes), blocks);
  void* to = writable(destination, total_of(receive_bytes), blocks);
  const auto call = [&library = comm_->library(), comm = comm_->handle(), stream = comm_->gpu()->stream(), from,
                     send_bytes, to, receive_bytes] {
    const Counts sent = offsets_of(send_bytes), received = offsets_of(receive_bytes);
    return as_group(library, send_bytes.size(), [&](size_t r) {
      const int peer = static_cast<int>(r);
      int code = kSuccess;
      if (send_bytes[r] > 0)
        code = library.Send(static_cast<const char*>(from) + sent[r], send_bytes[r], kByte, peer, comm, stream);
      if (code == kSuccess && receive_bytes[r] > 0)
        code = library.Recv(static_cast<char*>(to) + received[r], receive_bytes[r], kByte, peer, comm, stream);
      return code;
    });
  };
  enqueue("ncclSend and ncclRecv", send_bytes.size() + receive_bytes.size(), call);
  deliver(destination, to, total_of(receive_bytes));
}

void NcclGroup::probe_packing(Watch& watch) {
  constexpr size_t kPieces = 16, kNever = 0, kAlways = size_t{1} << 40;
  constexpr size_t kSizes[] = {16 << 10, 256 << 10};  // bytes of a piece, ascending
  if (size() == 1) return;                            // nothing travels
  const Gpu& gpu = *comm_->gpu();
  const GpuBlockPtr block = pool_->take(kPieces * kSizes[1]);
  const std::shared_ptr<char> host = gpu.pinned(sizeof(double));
  gpu.clear(block->data(), kPieces * kSizes[1], gpu.stream());
  size_t pack_below = kNever;
  for (const size_t bytes : kSizes) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < kPieces; ++i)
      pieces.push_back({block->data() + i * bytes, block->data() + i * bytes, bytes / sizeof(float)});
    pack_below_bytes_ = kAlways;
    const double packed_s = seconds_for(pieces, reinterpret_cast<double*>(host.get()), watch);
    pack_below_bytes_ = kNever;
    if (packed_s < seconds_for(pieces, reinterpret_cast<double*>(host.get()), watch)) pack_below = bytes + 1;
  }
  pack_below_bytes_ = pack_below;
}

// `host`: a number that the GPU can reach.
double NcclGroup::seconds_for(const std::vector<Piece>& pieces, double* host, Watch& watch) {
  const Gpu& gpu = *comm_->gpu();
  const auto finish = [&] { gpu.wait(*gpu.record(gpu.stream()), watch); };
  const auto work = [&] {
    allreduce({DType::float32}, pieces);
    finish();
  };
  return probe_s(work, [&](double seconds) {
    char* number = packed_.get(sizeof seconds);
    *host = seconds;
    deliver(number, host, sizeof seconds);
    reduce_arrays({DType::float64, Reduce::max}, {{number, number, 1}});
    deliver(host, number, sizeof seconds);
    finish();
    return *host;
  });
}

void NcclGroup::barrier() {
  char* one = packed_.get(1);
  allreduce({DType::uint8}, {{one, one, 1}});
}

// Tensors that cannot be cut into equal slices in place are packed first: NCCL is fast with equal ones only, and every
// call costs as much as copying some hundred kilobytes on the GPU.
void GpuHierarchy::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  if (!NcclGroup::can(reduction)) return StagedGroup::allreduce(reduction, pieces);
  const size_t element = size_of(reduction.dtype), unit = 64 * static_cast<size_t>(parts_.owners);
  size_t total = 0;
  for (const Piece& piece : pieces) total += piece.count;
  if (total == 0) return;
  if (pieces.size() == 1 && total % unit == 0) return allreduce_array(reduction, pieces.front());
  const size_t padded = (total + unit - 1) / unit * unit;
  const GpuBlockPtr block = pool_->take(padded * element);
  char* next = block->data();
  for (const Piece& piece : pieces) {
    gpu().copy(next, piece.source, piece.count * element, gpu().stream());
    next += piece.count * element;
  }
  gpu().clear(next, (padded - total) * element, gpu().stream());
  allreduce_array(reduction, {block->data(), block->data(), padded});
  next = block->data();
  for (const Piece& piece : pieces) {
    gpu().copy(piece.destination, next, piece.count * element, gpu().stream());
    next += piece.count * element;
  }
}

// The factor goes in first, so that 16-bit floats do not overflow on their way.
void GpuHierarchy::allreduce_array(const Reduction& reduction, const Piece& piece) {
  Counts counts = even_slices(piece.count, parts_.owners);
  counts.resize(static_cast<size_t>(parts_.node->size()));
  const Counts bytes = in_bytes(counts, size_of(reduction.dtype));
  const auto place = static_cast<size_t>(parts_.node->rank());
  char* own = static_cast<char*>(piece.destination) + offsets_of(bytes)[place];
  parts_.node->reduce_scatter(reduction, piece.source, own, counts);
  if (parts_.cross) parts_.cross->allreduce({reduction.dtype, reduction.reduce, 1.0}, {{own, own, counts[place]}});
  parts_.node->allgather(own, piece.destination, bytes);
}

}  // namespace ringtrain
