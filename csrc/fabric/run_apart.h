// Calls that block and take no deadline.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "fabric/wait.h"

namespace ringtrain {

// The result of `call`, which runs on a thread of its own while this one keeps its Watch. If the Watch throws, the call
// goes on alone, maybe for ever: it must own, or have by value, all that it uses. It must not throw.
template <typename Call>
auto run_apart(Call call, Watch& watch) -> decltype(call()) {
  struct State {
    std::optional<decltype(call())> result;
    std::atomic<bool> is_done{false};
  };
  const auto state = std::make_shared<State>();
  std::thread([state, call = std::move(call)] {
    state->result.emplace(call());
    state->is_done.store(true, std::memory_order_release);
  }).detach();
  Waiter().poll([&] { return state->is_done.load(std::memory_order_acquire); }, &watch);
  return *state->result;
}

}  // namespace ringtrain
