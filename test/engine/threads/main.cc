// Engines of three ranks, under ThreadSanitizer and with planted bugs, with several threads each that submit in the
// world and in overlapping process sets, watch and record, and an end of each kind: test/engine/test_engine_threads.py.
//
// engine_threads handles: one thread finishes Handles while another asks to be called.
// engine_threads alone SEED: one rank, whose results are not waited for.
// engine_threads stories SEED: over sockets, tells the same sums twice with other pauses, and compares their bits.
// engine_threads sockets|shared HOW SEED: over sockets, as threads of this process, or over shared memory, as
// processes. HOW: 0 and 1 end well, 1 with two streams and autotune; 2 a script fails; 3 a rank is lost; 4 a rank shuts
// down. SEED: draws where threads pause around locks, other than 0.
#include <arpa/inet.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "runtime/engine.h"

using namespace ringtrain;

namespace {

constexpr int kRanks = 3, kCallers = 2, kSteps = 25, kStepOfTrouble = 12, kStepsAlone = 300;
constexpr unsigned kLongestComputation_us = 3000;
constexpr double kLongestStep_s = 10, kNever_s = 1e3;
enum How { kEndsWell, kEndsWellTuned, kScriptFails, kRankIsLost, kRankShutsDown };

unsigned seed = 0;

// A counter of all ranks, in memory that processes share.
struct Shared {
  std::atomic<int> pids[kRanks];
  std::atomic<int> steps, done, failed;
};

struct Set {
  int id;
  std::vector<int> ranks;
};
const std::vector<Set> kSets = {{1, {0, 1}}, {2, {1, 2}}, {3, {0, 2}}};

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::_Exit(1);
}

int make_listener() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(listener, 64) != 0)
    fail("cannot listen");
  return listener;
}

SocketAddress address_of(int listener) {
  sockaddr_in address = {};
  socklen_t bytes = sizeof(address);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes);
  return {"127.0.0.1", ntohs(address.sin_port)};
}

struct Job {
  Job(int ranks, bool shares_memory, How how) : ranks(ranks), shares_memory(shares_memory), how(how) {
    for (int rank = 0; rank < ranks; ++rank) {
      listeners.push_back(make_listener());
      addresses.push_back({address_of(listeners.back())});
      names.push_back({rank, shares_memory ? "h" : "h" + std::to_string(rank), getpid()});
      nodes.push_back(shares_memory ? 0 : rank);
    }
  }

  const int ranks;
  const bool shares_memory;
  const How how;
  std::vector<int> listeners, nodes;
  std::vector<std::vector<SocketAddress>> addresses;
  std::vector<RankName> names;
};

World world_of(const Job& job, int rank) {
  World world;
  world.rank = rank;
  world.names = job.names;
  world.nodes = job.nodes;
  world.token = "token" + std::to_string(job.how);
  world.cores = 2;
  if (job.ranks == 1) return world;
  SocketDescription sockets;
  sockets.listeners = {job.listeners[static_cast<size_t>(rank)]};
  sockets.addresses = job.addresses;
  sockets.secret = "secret";
  sockets.token = "token";
  sockets.streams = 1 + job.how % 2;
  sockets.timeout_s = 10;
  world.network = sockets;
  return world;
}

Options options_of(const Job& job) {
  Options options;
  options.network = "sockets";
  if (!job.shares_memory) options.shared_memory = "off";
  options.stall_warning_time_s = 20;
  options.autotune = job.how == kEndsWellTuned ? "on" : "off";
  return options;
}

SubmissionPtr submission(OpKind kind, const std::string& name, const Set& set, std::vector<float>& data) {
  auto submission = std::make_shared<Submission>();
  submission->request = std::make_shared<Request>();
  Operation& operation = submission->request->operation;
  operation.kind = kind;
  operation.name = name;
  operation.process_set = set.id;
  operation.tensors = {{DType::float32, {static_cast<int64_t>(data.size())}}};
  submission->inputs.push_back(data.data());
  if (kind == OpKind::allreduce) submission->outputs.push_back(data.data());
  if (kind == OpKind::alltoall)
    submission->splits = std::vector<int64_t>(set.ranks.size(), static_cast<int64_t>(data.size() / set.ranks.size()));
  submission->request->site = std::make_shared<const std::string>("x.py:1");
  return submission;
}

const auto never = [] { return false; };

