// Waits for operations in XLA's place, whose threads have other work, and lets the program go on when they are done.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/thread_annotations.h"
#include "record/handle.h"
#include "xla/exchange.h"
#include "xla/ffi.h"

namespace ringtrain::xla {

// An operation or messages that a call has started, or why it has not: to start something never fails in XLA's eyes. If
// it did, XLA would leave out the rest of the program on this rank alone, and the others would wait for it.
struct Started {
  std::shared_ptr<Handle> handle;      // of an operation of all ranks
  std::shared_ptr<Exchange> exchange;  // of messages
  std::optional<Error> error;
  bool is_awaited = false;  // by a program

  bool is_done() const { return exchange ? exchange->is_done() : !handle || handle->is_done(); }
  bool is_memory_free() const { return exchange ? exchange->is_memory_free() : !handle || handle->is_memory_free(); }
  // Whether it is done; waits for at most `timeout_s`, and does the engine's work meanwhile where it can.
  bool wait(double timeout_s) const;
  // Once it is done. Throws the error with which it ended, if it did.
  void require() const;
};

// Operations that a program of XLA has started and not finished. XLA passes arrays about, and nothing else: so what has
// been started is a number in an array of one uint32.
//
// Any thread.
class Tickets {
 public:
  uint32_t add(Started started);
  // Throws invalid for a number that was not given, or is forgotten.
  Started at(uint32_t ticket) const;
  // The same; from then on a program waits for it.
  Started await(uint32_t ticket);
  void forget(uint32_t ticket);
  // A program waits for all of them.
  void await_all();
  // Those that programs wait for and that are not done.
  std::vector<std::shared_ptr<Handle>> awaited() const;
  bool are_done() const;
  // Whether nobody reads or writes the memory of any of them.
  bool are_free() const;

 private:
  mutable Mutex mutex_;
  uint32_t last_ GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, Started> started_ GUARDED_BY(mutex_);
};

// Of this process.
Tickets& tickets();

// Whether it is done; waits for at most `timeout_s`, and does the engine's work meanwhile where it can.
bool wait_for(Handle& handle, double timeout_s);

// After an operation has failed. XLA leaves out the rest of the program, and frees its memory, where what else it has
// started may still be read and written. However long that takes: the engine gives up what stalls, and all when it
// ends.
void wait_until_memory_is_free();

// The result of an operation that allocates it. Throws mismatch unless it is so long.
const OwnedTensor& result_of(const Started& started, size_t bytes);

// The operations that a program waits for.
class Completion {
 public:
  // Where to the result of an operation goes that the core allocates. XLA keeps the place until the future is set.
  struct Copy {
    uint32_t ticket;
    void* to;
    size_t bytes;
  };

  // Throws invalid for a ticket that was never given. `api` is XLA's, which lives as long as the process.
  Completion(const Api& api, const std::vector<uint32_t>& tickets, std::vector<Copy> copies);

  bool is_done() const;
  // Whether all are done; waits for at most `timeout_s`, and does the engine's work meanwhile where it can.
  bool wait(double timeout_s);
  // Once all are done. Whether take_results() would return an error, and wait for other operations before.
  bool has_failed_early() const;
  // Once all are done. Forgets the tickets. The first error, if there is one.
  std::optional<Error> take_results();

  const Api& api() const { return *api_; }
  Future* future = nullptr;  // of XLA: it goes on when this is set

 private:
  struct Entry {
    uint32_t ticket;
    Started started;
  };

  void copy_results();

  const Api* api_;
  std::vector<Entry> entries_;
  std::vector<Copy> copies_;
  size_t done_ = 0;  // so many of them, from the first
};

// The thread that sets a future of XLA continues with the user's program, so it must not be the engine's.
class Completer {
 public:
  // Any thread. Sets the future of the Completion in the end.
  void post(Completion completion);

 private:
  void work();
  Completion next();
  bool is_anybody_waiting();

  Mutex mutex_;
  std::condition_variable_any has_come_;
  std::deque<Completion> waiting_ GUARDED_BY(mutex_);
  int threads_ GUARDED_BY(mutex_) = 0;
};

// Of this process.
Completer& completer();

}  // namespace ringtrain::xla
