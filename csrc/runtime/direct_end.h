// One end of a message of few values between two ranks of this node, which the thread that needs it begins and carries
// itself, without a Submission and without another thread: those would take several times as long as the message.
//
// It stays so for a moment only. As soon as its other end is late or does not fit, or a round announces what waits, it
// is handed over: it gets a Submission, and goes on as all other messages do.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/tensor.h"
#include "record/handle.h"

namespace ringtrain {

struct DirectEnd {
  static constexpr size_t kMostDimensions = 6;
  enum class State { waits, done, handed_over };

  // ---- of the caller, who keeps its place and the memory until it is done, or the Handle is
  bool sends = false;
  int32_t process_set = 0;
  int64_t tag = 0;
  int peer = -1;
  char* memory = nullptr;
  DType dtype = DType::uint8;
  uint16_t dimensions = 0;
  std::array<int64_t, kMostDimensions> shape = {};
  std::shared_ptr<const std::string> site;

  // ---- any thread
  std::atomic<State> state{State::waits};

  // ---- with the turn
  int64_t number = -1;
  std::shared_ptr<Handle> handle;  // any thread, once it is handed over

  bool is_settled() const { return state.load(std::memory_order_acquire) != State::waits; }
  size_t bytes() const {
    size_t bytes = size_of(dtype);
    for (size_t i = 0; i < dimensions; ++i) bytes *= static_cast<size_t>(shape[i]);
    return bytes;
  }
  TensorSpec spec() const { return {dtype, Shape(shape.begin(), shape.begin() + dimensions)}; }
  bool has(DType other, const int64_t* begin, const int64_t* end) const {
    return dtype == other && std::equal(begin, end, shape.begin(), shape.begin() + dimensions);
  }
};

// Those of one exchange, one behind the other.
struct DirectEnds {
  DirectEnd* first = nullptr;
  size_t count = 0;

  DirectEnd* begin() const { return first; }
  DirectEnd* end() const { return first + count; }
  bool are_settled() const {
    return std::all_of(begin(), end(), [](const DirectEnd& one) { return one.is_settled(); });
  }
};

}  // namespace ringtrain