// Adds a process set, or removes it.
void change_sets(Engine& engine, OpKind kind, const std::vector<int64_t>& numbers) {
  auto submission = std::make_shared<Submission>();
  submission->request = std::make_shared<Request>();
  submission->request->operation.kind = kind;
  submission->request->operation.name = "sets";
  submission->request->operation.numbers = numbers;
  submission->request->site = std::make_shared<const std::string>("x.py:1");
  const auto handle = engine.submit(submission, Engine::Caller::waits);
  while (!engine.wait(*handle, seed == 0 ? 0.2 : kNever_s, never)) continue;
  handle->result();
}

void make_trouble(Engine& engine, const Job& job, int rank) {
  if (job.how == kScriptFails && rank == 1) engine.report_failure("a test", 1);
  if (job.how == kRankIsLost && rank == 2) engine.report_loss("rank 7 is gone");
  if (job.how == kRankShutsDown && rank == 0) engine.shutdown();
}

// The operations of a thread and their arrays, which are freed as soon as that is allowed.
struct Calls {
  ~Calls() {
    const auto is_free = [](const auto& handle) { return handle->is_memory_free(); };
    for (const auto& handle : handles)
      while (!handle->wait(1)) continue;
    if (!std::all_of(handles.begin(), handles.end(), is_free)) new std::vector<std::vector<float>>(std::move(arrays));
  }

  std::vector<std::vector<float>> arrays;
  std::vector<std::shared_ptr<Handle>> handles;
};

// One of the threads of a rank that submit. The first one in the world makes the trouble.
void call(Engine& engine, const Job& job, int rank, int caller, const Set& set, Shared& shared) {
  const bool is_first = caller == 0 && set.id == 0;
  Calls calls;
  auto& [arrays, handles] = calls;
  arrays.assign(6, std::vector<float>(caller == 0 ? 3000 : 42));
  arrays.emplace_back(300'000, 1.f);
  const std::string prefix = "t" + std::to_string(caller) + ".";
  std::minstd_rand random(static_cast<unsigned>(100 * rank + 10 * set.id + caller) + 1000 * seed);
  for (int step = 0; step < (1 + caller) * kSteps; ++step) {
    if (seed != 0) usleep(static_cast<useconds_t>(random() % kLongestComputation_us));
    handles.clear();
    for (size_t i = 0; i < 6; ++i) {
      std::fill(arrays[i].begin(), arrays[i].end(), 1.f);
      const OpKind kind = i == 4 ? OpKind::allgather : i == 5 ? OpKind::alltoall : OpKind::allreduce;
      const auto way = i == 5 ? Engine::Caller::waits : Engine::Caller::goes_on;
      handles.push_back(engine.submit(submission(kind, prefix + std::to_string(i), set, arrays[i]), way));
      if (i == 0) handles.back()->on_done([] {});
    }
    if (step % 8 == 0)
      handles.push_back(
          engine.submit(submission(OpKind::allreduce, prefix + "large", set, arrays[6]), Engine::Caller::goes_on));
    if (is_first && step == kStepOfTrouble) make_trouble(engine, job, rank);
    if (is_first) engine.say_blocked(handles);
    for (const auto& handle : handles) {
      while (!engine.wait(*handle, seed == 0 ? 0.2 : kNever_s, never)) continue;
      handle->result();
    }
    if (is_first) engine.say_blocked({});
    for (size_t i = 0; i < 4; ++i)
      if (arrays[i].front() != static_cast<float>(set.ranks.size()))
        fail("a sum is wrong: " + std::to_string(arrays[i].front()));
    ++shared.steps;
  }
}

// As a thread that waits for no Handle: all of its work is done by others.
void listen(Engine& engine, int steps, const Set& set, Shared& shared) {
  const auto ended = std::make_shared<Flag>();
  Calls calls;
  calls.arrays.emplace_back(5);
  for (int step = 1; step <= steps; ++step) {
    calls.handles = {
        engine.submit(submission(OpKind::allreduce, "heard", set, calls.arrays.front()), Engine::Caller::goes_on)};
    const auto& handle = calls.handles.front();
    handle->on_done([ended] { ended->ring(); });
    Waiter().wait(*ended, static_cast<uint32_t>(step), nullptr);
    handle->result();
    ++shared.steps;
  }
}

void record(Engine& engine, const std::string& path, const std::atomic<bool>& is_over) {
  for (int times = 0; times < 4 && !is_over; ++times) {
    Timeline::Setup setup;
    setup.path = path;
    setup.limit_bytes = 1 << 20;
    try {
      engine.start_timeline(setup);
      usleep(20'000);
      engine.stop_timeline();
    } catch (const Error&) {
    }
  }
}

std::vector<Set> sets_of(const Job& job, int rank) {
  Set world{0, {}};
  for (int one = 0; one < job.ranks; ++one) world.ranks.push_back(one);
  std::vector<Set> sets = {world};
  for (const Set& set : kSets)
    if (job.ranks > 1 && std::count(set.ranks.begin(), set.ranks.end(), rank)) sets.push_back(set);
  return sets;
}

// Calls from several threads at a time, in each set of this rank. Returns when all have ended.
void run_callers(Engine& engine, const Job& job, int rank, Shared& shared) {
  std::vector<std::thread> threads;
  const auto start = [&](std::function<void()> call) {
    threads.emplace_back([&shared, call] {
      try {
        call();
        ++shared.done;
      } catch (const Error&) {
        ++shared.failed;
      }
    });
  };
  const std::vector<Set> sets = sets_of(job, rank);
  for (const Set& set : sets) {
    for (int caller = 0; caller < kCallers && job.ranks > 1; ++caller)
      start([&, caller] { call(engine, job, rank, caller, set, shared); });
    start([&] { listen(engine, job.ranks > 1 ? kSteps : kStepsAlone, set, shared); });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_engine(const Job& job, int rank, Shared& shared) {
  Engine engine(world_of(job, rank), options_of(job), std::make_shared<Resources>());
  const bool has_sets = job.ranks > 1;
  for (const Set& set : kSets)
    if (has_sets) change_sets(engine, OpKind::add_process_set, {set.ranks.begin(), set.ranks.end()});
  std::atomic<bool> is_over{false};
  std::thread observer([&] {
    while (!is_over) {
      engine.last_operations();
      engine.totals();
      engine.counts();
      engine.rounds_on_node();
      engine.mark("here");
      usleep(3000);
    }
  });
  std::thread recorder([&] { record(engine, "timeline" + std::to_string(rank) + ".json", is_over); });
  run_callers(engine, job, rank, shared);
  is_over = true;
  observer.join();
  recorder.join();
  for (const Set& set : kSets)
    if (has_sets && job.how <= kEndsWellTuned) change_sets(engine, OpKind::remove_process_set, {set.id});
  engine.shutdown();
}

// Ends the process if a rank waits without end.
void run_rank(const Job& job, int rank, Shared& shared) {
  std::atomic<bool> is_over{false};
  std::thread watch([&] {
    double since = now_s();
    for (int before = 0; !is_over; usleep(10'000)) {
      const int steps = shared.steps;
      if (std::exchange(before, steps) != steps) since = now_s();
      if (now_s() - since > kLongestStep_s) fail("no step has ended for " + std::to_string(kLongestStep_s) + " s");
    }
  });
  run_engine(job, rank, shared);
  is_over = true;
  watch.join();
}

void run_as_threads(const Job& job, Shared& shared) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < job.ranks; ++rank) ranks.emplace_back([&, rank] { run_rank(job, rank, shared); });
  for (std::thread& rank : ranks) rank.join();
}

void run_as_processes(Job& job, Shared& shared) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    shared.pids[rank] = getpid();
    for (int other = 0; other < kRanks; ++other) {
      while (shared.pids[other] == 0) usleep(1000);
      job.names[static_cast<size_t>(other)].pid = shared.pids[other];
    }
    run_rank(job, rank, shared);
    std::exit(0);  // so that ThreadSanitizer tells what it has found
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) fail("a rank has ended with " + std::to_string(status));
  }
}

