#include "runtime/current_engine.h"

#include <pthread.h>

#include <utility>

#include "base/fork.h"
#include "base/thread_annotations.h"

namespace ringtrain {
namespace {

// A std::atomic_load of a shared_ptr takes a lock of the standard library's, too, which a fork may leave locked.
Mutex mutex;
std::shared_ptr<Engine> engine GUARDED_BY(mutex);
std::shared_ptr<Resources> resources GUARDED_BY(mutex);  // of all Engines of this process
bool is_forked_child GUARDED_BY(mutex) = false;          // of a process that had an Engine then
std::string ended_by GUARDED_BY(mutex);                  // what ended the last Engine; empty: there was none

std::shared_ptr<Engine> exchange_engine(std::shared_ptr<Engine> next) {
  const Lock lock(mutex);
  return std::exchange(engine, std::move(next));
}

// No other thread holds the mutex at a fork. The child's copy of the Engine lacks its thread, and is left alone,
// as is what its parent's Engines share.
[[maybe_unused]] const int registered =
    pthread_atfork([]() ACQUIRE(mutex) { mutex.lock(); }, []() RELEASE(mutex) { mutex.unlock(); },
                   []() RELEASE(mutex) {
                     is_forked_child |= engine != nullptr;
                     engine.reset();
                     resources.reset();
                     mutex.unlock();
                   });

}  // namespace

std::shared_ptr<Engine> current_engine() {
  const Lock lock(mutex);
  return engine;
}

std::shared_ptr<Engine> require_engine() {
  const Lock lock(mutex);
  if (engine) return engine;
  if (is_forked_child)
    throw Error(
        ErrorKind::not_initialized,
        "this process was forked from a rank of ringtrain and is not a rank itself; let the parent process call "
        "ringtrain");
  throw Error(ErrorKind::not_initialized,
              "ringtrain is not initialised: " +
                  (ended_by.empty() ? "call init() first" : "it was ended by " + ended_by + "; call init() again"));
}

std::string autotune_findings() {
  const Lock lock(mutex);
  return resources ? resources->findings() : "";
}

void require_not_forked() {
  const Lock lock(mutex);
  if (is_forked_child)
    throw failure(
        "this process was forked from a rank of ringtrain and cannot join a job itself; start it with the spawn method "
        "of multiprocessing, or let the parent process call ringtrain");
}

void start_engine(World world, Options options) {
  require_not_forked();
  std::shared_ptr<Resources> own;
  {
    const Lock lock(mutex);
    if (!resources) resources = std::make_shared<Resources>();
    own = resources;
  }
  exchange_engine(owned_here(new Engine(std::move(world), std::move(options), std::move(own))));
}

// The last one who keeps it destroys it, which may take a moment: what it owns takes leave of MPI.
bool shut_down_engine(const std::string& by) {
  const std::shared_ptr<Engine> leaving = exchange_engine(nullptr);
  if (!leaving) return true;
  {
    const Lock lock(mutex);
    ended_by = by;
  }
  leaving->shutdown();
  return !leaving->has_failed();
}

}  // namespace ringtrain
