// MPI, whichever library mpi4py has loaded, through the few functions that ringtrain calls.
//
// Nothing is compiled against an mpi.h. The MPI libraries of this world differ in the width of a handle (4 bytes in the
// MPICH family, 8 in Open MPI and in the standard ABI of MPI 5) and in the values of their constants. The width is a
// template parameter of the one implementation; the constants and handles are data that ringtrain/mpi.py takes from
// mpi4py. MPI_Status has three sizes, so none is ever read: every call gets scratch memory large enough for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "fabric/node.h"
#include "fabric/watch.h"

namespace ringtrain {

// What ringtrain/mpi.py tells of the library.
struct MpiDescription {
  std::string library;                       // path of the libmpi that is loaded in this process
  int handle_bytes = 0;                      // 4 or 8
  uint64_t communicator = 0;                 // a duplicate made for ringtrain alone; mpi4py frees it
  std::map<std::string, uint64_t> handles;   // "float32", "sum", ...: datatypes and operations
  std::map<std::string, int64_t> constants;  // "any_source", "in_place" (an address), "err_proc_failed", ...
};

// A communicator of any library.
using MpiComm = uint64_t;

// A request of any library; its bytes mean nothing here.
struct MpiRequest {
  uint64_t handle = 0;
  bool active = false;
};

// All calls but create() return at once; test() tells when an operation is complete. Errors are thrown: PeerLost where
// MPI says that a process failed, failure otherwise. Requires Engine::turn_, but for construction and making the first
// communicator.
class Mpi {
 public:
  // `names` of all ranks of the world, to say who has failed.
  static std::unique_ptr<Mpi> open(const MpiDescription& description, const std::vector<RankName>& names);
  virtual ~Mpi() = default;

  virtual MpiComm world() const = 0;
  // Whether it says that it does not take addresses of GPUs. Not every library that does not says so.
  virtual bool denies_cuda() const = 0;

  // The communicator of these ranks of `from`; called by exactly these ranks, in this order. MPI has only a blocking
  // call for it, which runs on a thread of its own; if the watch throws, that thread is left to itself.
  virtual MpiComm create(MpiComm from, const std::vector<int>& ranks, int tag, Watch& watch) = 0;
  virtual void free(MpiComm& communicator) = 0;

  virtual MpiRequest isend(const void* data, size_t bytes, int to, int tag, MpiComm communicator) = 0;
  virtual MpiRequest irecv(void* data, size_t bytes, int from, int tag, MpiComm communicator) = 0;
  virtual bool has_arrived(int from, int tag, MpiComm communicator) = 0;
  virtual bool has_arrived_from_any(int tag, MpiComm communicator) = 0;
  // Who of these has sent what has_arrived_from_any() has seen. To receive from "any" rank what is there already is
  // what MPICH 5.0 over UCX sometimes never does.
  int sender(const std::vector<int>& ranks, int tag, MpiComm communicator);

  // In place. dtype: not a 16-bit float.
  virtual MpiRequest iallreduce(void* data, int count, DType dtype, Reduce reduce, MpiComm communicator) = 0;
  virtual MpiRequest ibroadcast(void* data, int bytes, int root, MpiComm communicator) = 0;
  // The vectors must live until the operation is complete.
  virtual MpiRequest iallgather(const void* source, int bytes, void* destination, const std::vector<int>& counts,
                                const std::vector<int>& offsets, MpiComm communicator) = 0;
  virtual MpiRequest ialltoall(const void* source, const std::vector<int>& counts, const std::vector<int>& offsets,
                               void* destination, const std::vector<int>& receive_counts,
                               const std::vector<int>& receive_offsets, MpiComm communicator) = 0;
  virtual MpiRequest ibarrier(MpiComm communicator) = 0;

  // Whether it is complete; then `request` is inactive.
  virtual bool test(MpiRequest& request) = 0;
  // Gives a request up after an error: its memory will not be written any more, if the library can do that at all.
  virtual void cancel(MpiRequest& request) noexcept = 0;
};

}  // namespace ringtrain
