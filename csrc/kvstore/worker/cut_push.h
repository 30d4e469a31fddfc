// A push of a key at several asynchronous servers, as its worker settles it (kvstore/server/cut_pushes.h).
//
// States, who leaves each and when. A server that does not answer is lost after timeout_s or return_s, and then fails:
//
//     gathering  asked: all servers but the primary have all of it. dropped: a server has refused it, or is lost.
//     asked      applied: the primary has begun it. dropped: the primary has refused it. unknown: the primary is lost.
//     applied    for ever. The others are told to apply it, until they have answered.
//     dropped    for ever. All are told to drop it, until they have answered.
//     unknown    for ever. The primary may have begun it. The others are told that this worker gives it up, until they
//                have answered. They learn from the scheduler what has become of it, see cut_pushes.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/thread_annotations.h"
#include "kvstore/wire/message.h"

namespace ringtrain {

// Any thread. A server's news comes from the thread that talks to it.
class CutPush {
 public:
  // Called when the verdict for a server has changed, on the thread of the server `teller`, without a lock.
  using Tell = std::function<void(int teller)>;

  // `primary`: one of the servers, of which there are so many.
  CutPush(int primary, size_t servers) : primary_(primary), servers_(servers) {}

  int primary() const { return primary_; }
  // The part of a server is about to be sent. Another thread may have dropped the push meanwhile.
  void join(int server, Tell tell) {
    tell_after(server, [&]() REQUIRES(mutex_) {
      tells_[server] = std::move(tell);
      return state_ == State::dropped ? Tells{{server, tells_[server]}} : look();
    });
  }
  // Whether the server has all of it.
  void set_ready(int server, bool is_ready) {
    if (state_ != State::gathering) return;
    tell_after(server, [&]() REQUIRES(mutex_) {
      is_ready ? void(ready_.insert(server)) : void(ready_.erase(server));
      return look();
    });
  }
  // The server applies it.
  void note_begun(int server) {
    if (server != primary_ || is_settled()) return;
    tell_after(server, [&]() REQUIRES(mutex_) { return is_settled() ? Tells() : change(State::applied, server); });
  }
  void note_refused(int server, const Error& error) {
    tell_after(server, [&]() REQUIRES(mutex_) {
      const bool drops = state_ == State::gathering || (state_ == State::asked && server == primary_);
      return drops ? fail(State::dropped, server, error) : Tells();
    });
  }
  void note_lost(int server, const Error& error) {
    tell_after(server, [&]() REQUIRES(mutex_) {
      if (state_ == State::gathering) return fail(State::dropped, server, error);
      const bool may_have_begun = state_ == State::asked && server == primary_;
      return may_have_begun ? fail(State::unknown, server, error) : Tells();
    });
  }

  Verdict verdict(int server) const {
    const State state = state_;
    if (state == State::dropped) return Verdict::drops;
    if (state == State::unknown) return Verdict::unknown;
    const bool applies = state == State::applied || (state == State::asked && server == primary_);
    return applies ? Verdict::applies : Verdict::open;
  }
  // Once it is dropped or unknown: why.
  std::optional<Error> error() const {
    const State state = state_;
    return state == State::dropped || state == State::unknown ? error_ : std::nullopt;
  }

 private:
  enum class State { gathering, asked, applied, dropped, unknown };
  using Tells = std::map<int, Tell>;  // by server

  bool is_settled() const {
    const State state = state_;
    return state != State::gathering && state != State::asked;
  }
  // Each of these returns those that are to be told.
  Tells look() REQUIRES(mutex_) {
    if (state_ != State::gathering || tells_.size() < servers_) return {};
    const size_t others = ready_.size() - ready_.count(primary_);
    if (others + 1 < servers_) return {};
    state_ = State::asked;
    return {{primary_, tells_.at(primary_)}};
  }
  Tells fail(State state, int by, const Error& error) REQUIRES(mutex_) {
    error_ = error;
    return change(state, by);
  }
  // `by`: the server that knows.
  Tells change(State state, int by) REQUIRES(mutex_) {
    state_ = state;
    Tells others = tells_;
    others.erase(by);
    return others;
  }
  template <typename Change>
  void tell_after(int teller, Change change) EXCLUDES(mutex_) {
    Tells told;
    {
      const Lock lock(mutex_);
      told = change();
    }
    for (const auto& [server, tell] : told) tell(teller);
  }

  const int primary_;
  const size_t servers_;
  std::atomic<State> state_{State::gathering};  // changed with the mutex
  std::optional<Error> error_;                  // set before it is dropped or unknown, and then constant
  Mutex mutex_;                                 // held for no longer than such a change takes
  Tells tells_ GUARDED_BY(mutex_);
  std::set<int> ready_ GUARDED_BY(mutex_);  // servers
};

}  // namespace ringtrain
