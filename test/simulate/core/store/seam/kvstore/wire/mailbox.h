// Takes the place of csrc/kvstore/wire/mailbox.h in the simulation of stores.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"  // as the product's does; it has getpid() here
#include "fibres.h"
#include "network/poller.h"

namespace ringtrain {

class Mailbox final {
 public:
  using Work = std::function<void()>;

  explicit Mailbox(Poller& poller) : poller_(poller) {}

  void post(Work work) { letters_.push_back(std::move(work)); }
  void empty() {
    std::optional<Error> first;
    for (const Work& work : std::exchange(letters_, {}))
      if (const auto error = error_of(work); error && !first) first.emplace(*error);
    if (first) throw Error(*first);
  }
  void sleep(double longest_s) {
    auto& fibres = simulation::Fibres::current();
    fibres.wait([this] { return !letters_.empty() || poller_.has_work(); }, fibres.now() + longest_s);
  }

 private:
  Poller& poller_;
  std::vector<Work> letters_;
};

class GuardedTurns {
 public:
  explicit GuardedTurns(std::string) {}

  template <typename Turn>
  void run(Turn turn) {
    constexpr double kPause_s = 0.01;
    if (error_of(turn)) simulation::Fibres::current().pause(kPause_s);
  }
};

}  // namespace ringtrain
