// Rules about threads that clang checks in `make lint`; other compilers read past them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

// Not every linter knows these macros: each is one attribute of clang's thread safety analysis.
#if defined(__clang__)
#define RINGTRAIN_THREADS(attribute) __attribute__((attribute))
#else
#define RINGTRAIN_THREADS(attribute)
#endif

#define CAPABILITY(name) RINGTRAIN_THREADS(capability(name))
#define SCOPED_CAPABILITY RINGTRAIN_THREADS(scoped_lockable)
// Of a member: only who holds the capability reads or writes it.
#define GUARDED_BY(capability) RINGTRAIN_THREADS(guarded_by(capability))
// Of a function: the caller holds the capability, or does not; it is taken here, let go of, or taken if that is true.
#define REQUIRES(...) RINGTRAIN_THREADS(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) RINGTRAIN_THREADS(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) RINGTRAIN_THREADS(acquire_capability(__VA_ARGS__))
#define RELEASE(...) RINGTRAIN_THREADS(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) RINGTRAIN_THREADS(try_acquire_capability(__VA_ARGS__))
#define ASSERT_HELD(...) RINGTRAIN_THREADS(assert_capability(__VA_ARGS__))
// For code that the analysis cannot follow, with a comment that says why it is right.
#define NOT_ANALYSED RINGTRAIN_THREADS(no_thread_safety_analysis)

namespace ringtrain {

// As std::mutex, which the analysis does not know.
class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Holds it as long as it lives.
class SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~Lock() RELEASE() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits with a Mutex that its caller holds.
using Condition = std::condition_variable_any;

// The right to do an engine's work: to talk to other ranks, carry out plans and finish Handles. One thread at a time
// has it, and lets go of it while it waits for other ranks. A process has one turn, so no object has to name it.
class CAPABILITY("turn") Turn {
 public:
  // For the analysis alone, where it cannot see that the turn is held: in a function that is called by a template, or
  // where one thread does it all.
  void assert_held() const ASSERT_HELD(this) {}
};
inline constexpr Turn turn;

// The mutex behind it, of which the analysis does not know that it stands for the turn.
class TurnMutex {
 public:
  void lock() ACQUIRE(turn) NOT_ANALYSED {
    if (!mutex_.try_lock()) {
      wanted_.fetch_add(1, std::memory_order_relaxed);
      mutex_.lock();
      wanted_.fetch_sub(1, std::memory_order_relaxed);
    }
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  bool try_lock() TRY_ACQUIRE(true, turn) {
    if (!mutex_.try_lock()) return false;
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return true;
  }
  void unlock() RELEASE(turn) NOT_ANALYSED {
    holder_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }
  // Whether another thread waits for it.
  bool is_wanted() const { return wanted_.load(std::memory_order_relaxed) > 0; }
  bool is_held_here() const { return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

 private:
  std::mutex mutex_;
  std::atomic<int> wanted_{0};
  std::atomic<std::thread::id> holder_{};
};

}  // namespace ringtrain
