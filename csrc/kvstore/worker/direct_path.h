// The work of a worker on chunks in memory that it shares with servers.
//
// The caller carries out its push, chunk by chunk; its answer is copied while the chunk is in the cache. Where a
// round waits for others, the chunk stays open until somebody waits for it, or pushes more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "kernels/reduce.h"
#include "kvstore/store/actor.h"
#include "kvstore/worker/remote.h"
#include "kvstore/worker/store_handle.h"

namespace ringtrain {

// A request to one chunk: a leg of an operation.
struct DirectItem {
  Actor* actor;
  size_t chunk;
  Source source;  // no values: a pull
  Answer answer;  // no place: nothing is wanted
  std::shared_ptr<StoreHandle> handle;
  std::shared_ptr<const std::string> key;  // for messages
  // As it would be asked of the server. Has `done` where another server may take the place of its own.
  std::shared_ptr<const RemoteOperation> operation;

  // Of its key by this worker, with this one if it is one.
  uint64_t pushes() const { return static_cast<uint64_t>(operation->number); }

  bool is_too_far_ahead = false;  // others have not pushed for long
  bool waits_for_server = false;  // it is gone, and another one may take its place
};

// Any thread.
class DirectPath {
 public:
  // Asked now and then by waiting threads; it throws if one should not wait any longer.
  using Interrupt = void (*)();
  // Told of a change for which workers may wait at the server.
  using TellServer = std::function<void(const DirectItem& item)>;

  // `workers`: how many push the same keys in the same order. `timeout_s`: how long a chunk may be in use by others.
  DirectPath(int worker, int workers, double timeout_s, TellServer tell_server)
      : worker_(worker), workers_(workers), timeout_s_(timeout_s), tell_server_(std::move(tell_server)) {}

  // Pushes them, in an order that makes workers meet seldom, and answers those whose values are there. Each is a part
  // of the handle, which ends now or later. Throws what goes wrong at once; then nothing of it is open. Returns the
  // items whose server was replaced meanwhile by one that does not have this memory: these are the caller's.
  std::vector<DirectItem> carry_out(std::vector<DirectItem> items, const StoreHandle& handle, Interrupt interrupt)
      EXCLUDES(mutex_);
  // Something else with chunks of an actor, see visit_all().
  template <typename OnChunk>
  void visit(Actor& actor, size_t first, size_t last, OnChunk on_chunk) EXCLUDES(mutex_) {
    const KeptDenormals kept;
    visit_all(actor.part(), first, last, timeout_s_, [&](size_t chunk) {
      const Lock lock(mutex_);
      if (left_.count(&actor)) throw Error(ErrorKind::peer_lost, "another server has taken the place of this one");
      if (ended_) throw Error(*ended_);
      return on_chunk(chunk);
    });
  }
  // Whether it is done; waits for at most so long.
  bool wait(StoreHandle& handle, double longest_s) EXCLUDES(mutex_);
  // Goes on with what is open. Whether there was something.
  bool advance() EXCLUDES(mutex_);
  // Which chunk of a handle is open, and who has not pushed it; "" where there is none.
  std::string missing(const StoreHandle& handle) EXCLUDES(mutex_);
  // Returns the workers for whose pushes that chunk waits.
  std::vector<size_t> awaited(const StoreHandle& handle) EXCLUDES(mutex_);
  // Requests that wait for others in rounds fail, and pushes into them, until they can close again.
  void fail_rounds(const Error& error) EXCLUDES(mutex_);
  void resume_rounds() EXCLUDES(mutex_);
  // All requests fail, pending and later ones.
  void end(const Error& error) EXCLUDES(mutex_);

  // A server is present, away or lost. Away, from lose_server() on: what is asked of its memory waits. Lost, from
  // `until_s` on: it fails with the error. Present again, from resume_server() on.
  void lose_server(int server, const Error& error, double until_s) EXCLUDES(mutex_);
  void resume_server(int server) EXCLUDES(mutex_);
  // The memory of an actor is not that of its server any more, for ever. Requests that wait for others there fail.
  void leave(const Actor& actor, const Error& error) EXCLUDES(mutex_);
  // Returns once the server is present. Throws if it is lost.
  void await_server(int server, Interrupt interrupt) EXCLUDES(mutex_);

 private:
  static constexpr size_t kAhead = 64, kAll = ~size_t{0};

  // Held by the one thread of this worker that may use Actor::stage().
  class StageTurn;

  enum class Step { over, open, busy };
  enum class Reach { present, away, left };

  struct Absence {
    Error error;
    double until_s;
  };

  std::vector<size_t> order_of(const std::vector<DirectItem>& items) const;
  Step begin(DirectItem& item) REQUIRES(mutex_);
  Step look(DirectItem& item) REQUIRES(mutex_);
  struct Group {
    bool is_staged = false;
    std::vector<DirectItem> items = {};
  };
  std::vector<Group> groups_of(std::vector<DirectItem> items) const;
  void stage(const std::vector<DirectItem>& items) EXCLUDES(mutex_);
  void begin_in_order(std::vector<DirectItem>& items, std::vector<DirectItem>& left_behind, Interrupt interrupt)
      EXCLUDES(mutex_);
  void begin_all(std::vector<DirectItem>& items, std::vector<size_t>& chosen, std::vector<DirectItem>& left_behind)
      EXCLUDES(mutex_);
  // Throws where the server is lost.
  bool has_left(const DirectItem& item) EXCLUDES(mutex_);
  Reach reach(const DirectItem& item) const REQUIRES(mutex_);
  bool is_away(int server) const REQUIRES(mutex_);
  void fail_what_is_lost() REQUIRES(mutex_);
  void require_progress(DirectItem& item, double waited_s) const;
  void let_others_come(const std::vector<Actor*>& actors) EXCLUDES(mutex_);
  bool collect(size_t most) REQUIRES(mutex_);
  template <typename Fails>
  void fail_open(const Error& error, Fails fails) REQUIRES(mutex_);

  const int worker_, workers_;
  const double timeout_s_;
  const TellServer tell_server_;
  Mutex mutex_;
  std::deque<DirectItem> open_ GUARDED_BY(mutex_);
  std::optional<Error> rounds_error_ GUARDED_BY(mutex_);  // why no round can close
  std::map<int, Absence> absent_ GUARDED_BY(mutex_);      // servers
  std::set<const Actor*> left_ GUARDED_BY(mutex_);
  bool is_staging_ GUARDED_BY(mutex_) = false;     // a thread has its StageTurn
  std::optional<Error> ended_ GUARDED_BY(mutex_);  // why nothing can be done any more
  // Others have not come for a while, so this worker does not wait for them until they have.
  bool is_ahead_ GUARDED_BY(mutex_) = false;
};

}  // namespace ringtrain
