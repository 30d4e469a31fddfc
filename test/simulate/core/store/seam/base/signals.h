// Takes the place of csrc/base/signals.h in the simulation of stores: a thread is a fibre of the process that starts
// it.
#pragma once

#include <memory>
#include <utility>

#include "fibres.h"

namespace ringtrain {

class Thread {
 public:
  Thread() = default;
  explicit Thread(std::shared_ptr<const bool> has_ended) : has_ended_(std::move(has_ended)) {}

  bool joinable() const { return has_ended_ != nullptr; }
  // Outside of fibres the story is over, and nothing runs any more.
  void join() {
    auto& fibres = simulation::Fibres::current();
    const auto has_ended = std::exchange(has_ended_, nullptr);
    if (fibres.is_running()) fibres.wait([has_ended] { return *has_ended; });
  }

 private:
  std::shared_ptr<const bool> has_ended_;
};

template <typename Work>
Thread start_thread(Work work) {
  auto& fibres = simulation::Fibres::current();
  const auto has_ended = std::make_shared<bool>(false);
  fibres.start(fibres.running_rank(), "core", [work, has_ended] {
    work();
    *has_ended = true;
  });
  return Thread(has_ended);
}

}  // namespace ringtrain
