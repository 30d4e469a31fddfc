// A double of the MPI library, for what a real one does too rarely to be tested: it is the real one but for a few calls
// that do what the standard allows. Other functions are those of the real one, with which it is linked.
//
// - Nothing that is under way can be cancelled, unless mpi_double_let_cancel(1) was called, and what is received for it
//   may come at any later time: mpi_double_write_late() lets all of it come.
// - MPI_Comm_free waits for all ranks of the communicator, as a collective call may.
// - Calls that send fail from mpi_double_refuse() on, as they do when the library knows that a rank is dead.
//
// MPI_HANDLE is the type of a handle of the real one.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

using H = MPI_HANDLE;

namespace {

struct Buffer {
  char* data;
  size_t bytes;
};

std::mutex mutex;
// Guarded by mutex.
std::map<H, std::vector<Buffer>>& under_way() {
  static auto* const one = new std::map<H, std::vector<Buffer>>;
  return *one;
}
std::atomic<int> communicators{0};

constexpr int kAnyRank = -1, kNoRank = -2;
int refused_rank = kNoRank, refusal = 0;
size_t refused_from_bytes = 0;
int calls_before_refusal = 0;
bool lets_cancel = false;

bool is_refused(int to, size_t bytes) {
  if ((refused_rank != kAnyRank && refused_rank != to) || bytes < refused_from_bytes) return false;
  return calls_before_refusal-- <= 0;
}

template <typename Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) real(static_cast<decltype(name)*>(nullptr), #name)

int noted(int code, H request, std::vector<Buffer> buffers) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (code == 0) under_way()[request] = std::move(buffers);
  return code;
}

}  // namespace

extern "C" {

int MPI_Isend(const void*, int, H, int, int, H, H*);
int MPI_Irecv(void*, int, H, int, int, H, H*);
int MPI_Test(H*, int*, void*);
int MPI_Cancel(H*);
int MPI_Iallreduce(const void*, void*, int, H, H, H, H*);
int MPI_Comm_create_group(H, H, int, H*);
int MPI_Comm_free(H*);
int MPI_Barrier(H);
int MPI_Type_size(H, int*);

// How many bytes have come.
size_t mpi_double_write_late() {
  const std::lock_guard<std::mutex> lock(mutex);
  size_t bytes = 0;
  for (const auto& [request, buffers] : under_way()) {
    for (const Buffer& buffer : buffers) {
      std::memset(buffer.data, 0xEE, buffer.bytes);
      bytes += buffer.bytes;
    }
  }
  return bytes;
}

// From now on what sends so many bytes or more to this rank answers `code`, but for the next `after` calls; -1 is any
// rank, to which collective calls send, too, and -2 is none.
void mpi_double_refuse(int rank, size_t from_bytes, int after, int code) {
  refused_rank = rank;
  refused_from_bytes = from_bytes;
  calls_before_refusal = after;
  refusal = code;
}

void mpi_double_let_cancel(int lets) { lets_cancel = lets != 0; }

// That were made and are not freed yet.
int mpi_double_communicators() { return communicators.load(); }

int MPI_Isend(const void* data, int count, H type, int to, int tag, H communicator, H* request) {
  if (is_refused(to, static_cast<size_t>(count))) return refusal;
  return REAL(MPI_Isend)(data, count, type, to, tag, communicator, request);
}

int MPI_Irecv(void* data, int count, H type, int from, int tag, H communicator, H* request) {
  const int code = REAL(MPI_Irecv)(data, count, type, from, tag, communicator, request);
  return noted(code, *request, {{static_cast<char*>(data), static_cast<size_t>(count)}});
}

int MPI_Iallreduce(const void* source, void* data, int count, H type, H operation, H communicator, H* request) {
  int size = 0;
  MPI_Type_size(type, &size);
  if (is_refused(kAnyRank, static_cast<size_t>(count * size))) return refusal;
  const int code = REAL(MPI_Iallreduce)(source, data, count, type, operation, communicator, request);
  return noted(code, *request, {{static_cast<char*>(data), static_cast<size_t>(count * size)}});
}

int MPI_Test(H* request, int* is_complete, void* status) {
  const H before = *request;
  const int code = REAL(MPI_Test)(request, is_complete, status);
  const std::lock_guard<std::mutex> lock(mutex);
  if (*is_complete) under_way().erase(before);
  return code;
}

int MPI_Cancel(H* request) { return lets_cancel ? REAL(MPI_Cancel)(request) : 0; }

int MPI_Comm_create_group(H communicator, H group, int tag, H* made) {
  ++communicators;
  return REAL(MPI_Comm_create_group)(communicator, group, tag, made);
}

int MPI_Comm_free(H* communicator) {
  MPI_Barrier(*communicator);
  --communicators;
  return REAL(MPI_Comm_free)(communicator);
}

}  // extern "C"
