// Takes the place of csrc/memory/shm.h in the simulation of stores: memory that processes of a simulated host share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace ringtrain {

class SharedSegment {
 public:
  static SharedSegment create(size_t bytes, size_t reserved);
  // Throws where its creator, or another process that has it and is named instead, is dead.
  static SharedSegment attach(int64_t creator_pid, uint64_t ticket, size_t bytes);

  SharedSegment() = default;

  uint64_t ticket() const { return ticket_; }
  void reserve(size_t, size_t) {}
  char* data() const { return memory_.get(); }

 private:
  SharedSegment(std::shared_ptr<char> memory, uint64_t ticket) : memory_(std::move(memory)), ticket_(ticket) {}

  std::shared_ptr<char> memory_;
  uint64_t ticket_ = 0;
};

}  // namespace ringtrain
