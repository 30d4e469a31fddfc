// Operations that a program of XLA has started and not finished. XLA passes arrays about, and nothing else: so what has
// been started is a number in an array of one uint32.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/thread_annotations.h"
#include "record/handle.h"

namespace ringtrain::xla {

// A Handle, or why there is none: to start an operation never fails in XLA's eyes. If it did, XLA would leave out the
// rest of the program on this rank alone, and the others would wait for it.
struct Started {
  std::shared_ptr<Handle> handle;
  std::optional<Error> error;

  bool is_done() const { return !handle || handle->is_done(); }
  bool is_memory_free() const { return !handle || handle->is_memory_free(); }
};

// Any thread.
class Tickets {
 public:
  uint32_t add(Started started);
  // Throws invalid for a number that was not given, or is forgotten.
  Started at(uint32_t ticket) const;
  void forget(uint32_t ticket);
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

}  // namespace ringtrain::xla
