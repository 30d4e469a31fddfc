// One per process: owns everything of the core, and the thread that does the work.
//
// The thread sleeps on a bell until a caller submits something or another rank wants a round; then it takes what is
// new, negotiates one round, and carries out the plans. It never calls Python.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "base/options.h"
#include "coordination/coordinator.h"
#include "runtime/executor.h"
#include "runtime/fabric.h"
#include "runtime/inbox.h"
#include "runtime/process_sets.h"
#include "runtime/world.h"

namespace ringtrain {

class Engine {
 public:
  // All ranks of the world at the same time. Throws what made it impossible.
  Engine(World world, Options options);
  // As shutdown().
  ~Engine();

  // Any thread.
  std::shared_ptr<Handle> submit(Submission submission);
  // Leaves the job: what other ranks still want from this one fails there. Returns when the thread has ended.
  void shutdown();

 private:
  void loop();
  void turn();
  void wait_for_work();
  bool has_work();
  double sleep_s(double idle_s);
  void end(const std::vector<int>& left);
  std::string name_the_lost(const std::string& message);
  void fail(ErrorKind kind, const std::string& message);

  // Constant after construction.
  const World world_;
  const Options options_;

  // Any thread.
  Inbox inbox_;
  std::atomic<bool> is_leaving_{false};

  // Engine thread only, once it runs.
  Fabric fabric_;
  ProcessSets sets_;
  Coordinator coordinator_;
  Executor executor_;
  Waiter waiter_;
  bool has_ended_ = false;

  std::thread thread_;
};

}  // namespace ringtrain