// Nothing but the Handle itself orders its two threads, and each callback is called once. One thread asks to be called
// until the Handle is finished, so the other one finishes it in the middle of a call, also where both share a core.
void finish_while_asking() {
  constexpr size_t kHandles = 20'000;
  constexpr double kLongest_s = 5;
  std::vector<Handle> handles(kHandles);
  std::vector<std::atomic<int>> calls(kHandles);
  std::vector<int> asked(kHandles);
  std::atomic<size_t> begun{0};
  std::atomic<bool> is_over{false};
  std::thread finisher([&] {
    for (size_t i = 0; i < kHandles; ++i) {
      while (begun.load(std::memory_order_relaxed) <= i) {
        if (is_over.load(std::memory_order_relaxed)) return;
        std::this_thread::yield();
      }
      handles[i].finish({});
    }
  });
  const double end = now_s() + kLongest_s;
  for (size_t i = 0; i < kHandles && now_s() < end; ++i) {
    begun.store(i + 1, std::memory_order_relaxed);
    do {
      handles[i].on_done([&calls, i] { ++calls[i]; });
      ++asked[i];
    } while (!handles[i].is_done());
  }
  is_over = true;
  finisher.join();
  for (size_t i = 0; i < kHandles; ++i)
    if (calls[i] != asked[i])
      fail("a Handle has called " + std::to_string(calls[i]) + " of " + std::to_string(asked[i]) + " callbacks");
}

