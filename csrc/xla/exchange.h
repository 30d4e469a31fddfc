// The messages of one call by XLA: what this rank sends to one rank, and what it receives from one.
//
// Few values travel in the thread of XLA that calls (runtime/direct_end.h). All others are submitted to the engine.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "record/handle.h"
#include "runtime/direct_end.h"
#include "xla/call.h"

namespace ringtrain::xla {

// Any thread.
class Exchange {
 public:
  // Once. Begins all of them: the first arguments are sent, and all results but the last one received. Throws if one
  // of them cannot begin; then those before it have begun.
  void begin(const Call& call);

  bool is_done() const;
  // Whether it is done; waits for at most `timeout_s`, and carries the messages meanwhile where it can.
  bool wait(double timeout_s);
  // Once it is done. Throws the error of the first message that has one.
  void require() const;
  // Nobody is going to wait for it: the engine looks after it.
  void leave_to_engine();
  bool is_memory_free() const;
  // Of the messages that the engine carries.
  std::vector<std::shared_ptr<Handle>> handles() const;

 private:
  struct Ends;

  bool begin_directly(const Call& call, const Ends& ends);
  DirectEnds direct_ends() { return {direct_.data(), direct_count_}; }

  std::array<DirectEnd, 2> direct_;
  size_t direct_count_ = 0;
  std::vector<std::shared_ptr<Handle>> submitted_;
};

}  // namespace ringtrain::xla
