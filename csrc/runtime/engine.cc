#include "runtime/engine.h"

#include <signal.h>

#include <algorithm>

#include "coordination/mismatch.h"
#include "kernels/reduce.h"

namespace ringtrain {
namespace {

Coordinator::Limits limits_of(const Options& options) {
  Coordinator::Limits limits;
  limits.cache_capacity = static_cast<size_t>(options.cache_capacity);
  limits.fusion_threshold_bytes = static_cast<size_t>(options.fusion_threshold_mb * 1024 * 1024);
  limits.stall_warning_s = options.stall_warning_time_s;
  limits.stall_shutdown_s = options.stall_shutdown_time_s;
  return limits;
}

// Signals are for the threads of Python.
std::thread start_without_signals(void (Engine::*run)(), Engine* engine) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(run, engine);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

// What this rank is about to wait for, for messages.
std::string title_of(const Plan& plan) {
  const std::string first = title_of(plan.parts.front().request);
  return plan.parts.size() == 1 ? first : first + " and " + std::to_string(plan.parts.size() - 1) + " more";
}

}  // namespace

Engine::Engine(World world, Options options)
    : world_(std::move(world)),
      options_(std::move(options)),
      fabric_(world_, options_),
      sets_(world_, options_, fabric_),
      coordinator_(fabric_.channel(), sets_.membership(), limits_of(options_)),
      executor_(inbox_, sets_) {
  thread_ = start_without_signals(&Engine::loop, this);
}

Engine::~Engine() { shutdown(); }

std::shared_ptr<Handle> Engine::submit(Submission submission) {
  std::shared_ptr<Handle> handle = inbox_.add(std::move(submission));
  fabric_.bell().ring();
  return handle;
}

void Engine::shutdown() {
  is_leaving_.store(true);
  fabric_.bell().ring();
  if (thread_.joinable()) thread_.join();
}

void Engine::loop() {
  keep_denormals();
  try {
    while (!has_ended_) {
      wait_for_work();
      turn();
    }
  } catch (const Error& error) {
    fail(error.kind(), error.kind() == ErrorKind::peer_lost ? name_the_lost(error.what()) : error.what());
  } catch (const std::exception& error) {
    fail(ErrorKind::failure, error.what());
  }
}

void Engine::turn() {
  fabric_.watch().now_doing("the negotiation");
  const Round round = coordinator_.round(inbox_.take_new(), is_leaving_.load());
  for (const Plan& plan : round.plans) {
    fabric_.watch().now_doing(title_of(plan));
    executor_.run(plan);
  }
  if (!round.left.empty()) end(round.left);
}

bool Engine::has_work() {
  return inbox_.has_new() || is_leaving_.load() || fabric_.channel().is_called() ||
         now_s() >= coordinator_.next_deadline();
}

void Engine::wait_for_work() {
  if (waiter_.is_quick([&] { return has_work(); })) return;
  const double begin = now_s();
  while (true) {
    const uint32_t seen = fabric_.bell().value.load(std::memory_order_acquire);
    if (has_work()) return;
    fabric_.bell().sleep(seen, sleep_s(now_s() - begin));
    fabric_.watch().look();
  }
}

// Other nodes cannot ring the bell, so the first rank of a node looks for their calls: often while there was work a
// moment ago, rarely when idle. The others only give MPI a call now and then. On one node it is enough to look whether
// the other ranks live.
double Engine::sleep_s(double idle_s) {
  constexpr double kLookAround_s = 0.2, kShortest_s = 20e-6, kLongestCall_s = 0.1, kLongestPoll_s = 0.01;
  if (fabric_.alarm())
    return std::clamp(idle_s / 8, kShortest_s, fabric_.is_rung_for_rounds() ? kLongestCall_s : kLongestPoll_s);
  return std::clamp(coordinator_.next_deadline() - now_s(), 1e-3, kLookAround_s);
}

void Engine::end(const std::vector<int>& left) {
  has_ended_ = true;
  if (Node* node = fabric_.node()) node->leave();
  const bool by_itself = is_leaving_.load();
  inbox_.close(ErrorKind::shut_down,
               by_itself ? "ringtrain was shut down on this rank while the operation was pending"
                         : ranks_text(left) +
                               " left the job: shutdown() was called there, or the script came to its end. "
                               "No operation can complete without it.");
}

// MPI tells that somebody is gone, but not who; where it knows, the message becomes that of the node's own roll call.
std::string Engine::name_the_lost(const std::string& message) {
  if (!fabric_.alarm()) return message;
  std::string text;
  for (const int rank : fabric_.mpi()->failed_ranks()) text += is_gone(world_.names[rank]) + " ";
  return text.empty() || message.find("is gone") != std::string::npos ? message : text + "(" + message + ")";
}

void Engine::fail(ErrorKind kind, const std::string& message) {
  if (Node* node = fabric_.node()) node->say_last_words(kind, message);
  if (Alarm* alarm = fabric_.alarm()) alarm->raise(kind, message);
  inbox_.close(kind, message);
}

}  // namespace ringtrain
