// What a worker does itself to chunks in memory that it shares with servers.
//
// A push is carried out by who calls it, chunk by chunk; what it wants back is copied while it is in the cache. Where a
// round waits for others, the chunk stays open until somebody waits for it, or pushes more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "kernels/reduce.h"
#include "kvstore/actor.h"
#include "kvstore/store_handle.h"

namespace ringtrain {

// What is asked of one chunk.
struct DirectItem {
  Actor* actor;
  size_t chunk;
  uint64_t pushes;  // of its key by this worker, with this one if it is one
  Source source;    // no values: a pull
  Rates rates;
  Answer answer;  // no place: nothing is wanted
  std::shared_ptr<StoreHandle> handle;
  std::shared_ptr<const std::string> key;  // for messages

  // Where the server has it.
  int server = 0;
  uint32_t store = 0, part = 0;
  // Of some elements only; null: all of the chunk.
  std::shared_ptr<const ElementRanges> ranges;

  bool is_too_far_ahead = false;  // others have not pushed for long
};

// Any thread.
class DirectPath {
 public:
  // Asked now and then by who waits; it throws if one should not wait any longer.
  using Interrupt = void (*)();
  // Told of a change for which workers may wait at the server.
  using TellServer = std::function<void(const DirectItem& item)>;

  // `workers`: how many push the same keys in the same order. `timeout_s`: how long a chunk may be in use by others.
  DirectPath(int worker, int workers, double timeout_s, TellServer tell_server)
      : worker_(worker), workers_(workers), timeout_s_(timeout_s), tell_server_(std::move(tell_server)) {}

  // Pushes them, in an order that makes workers meet seldom, and answers those whose values are there. Each is a part
  // of the handle, which ends now or later. Throws what goes wrong at once; then nothing of it is open.
  void carry_out(std::vector<DirectItem> items, const StoreHandle& handle, Interrupt interrupt) EXCLUDES(mutex_);
  // Something else with chunks of an actor, see visit_all().
  template <typename OnChunk>
  void visit(Actor& actor, size_t first, size_t last, OnChunk on_chunk) EXCLUDES(mutex_) {
    const KeptDenormals kept;
    visit_all(actor.part(), first, last, timeout_s_, [&](size_t chunk) {
      const Lock lock(mutex_);
      return on_chunk(chunk);
    });
  }
  // Whether it is done; waits for at most so long.
  bool wait(StoreHandle& handle, double longest_s) EXCLUDES(mutex_);
  // Goes on with what is open. Whether there was something.
  bool advance() EXCLUDES(mutex_);
  // Which chunk of a handle is open, and who has not pushed it; "" where there is none.
  std::string missing(const StoreHandle& handle) EXCLUDES(mutex_);
  // What waits for others in rounds fails, and what is pushed into them, until they can close again.
  void fail_rounds(const Error& error) EXCLUDES(mutex_);
  void resume_rounds() EXCLUDES(mutex_);
  void fail_all(const Error& error) EXCLUDES(mutex_);
  // What waits for others in one Part does.
  void fail_of(const Actor& actor, const Error& error) EXCLUDES(mutex_);

 private:
  static constexpr size_t kAhead = 64, kAll = ~size_t{0};

  enum class Step { over, open, busy };

  std::vector<size_t> order_of(const std::vector<DirectItem>& items) const;
  Step begin(DirectItem& item) REQUIRES(mutex_);
  Step look(DirectItem& item) REQUIRES(mutex_);
  void begin_in_order(std::vector<DirectItem>& items, Interrupt interrupt) EXCLUDES(mutex_);
  void begin_all(std::vector<DirectItem>& items, std::vector<size_t>& chosen) EXCLUDES(mutex_);
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
  // Others have not come for a while, so this worker does not wait for them until they have.
  bool is_ahead_ GUARDED_BY(mutex_) = false;
};

}  // namespace ringtrain
