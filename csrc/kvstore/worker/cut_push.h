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

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "kvstore/wire/message.h"

namespace ringtrain {

// On the thread of the Remote.
class CutPush {
 public:
  // Called when the verdict for a server has changed.
  using Tell = std::function<void()>;

  // `primary`: one of the servers, of which there are so many.
  CutPush(int primary, size_t servers) : primary_(primary), servers_(servers) {}

  int primary() const { return primary_; }
  // The part of a server is about to be sent.
  void join(int server, Tell tell) {
    tells_[server] = std::move(tell);
    look();
  }
  // Whether the server has all of it.
  void set_ready(int server, bool is_ready) {
    is_ready ? void(ready_.insert(server)) : void(ready_.erase(server));
    look();
  }
  // The server applies it.
  void note_begun(int server) {
    if (server == primary_ && !is_settled()) change(State::applied, server);
  }
  void note_refused(int server, const Error& error) {
    if (state_ == State::gathering || (state_ == State::asked && server == primary_)) drop(server, error);
  }
  void note_lost(int server, const Error& error) {
    if (state_ == State::gathering) return drop(server, error);
    if (state_ != State::asked || server != primary_) return;
    error_ = error;
    change(State::unknown, server);
  }

  Verdict verdict(int server) const {
    if (state_ == State::dropped) return Verdict::drops;
    if (state_ == State::unknown) return Verdict::unknown;
    const bool applies = state_ == State::applied || (state_ == State::asked && server == primary_);
    return applies ? Verdict::applies : Verdict::open;
  }
  // Once it is dropped or unknown: why.
  const std::optional<Error>& error() const { return error_; }

 private:
  enum class State { gathering, asked, applied, dropped, unknown };

  bool is_settled() const { return state_ != State::gathering && state_ != State::asked; }
  void look() {
    if (state_ != State::gathering || tells_.size() < servers_) return;
    const size_t others = ready_.size() - ready_.count(primary_);
    if (others + 1 < servers_) return;
    state_ = State::asked;
    tells_.at(primary_)();
  }
  void drop(int server, const Error& error) {
    error_ = error;
    change(State::dropped, server);
  }
  // `by`: the server that knows.
  void change(State state, int by) {
    state_ = state;
    for (const auto& [server, tell] : std::map<int, Tell>(tells_))
      if (server != by) tell();
  }

  const int primary_;
  const size_t servers_;
  State state_ = State::gathering;
  std::map<int, Tell> tells_;  // by server
  std::set<int> ready_;        // servers
  std::optional<Error> error_;
};

}  // namespace ringtrain
