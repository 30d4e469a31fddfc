// Engines of three ranks under ThreadSanitizer, with several threads each that submit, watch and record, and an end of
// each kind: test/engine/test_engine_threads.py.
//
// engine_threads handles: one thread finishes Handles while another asks to be called.
// engine_threads sockets|shared HOW...: over sockets, as threads of this process, or over shared memory, as processes.
// HOW: 0 and 1 end well, 1 with two streams and autotune; 2 a script fails; 3 a rank is lost; 4 a rank shuts down.
#include <arpa/inet.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "runtime/engine.h"

using namespace ringtrain;

namespace {

constexpr int kRanks = 3, kCallers = 2, kSteps = 25, kStepOfTrouble = 12;
enum How { kEndsWell, kEndsWellTuned, kScriptFails, kRankIsLost, kRankShutsDown };

// A counter of all ranks, in memory that processes share.
struct Shared {
  std::atomic<int> pids[kRanks];
  std::atomic<int> done, failed;
};

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
  explicit Job(bool shares_memory, How how) : shares_memory(shares_memory), how(how) {
    for (int rank = 0; rank < kRanks; ++rank) {
      listeners.push_back(make_listener());
      addresses.push_back({address_of(listeners.back())});
      names.push_back({rank, shares_memory ? "h" : "h" + std::to_string(rank), getpid()});
      nodes.push_back(shares_memory ? 0 : rank);
    }
  }

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

SubmissionPtr submission(OpKind kind, const std::string& name, std::vector<float>& data) {
  auto submission = std::make_shared<Submission>();
  submission->request = std::make_shared<Request>();
  Operation& operation = submission->request->operation;
  operation.kind = kind;
  operation.name = name;
  operation.tensors = {{DType::float32, {static_cast<int64_t>(data.size())}}};
  submission->inputs.push_back(data.data());
  if (kind == OpKind::allreduce) submission->outputs.push_back(data.data());
  if (kind == OpKind::alltoall)
    submission->splits = std::vector<int64_t>(kRanks, static_cast<int64_t>(data.size()) / kRanks);
  submission->request->site = std::make_shared<const std::string>("x.py:1");
  return submission;
}

void make_trouble(Engine& engine, const Job& job, int rank) {
  if (job.how == kScriptFails && rank == 1) engine.report_failure("a test", 1);
  if (job.how == kRankIsLost && rank == 2) engine.report_loss("rank 7 is gone");
  if (job.how == kRankShutsDown && rank == 0) engine.shutdown();
}

// One of the threads of a rank that submit. The first one says when it is blocked.
void call(Engine& engine, const Job& job, int rank, int caller) {
  const auto never = [] { return false; };
  const bool is_first = caller == 0;
  std::vector<std::vector<float>> arrays(6, std::vector<float>(is_first ? 3000 : 39));
  std::vector<float> large(300'000, 1);
  const std::string prefix = "t" + std::to_string(caller) + ".";
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::shared_ptr<Handle>> handles;
    for (size_t i = 0; i < arrays.size(); ++i) {
      std::fill(arrays[i].begin(), arrays[i].end(), 1.f);
      const OpKind kind = i == 4 ? OpKind::allgather : i == 5 ? OpKind::alltoall : OpKind::allreduce;
      const auto way = i + 1 == arrays.size() ? Engine::Caller::waits : Engine::Caller::goes_on;
      handles.push_back(engine.submit(submission(kind, prefix + std::to_string(i), arrays[i]), way));
      if (i == 0) handles.back()->on_done([] {});
    }
    if (step % 8 == 0)
      handles.push_back(engine.submit(submission(OpKind::allreduce, prefix + "large", large), Engine::Caller::goes_on));
    if (is_first && step == kStepOfTrouble) make_trouble(engine, job, rank);
    if (is_first) engine.say_blocked(handles);
    for (const auto& handle : handles) {
      while (!engine.wait(*handle, 0.2, never)) continue;
      handle->result();
    }
    if (is_first) engine.say_blocked({});
    for (size_t i = 0; i < 4; ++i)
      if (arrays[i].front() != kRanks) fail("a sum is wrong: " + std::to_string(arrays[i].front()));
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

void run_rank(const Job& job, int rank, Shared& shared) {
  Engine engine(world_of(job, rank), options_of(job), std::make_shared<Resources>());
  std::atomic<bool> is_over{false};
  std::thread observer([&] {
    while (!is_over) {
      engine.last_operations();
      engine.totals();
      engine.counts();
      engine.mark("here");
      usleep(3000);
    }
  });
  std::thread recorder([&] { record(engine, "timeline" + std::to_string(rank) + ".json", is_over); });
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&, caller] {
      try {
        call(engine, job, rank, caller);
        ++shared.done;
      } catch (const Error&) {
        ++shared.failed;
      }
    });
  for (std::thread& caller : callers) caller.join();
  is_over = true;
  observer.join();
  recorder.join();
  engine.shutdown();
}

void run_as_threads(const Job& job, Shared& shared) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back([&, rank] { run_rank(job, rank, shared); });
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

}  // namespace

int main(int count, char** words) {
  if (std::strcmp(words[1], "handles") == 0) finish_while_asking();
  for (int i = 2; i < count; ++i) {
    void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    Shared& shared = *new (memory) Shared();
    Job job(std::strcmp(words[1], "shared") == 0, static_cast<How>(std::atoi(words[i])));
    if (job.shares_memory)
      run_as_processes(job, shared);
    else
      run_as_threads(job, shared);
    const int done = shared.done, failed = shared.failed;
    if (done + failed != kRanks * kCallers || (job.how <= kEndsWellTuned && failed > 0) ||
        (job.how > kEndsWellTuned && failed == 0))
      fail(std::to_string(done) + " threads ended well, " + std::to_string(failed) + " with an error");
  }
  std::puts("well");
}
