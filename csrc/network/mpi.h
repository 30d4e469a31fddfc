// MPI, whichever library mpi4py has loaded, through the few functions that ringtrain calls.
//
// Nothing is compiled against an mpi.h. The MPI libraries of this world differ in the width of a handle (4 bytes in the
// MPICH family, 8 in Open MPI and in the standard ABI of MPI 5) and in the values of their constants. The width is a
// template parameter of the one implementation; the constants and handles are data that ringtrain/mpi.py takes from
// mpi4py. MPI_Status has three sizes, so none is ever read: every call gets scratch memory large enough for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/keep.h"
#include "base/rank_name.h"
#include "base/watch.h"

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

class Mpi;

// A call that is under way in the library, and all the memory that it may read and write. Who lets go of one that has
// not ended leaves both to the Mpi, which keeps the memory until the library is through with it.
class MpiRequest {
 public:
  MpiRequest() = default;  // one that has ended
  MpiRequest(MpiRequest&& other) noexcept { *this = std::move(other); }
  MpiRequest& operator=(MpiRequest&& other) noexcept;
  ~MpiRequest();

  bool has_ended() const { return mpi_ == nullptr; }

 private:
  friend class Mpi;
  void end() {
    mpi_ = nullptr;
    memory_.reset();
  }

  Mpi* mpi_ = nullptr;  // null when it has ended
  uint64_t handle_ = 0;
  bool can_be_cancelled_ = false;
  std::shared_ptr<const void> memory_;
};

// One that was made for ringtrain. Its ranks free it together, so one that is let go of waits for Mpi::free_unused().
class MpiCommunicator {
 public:
  MpiCommunicator(MpiCommunicator&& other) noexcept
      : mpi_(std::exchange(other.mpi_, nullptr)), handle_(other.handle_) {}
  ~MpiCommunicator();
  MpiCommunicator& operator=(MpiCommunicator&&) = delete;

  MpiComm handle() const { return handle_; }

 private:
  friend class Mpi;
  MpiCommunicator(Mpi* mpi, MpiComm handle) : mpi_(mpi), handle_(handle) {}

  Mpi* mpi_;  // null when it has been moved from
  const MpiComm handle_;
};

// All calls but create() and free_unused() return at once; test() tells when an operation is complete. Errors are
// thrown: PeerLost where MPI says that a process failed, failure otherwise. Requires Engine::turn_, but for
// construction, making the first communicator, and the end.
class Mpi {
 public:
  // `names` of all ranks of the world, to say who has failed.
  static std::unique_ptr<Mpi> open(const MpiDescription& description, const std::vector<RankName>& names);
  virtual ~Mpi();

  // As long as it lives, requests that are started own `memory`: it holds all that they are given addresses in, but for
  // the arrays of the user, who asks whether it is still there (runtime/handle.h).
  class Lending {
   public:
    Lending(Mpi* mpi, std::shared_ptr<const void> memory);  // null: there is no MPI
    ~Lending();
    Lending(const Lending&) = delete;
    Lending& operator=(const Lending&) = delete;

   private:
    Mpi* const mpi_;
    std::shared_ptr<const void> before_;
  };

  virtual MpiComm world() const = 0;
  // Whether it says that it does not take addresses of GPUs. Not every library that does not says so.
  virtual bool denies_cuda() const = 0;

  // The communicator of these ranks of `from`; called by exactly these ranks, in this order. MPI has only a blocking
  // call for it, which runs on a thread of its own; if the watch throws, that thread is left to itself.
  MpiCommunicator create(MpiComm from, const std::vector<int>& ranks, int tag, Watch& watch) {
    return {this, make(from, ranks, tag, watch)};
  }
  // Frees the communicators that nobody has any more. All ranks of them at the same time, in the order in which they
  // were let go of; not after an error. It may wait for the others, as create().
  void free_unused(Watch& watch);

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
  // The vectors are read as long as it is under way.
  virtual MpiRequest iallgather(const void* source, int bytes, void* destination, const std::vector<int>& counts,
                                const std::vector<int>& offsets, MpiComm communicator) = 0;
  virtual MpiRequest ialltoall(const void* source, const std::vector<int>& counts, const std::vector<int>& offsets,
                               void* destination, const std::vector<int>& receive_counts,
                               const std::vector<int>& receive_offsets, MpiComm communicator) = 0;
  virtual MpiRequest ibarrier(MpiComm communicator) = 0;

  // Whether it has ended. Where it has failed, its memory is kept for ever: the library may have parts of it under way.
  bool test(MpiRequest& request);

 protected:
  enum class Kind { message, collective };  // only messages can be cancelled

  MpiRequest begun(uint64_t handle, Kind kind);
  // What one was lent that may have begun all the same.
  void keep_lent() { keep_for_ever(lent_); }
  // Looks at those that nobody waits for any more.
  void forget_ended() noexcept;
  // Throws unless the library says that all is well.
  virtual void check(int code, const char* name) const = 0;

 private:
  friend class MpiRequest;
  friend class MpiCommunicator;

  virtual MpiComm make(MpiComm from, const std::vector<int>& ranks, int tag, Watch& watch) = 0;
  // For another thread, which may outlive this.
  virtual std::function<int()> call_to_free(MpiComm communicator) const = 0;
  // The library's code.
  virtual int look(uint64_t& handle, bool& has_ended) noexcept = 0;
  virtual void cancel(uint64_t handle) noexcept = 0;

  void abandon(MpiRequest request) noexcept;

  std::shared_ptr<const void> lent_;
  std::vector<MpiRequest> abandoned_;
  std::vector<MpiComm> unused_;  // communicators
};

}  // namespace ringtrain
