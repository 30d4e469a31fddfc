// Messages between the ranks of the world, whatever carries them, and the memory of those that are under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "base/wait.h"

namespace ringtrain {

class LibraryCollectives;
class Network;

// A send, receive or collective that is under way, and all the memory that it may read and write. A request that is
// destroyed before it has ended goes to the Network, which cancels it if it can, and keeps its memory until it has
// ended or the process ends.
class NetworkRequest {
 public:
  NetworkRequest() = default;  // one that has ended
  NetworkRequest(NetworkRequest&& other) noexcept { *this = std::move(other); }
  NetworkRequest& operator=(NetworkRequest&& other) noexcept;
  ~NetworkRequest();

  bool has_ended() const { return network_ == nullptr; }

 private:
  friend class Network;
  void end() {
    network_ = nullptr;
    memory_.reset();
  }

  Network* network_ = nullptr;  // null when it has ended
  uint64_t handle_ = 0;
  bool can_be_cancelled_ = false;
  std::shared_ptr<const void> memory_;
};

// All calls return at once; test() tells when a message has left, or come. Messages of one tag from one rank to another
// come in the order in which they were sent. Errors are thrown: PeerLost where the Network knows that a process is
// gone, failure otherwise. Requires Engine::turn_, but for construction, making the first Group, and the end.
class Network {
 public:
  virtual ~Network();

  // As long as it lives, requests that its thread starts own `memory`, which holds all that they are given addresses
  // in. Only the arrays of the user are not part of it: record/handle.h asks whether `memory` is still there before
  // they go.
  class Lending {
   public:
    Lending(Network* network, std::shared_ptr<const void> memory);  // null: there is no Network
    ~Lending();
    Lending(const Lending&) = delete;
    Lending& operator=(const Lending&) = delete;

   private:
    Network* const network_;
    std::shared_ptr<const void> before_;
  };

  virtual NetworkRequest isend(const void* data, size_t bytes, int to, int tag) = 0;
  // For a message of at most so many bytes.
  virtual NetworkRequest irecv(void* data, size_t bytes, int from, int tag) = 0;
  virtual bool has_arrived(int from, int tag) = 0;
  virtual bool has_arrived_from_any(int tag) = 0;
  // Returns the sender of what has_arrived_from_any() has seen. To receive from "any" rank what is there already is
  // what MPICH 5.0 over UCX sometimes never does.
  virtual int sender(const std::vector<int>& ranks, int tag);

  // Whether a message to that rank needs no new connection.
  virtual bool is_connected_to(int /*rank*/) const { return true; }
  // Whether that rank would see something end with this process: a connection.
  virtual bool would_see_end_at(int /*rank*/) const { return false; }

  // Whether it has ended. Where it has failed, its memory is kept for ever: parts of it may be under way.
  bool test(NetworkRequest& request);

  // The job has failed: the destructor waits for no rank that is cut off, which will see its connections end.
  virtual void has_failed() {}

  // Whether long messages take less processor time than short ones, and delay no others.
  virtual bool prefers_long_messages() const { return false; }

  // Readable when there may be something to do; negative: one has to look.
  virtual int descriptor() const { return -1; }
  // Sleeps until there may be something to do: for `pause_s` where one has to look, else for `longest_s` or a moment.
  // Other threads work meanwhile. `watch` may be null.
  void sleep(double pause_s, double longest_s, Watch* watch);

  // Null where the Network only carries messages.
  virtual LibraryCollectives* collectives() { return nullptr; }

 protected:
  enum class Kind { message, collective };  // only messages can be cancelled

  NetworkRequest begun(uint64_t handle, Kind kind);
  // The memory lent to one that may have begun all the same.
  void keep_lent();
  // Called where messages have come or left: wakes threads that sleep, which may wait for these.
  void wake_sleepers();
  // Looks at those that nobody waits for any more.
  void forget_ended() noexcept;

 private:
  friend class NetworkRequest;

  // Returns 0, or a code with which require_success() throws.
  virtual int look(uint64_t& handle, bool& has_ended) noexcept = 0;
  virtual void require_success(int code) const = 0;
  virtual void cancel(uint64_t handle) noexcept = 0;
  // Called before a thread sleeps: ends sends that only wait until a copy is made. Returns whether there were any.
  virtual bool let_senders_go() noexcept { return false; }
  // Whether what was cancelled, or has failed, reads and writes no memory any more.
  virtual bool lets_go_at_once() const { return false; }
  void keep(const NetworkRequest& request) const;

  void abandon(NetworkRequest request) noexcept;

  std::vector<NetworkRequest> abandoned_;
  std::vector<int> sleepers_;  // of each thread that sleeps: the descriptor of an event that wakes it
};

// Ranks that call the library's collectives together. Calls return at once, as those of the Network do, which outlives
// this; Network::test() tells when one has ended.
class LibraryCommunicator {
 public:
  virtual ~LibraryCommunicator() = default;

  // In place. dtype: not a 16-bit float.
  virtual NetworkRequest iallreduce(void* data, int count, DType dtype, Reduce reduce) = 0;
};

// The collectives that a library has itself: the vendor knows its network.
class LibraryCollectives {
 public:
  virtual ~LibraryCollectives() = default;

  // Whether it says that it does not take addresses of GPUs. Not every library that does not says so.
  virtual bool denies_cuda() const = 0;

  // Called by exactly these ranks of the world, in this order, at the same time. It may block inside; where the Watch
  // throws meanwhile, the call is left to itself.
  virtual std::unique_ptr<LibraryCommunicator> connect(const std::vector<int>& ranks, int tag, Watch& watch) = 0;

  // Frees the communicators that nobody has any more, which their ranks must do together: all of them at the same time,
  // in the order in which they were let go of; not after an error. It may wait for the others.
  virtual void free_unused(Watch& watch) = 0;
};

}  // namespace ringtrain