// The sums of a rank, with pauses that the story draws between their submissions. Sizes and values follow from the
// seed.
std::vector<std::vector<float>> tell(const Job& job, int rank, unsigned story) {
  constexpr size_t kSums = 40, kShort = 20'000, kLong = 300'000;
  constexpr unsigned kLongestPause_us = 1500, kOften = 3;
  Engine engine(world_of(job, rank), options_of(job), std::make_shared<Resources>());
  Calls calls;
  std::mt19937 sizes(seed), values(100 * seed + static_cast<unsigned>(rank)),
      pauses(10'000 * seed + 100 * story + static_cast<unsigned>(rank));
  for (size_t i = 0; i < kSums; ++i) {
    calls.arrays.emplace_back(1 + sizes() % (sizes() % kOften == 0 ? kLong : kShort));
    for (float& value : calls.arrays.back()) value = static_cast<float>(values()) / 1e9f;
  }
  for (size_t i = 0; i < kSums; ++i) {
    if (pauses() % kOften == 0) usleep(static_cast<useconds_t>(pauses() % kLongestPause_us));
    const std::string name = "sum" + std::to_string(i);
    calls.handles.push_back(
        engine.submit(submission(OpKind::allreduce, name, {0, {}}, calls.arrays[i]), Engine::Caller::goes_on));
  }
  for (const auto& handle : calls.handles) {
    while (!engine.wait(*handle, kNever_s, never)) continue;
    handle->result();
  }
  engine.shutdown();
  return calls.arrays;
}

// Sums of ranks that are threads: those of the first one. A doubling among five has another order than the ranks have.
std::vector<std::vector<float>> sums_of(unsigned story) {
  constexpr int kManyRanks = 5;
  const Job job(kManyRanks, false, kEndsWell);
  std::vector<std::vector<std::vector<float>>> sums(kManyRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kManyRanks; ++rank)
    ranks.emplace_back([&, rank] { sums[static_cast<size_t>(rank)] = tell(job, rank, story); });
  for (std::thread& rank : ranks) rank.join();
  for (const auto& of_rank : sums)
    if (of_rank != sums.front()) fail("the ranks have other bits");
  return sums.front();
}

void compare_stories() {
  if (sums_of(0) != sums_of(1)) fail("the same sums have other bits in another story");
}

// A thread that is about to take a lock, or has let go of one, pauses now and then.
void pause_now_and_then() {
  static std::atomic<unsigned> threads{0};
  thread_local std::minstd_rand random(1000 * seed + ++threads);
  if (seed == 0 || random() % 16 != 0) return;
  if (random() % 4 == 0)
    usleep(static_cast<useconds_t>(random() % 300));
  else
    sched_yield();
}

void run(Job job) {
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Shared& shared = *new (memory) Shared();
  int callers = 0;
  for (int rank = 0; rank < job.ranks; ++rank)
    callers += static_cast<int>(sets_of(job, rank).size()) * (job.ranks > 1 ? kCallers + 1 : 1);
  if (job.shares_memory)
    run_as_processes(job, shared);
  else
    run_as_threads(job, shared);
  const int done = shared.done, failed = shared.failed;
  const bool is_well = job.how <= kEndsWellTuned;
  if (done + failed != callers || is_well != (failed == 0))
    fail(std::to_string(done) + " threads ended well, " + std::to_string(failed) + " with an error");
}

}  // namespace

extern "C" {
int __real_pthread_mutex_lock(pthread_mutex_t* mutex);
int __real_pthread_mutex_trylock(pthread_mutex_t* mutex);
int __real_pthread_mutex_unlock(pthread_mutex_t* mutex);

int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  pause_now_and_then();
  return __real_pthread_mutex_lock(mutex);
}
int __wrap_pthread_mutex_trylock(pthread_mutex_t* mutex) {
  pause_now_and_then();
  return __real_pthread_mutex_trylock(mutex);
}
int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  const int error = __real_pthread_mutex_unlock(mutex);
  pause_now_and_then();
  return error;
}
}

int main(int count, char** words) {
  const std::string way = words[1];
  if (way != "handles") seed = static_cast<unsigned>(std::atoi(words[count - 1]));
  if (way == "handles")
    finish_while_asking();
  else if (way == "stories")
    compare_stories();
  else if (way == "alone")
    run(Job(1, false, kEndsWell));
  else
    run(Job(kRanks, way == "shared", static_cast<How>(std::atoi(words[2]))));
  std::puts("well");
}
