#include "runtime/engine.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/fork.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/thread_annotations.h"
#include "kernels/reduce.h"

namespace ringtrain {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// How long it does not look whether the others live: while nobody waits, and while somebody does.
constexpr double kLookAround_s = 0.2, kLookAroundInWait_s = 0.05;
constexpr double kMoment_s = 1e-3;
// Sleeps of this thread end when they should, not up to 50 us later.
constexpr unsigned long kTimerSlack_ns = 1000;

Coordinator::Limits limits_of(const Options& options, const Tuning& tuning) {
  Coordinator::Limits limits;
  limits.cache_capacity = static_cast<size_t>(options.cache_capacity);
  limits.fusion_threshold_bytes = tuning.fusion_threshold_bytes;
  limits.stall_warning_s = options.stall_warning_time_s;
  limits.stall_shutdown_s = options.stall_shutdown_time_s;
  return limits;
}

bool is_deadlock(const Round& round) {
  return !round.plans.empty() && round.plans.front()->parts.front()->error == ErrorKind::deadlock;
}

}  // namespace

Engine::Engine(World world, Options options, std::shared_ptr<Resources> resources)
    : world_(std::move(world)),
      options_(std::move(options)),
      resources_(std::move(resources)),
      has_to_share_cores_(world_.cores < 2 * world_.ranks_on_own_node()),
      inbox_(world_.size() > 1),
      tuning_(tuning_of(options_)),
      fabric_(world_, options_, *resources_),
      sets_(world_, options_, tuning_, fabric_),
      gpus_(world_, options_, tuning_, *resources_, fabric_, sets_),
      coordinator_(fabric_.channel(), sets_.membership(), limits_of(options_, tuning_)),
      blocked_(coordinator_),
      executor_(world_.rank, fabric_.watch(), inbox_, sets_, gpus_) {
  if (options_.autotune == "on" && world_.rank == 0 && world_.size() > 1)
    autotune_.emplace(tuning_, Autotune::knobs(options_, fabric_.alarm() == nullptr, fabric_.node() != nullptr));
  fabric_.watch().set_pending([this] { return inbox_.pending_text(); });
  fabric_.watch().set_limits({options_.stall_warning_time_s, options_.stall_shutdown_time_s});
  thread_ = start_thread(&Engine::loop, this);
}

Engine::~Engine() { shutdown(); }

std::shared_ptr<Handle> Engine::submit(SubmissionPtr submission, Caller caller) {
  const bool is_registered = this->is_registered(*submission);
  if (submission->operation().is_registered != is_registered) submission->own_operation().is_registered = is_registered;
  submission->is_awaited = caller == Caller::waits;
  std::shared_ptr<Handle> handle = inbox_.add(std::move(submission));
  const bool has_to_ring = caller == Caller::goes_on || !callers_take_turns();
  if (has_to_ring && !has_rung_for_new_.exchange(true)) fabric_.bell().ring();
  return handle;
}

void Engine::start_timeline(Timeline::Setup setup) {
  setup.rank = world_.rank;
  setup.process = "rank " + std::to_string(world_.rank) + " on " + world_.names[world_.rank].host;
  inbox_.set_timeline(std::make_shared<Timeline>(std::move(setup)));
}

void Engine::mark(const std::string& text) {
  if (const auto timeline = inbox_.timeline()) timeline->mark(text, now_s());
}

void Engine::say_blocked(std::vector<std::shared_ptr<Handle>> awaited) {
  const bool is_blocked = !awaited.empty();
  blocked_.say(std::move(awaited));
  if (is_blocked) fabric_.bell().ring();
}

void Engine::on_question(std::function<void(const std::string&)> ask) {
  const Lock lock(question_mutex_);
  ask_ = std::move(ask);
}

void Engine::answer(std::string whereabouts) {
  {
    const Lock lock(question_mutex_);
    answer_ = std::move(whereabouts);
  }
  has_answer_ = true;
  fabric_.bell().ring();
}

std::string Engine::take_answer() {
  has_answer_ = false;
  const Lock lock(question_mutex_);
  return std::exchange(answer_, {});
}

void Engine::ask(const std::string& question) {
  const Lock lock(question_mutex_);
  if (ask_) ask_(question);
}

bool Engine::is_registered(const Submission& submission) {
  const Arena* arena = fabric_.arena().get();
  const Operation& operation = submission.operation();
  const bool is_plain = operation.op != ReduceOp::adasum && operation.quantizer.kind == Quantizer::Kind::none;
  if (operation.kind != OpKind::allreduce || !is_plain || (!arena && !operation.is_on_gpu)) return false;
  for (size_t t = 0; t < submission.inputs.size(); ++t) {
    const void* output = submission.outputs[t];
    const size_t bytes = operation.tensors[t].bytes();
    const bool is_there = operation.is_on_gpu ? gpus_.is_registered(operation.process_set, output, bytes)
                                              : arena->find(output, bytes).has_value();
    if (submission.inputs[t] != output || !is_there) return false;
  }
  return true;
}

void Engine::shutdown() {
  is_leaving_.store(true);
  fabric_.bell().ring();
  if (thread_.joinable()) thread_.join();
}

void Engine::report_failure(const std::string& reason, double timeout_s) {
  fabric_.own_failure().set({ErrorKind::remote, to_string(world_.names[world_.rank]) + " raised " + reason});
  fabric_.bell().ring();
  const double end = now_s() + timeout_s;
  while (!is_closed_ && now_s() < end) Waiter::nap(kMoment_s);
}

void Engine::report_loss(const std::string& text) {
  fabric_.own_failure().set({ErrorKind::peer_lost, text});
  fabric_.bell().ring();
}

// ------------------------------------------------------------------------------------------- the engine's own thread

// Between turns it spins for a moment, without keeping callers from theirs, and then sleeps on the bell. While a caller
// takes turns it sleeps on, not counted as a sleeper: the bell need not wake it for what the caller will see.
void Engine::loop() {
  const KeptDenormals denormals;
  prctl(PR_SET_TIMERSLACK, kTimerSlack_ns);
  while (!has_ended_) {
    const uint32_t seen = fabric_.bell().value.load(std::memory_order_acquire);
    if (inbox_.has_new()) gather();
    const Turns turns = take_all_turns();
    if (turns == Turns::left_to_caller) {
      fabric_.bell().sleep_uncounted(seen, kLookAround_s);
      continue;
    }
    if (has_ended_ || (turns == Turns::some && spin(seen))) continue;
    if (lie_down()) fabric_.bell().sleep_uncounted(seen, pause_s_);
  }
}

// Lets more submissions come before the first turn for them.
void Engine::gather() {
  if (!callers_take_turns())
    patience_.let_several_come();
  else if (has_to_share_cores_)
    let_burst_pass();
}

// Where every core has a rank, turns in the middle of a burst of submissions (the gradients at the end of a backward
// pass) only keep the submitting thread from its work.
void Engine::let_burst_pass() {
  constexpr double kPause_s = 100e-6, kLongest_s = 500e-6;
  const double end = now_s() + kLongest_s;
  uint64_t added;
  do {
    added = inbox_.added();
    Waiter::nap(kPause_s);
  } while (inbox_.added() != added && now_s() < end && !waiting_callers_.any());
}

Engine::Turns Engine::take_all_turns() {
  if (waiting_callers_.any() || !turn_.try_lock()) return Turns::left_to_caller;
  stay_awake();
  Turns turns = Turns::none;
  guarded([&] {
    turn.assert_held();
    look_after_others();
    for (double now = now_s(); !has_ended_ && has_work() && !waiting_callers_.any(); turns = Turns::some)
      now = take_turn(kNever, now);
  });
  turn_.unlock();
  return waiting_callers_.call_next() ? Turns::left_to_caller : turns;
}

// Whether there is something to do.
bool Engine::spin(uint32_t seen) {
  const auto rings = [&] { return fabric_.bell().value.load(std::memory_order_acquire) != seen; };
  if (callers_take_turns()) return own_waiter_.is_quick([&] { return rings() || fabric_.channel().is_called(); });
  turn_.lock();
  const bool has_come = own_waiter_.is_quick([&] {
    turn.assert_held();
    return rings() || has_work();
  });
  turn_.unlock();
  return has_come;
}

// Whether the thread should sleep now; who rings the bell from now on will wake it.
bool Engine::lie_down() {
  if (!turn_.try_lock()) return false;
  bool is_idle = false;
  if (!has_ended_) {
    fall_asleep();
    pause_s_ = pause_s();
    is_idle = !has_work();
  }
  turn_.unlock();
  return !waiting_callers_.call_next() && is_idle;
}

// --------------------------------------------------------------------------------------------- the waiting callers

bool Engine::wait(Handle& handle, double timeout_s, const Interrupt& is_interrupted, double give_up_s) {
  if (handle.is_done()) return true;
  const double begin = now_s();
  Wait wait{begin + timeout_s, begin + give_up_s, is_interrupted, begin};
  const bool is_done = wait_or_work(handle, wait);
  const double end = wait.now;
  exposed_ns_ += static_cast<uint64_t>((end - begin) * 1e9);
  if (!inbox_.has_timeline()) return is_done;
  if (const auto timeline = inbox_.timeline()) timeline->note_wait(begin, end);
  return is_done;
}

bool Engine::wait_or_work(Handle& handle, Wait& wait) {
  if (turn_.is_held_here()) throw failure("what is called when an operation is done must not wait for another one");
  if (!callers_take_turns()) {
    const Patience::Hurry hurry(patience_);
    const bool is_done = handle.wait(wait.returns_s - wait.now);
    wait.now = now_s();
    return is_done;
  }
  do {
    if (turn_.try_lock() || wait_for_turn(handle, wait)) take_turns_until_done(handle, wait);
  } while (!has_waited_enough(handle, wait));
  return handle.is_done();
}

bool Engine::has_waited_enough(const Handle& handle, const Wait& wait) const {
  return handle.is_done() || has_ended_ || wait.now >= wait.returns_s;
}

// The thread that has the turn may finish the Handle, or leave it to this thread: at the latest after the next plan if
// it is the engine's own.
bool Engine::wait_for_turn(const Handle& handle, Wait& wait) {
  {
    WaitingCallers::Caller self(waiting_callers_, handle, nullptr);
    fabric_.bell().ring();  // the thread that has the turn may have looked for work for the last time
    if (turn_.try_lock()) return true;
    self.sleep(std::clamp(wait.returns_s - wait.now, 0.0, kLookAround_s));
    wait.now = now_s();
  }
  return turn_.try_lock();
}

// While there is nothing to do it lets go of the turn. Then another caller may take it, which has no reason to wait
// until this one is awake.
void Engine::take_turns_until_done(const Handle& handle, Wait& wait) {
  const KeptDenormals denormals;
  const auto has_work = [&] {
    turn.assert_held();
    return this->has_work();
  };
  const auto work_comes = [&] {
    turn.assert_held();
    const bool has_come = waiter_.is_quick(has_work);
    wait.now = now_s();
    return has_come;
  };
  while (true) {
    stay_awake();
    fabric_.watch().set_interrupt(&wait.is_interrupted);
    fabric_.watch().set_deadline(wait.gives_up_s);
    guarded([&] {
      turn.assert_held();
      while (!has_waited_enough(handle, wait) && (has_work() || work_comes()))
        wait.now = take_turn(wait.returns_s, wait.now);
    });
    fabric_.watch().set_interrupt(nullptr);
    fabric_.watch().set_deadline(kNever);
    if (has_waited_enough(handle, wait)) return let_go();
    const uint32_t seen = fabric_.bell().value.load(std::memory_order_acquire);
    fall_asleep();
    if (has_work()) continue;
    keep_bell(handle, wait, seen);
    if (!turn_.try_lock()) return;
    guarded([&] {
      turn.assert_held();
      look_after_others();
    });
  }
}

// Sleeps until the bell rings, which it has not since it was `seen`.
void Engine::keep_bell(const Handle& handle, Wait& wait, uint32_t seen) {
  const double end = std::min(wait.returns_s, coordinator_.next_deadline());
  const WaitingCallers::Caller self(waiting_callers_, handle, &fabric_.bell());
  turn_.unlock();
  fabric_.bell().sleep_uncounted(seen, std::clamp(end - now_s(), 0.0, kLookAroundInWait_s));
  wait.now = now_s();
}

// Ranks that have called, but have not rung since, are not in need yet: this thread may come back in a moment.
void Engine::let_go() {
  fall_asleep();
  const bool has_rung = fabric_.bell().value.load(std::memory_order_seq_cst) != rings_before_round_;
  const bool is_left_with_work = has_ended_ || has_own_work() || (has_rung && is_called());
  turn_.unlock();
  if (!waiting_callers_.call_next() && is_left_with_work) fabric_.bell().ring();
}

// ----------------------------------------------------------------------------------------------------------- the work

void Engine::look_after_others() {
  if (trouble_) throw *trouble_;
  fabric_.watch().look();
  gpus_.look();
}

bool Engine::has_work() { return has_own_work() || is_called(); }

bool Engine::has_own_work() {
  if (inbox_.has_new() || !backlog_.empty() || coordinator_.is_in_round() || is_leaving_ || has_answer_) return true;
  const double deadline = coordinator_.next_deadline();
  return deadline != kNever && now_s() >= deadline;
}

bool Engine::is_called() {
  bool is_called = false;
  if (!trouble_) trouble_ = error_of([&] { is_called = fabric_.channel().is_called(); });
  return is_called || trouble_;
}

// A round, unless the others do not come to it before `deadline`, and the plans whose turn comes then.
double Engine::take_turn(double deadline, double now) {
  if (trouble_) throw *trouble_;
  fabric_.own_failure().require_none();
  if (!coordinator_.is_in_round()) {
    fabric_.watch().now_doing("the negotiation");
    news_.blockage = coordinator_.blockage();
    news_.is_leaving = is_leaving_;
    news_.has_plans_of_world = backlog_.has_plans_of_world();
    inbox_.take_new(news_.fresh, news_.now = now);
    if (has_answer_) news_.whereabouts = take_answer();
    rings_before_round_ = fabric_.bell().value.load(std::memory_order_acquire);
    coordinator_.begin_round(news_);
    news_.whereabouts.clear();
  }
  Round* const round = coordinator_.finish_round(deadline);
  now = now_s();
  if (!round) return now;
  if (round->reach == Reach::world) patience_.note_round(now - news_.now);
  if (const auto timeline = inbox_.has_timeline() ? inbox_.timeline() : nullptr) timeline->note_round(now);
  if (round->tuning) tuning_ = *round->tuning;
  if (!round->question.empty()) ask(round->question);
  // Each rank has submitted another number of operations without a name by then, and all of them are about to fail.
  if (is_deadlock(*round)) inbox_.restart_unnamed();
  enqueue(*round, now);
  // Values are valid until the next round, so only a plan that is carried out at once takes them. All ranks decide
  // alike, by the plans of the world, which they have in common.
  if (!backlog_.has_one_plan_of_world()) round->values.clear();
  static const std::vector<const void*> none;
  backlog_.take_turn(round->reach, [&](const Backlog::Agreed& agreed) {
    turn.assert_held();
    now = run_agreed(agreed, agreed.reach == Reach::world ? round->values : none, now);
  });
  if (!round->left.empty()) end(round->left);
  waiting_callers_.call_done();
  quiet_since_s_ = now;
  return now;
}

// An error waits for no turn and for no other rank. It does not concern later submissions of the same name.
void Engine::enqueue(const Round& round, double now) {
  for (const PlanPtr& plan : round.plans) {
    if (plan->parts.front()->error != ErrorKind::none)
      run(*plan, now, now, {});
    else
      backlog_.add({plan, round.reach, now});
  }
}

double Engine::run_agreed(const Backlog::Agreed& agreed, const std::vector<const void*>& values, double now) {
  const double end = run(*agreed.plan, agreed.since_s, now, values);
  if (autotune_) observe(*agreed.plan, end - now);
  return end;
}

double Engine::run(const Plan& plan, double agreed_s, double now, const std::vector<const void*>& values) {
  const double end = executor_.run(plan, agreed_s, now, values);
  blocked_.look();
  coordinator_.note_carried_out(end);
  return end;
}

void Engine::observe(const Plan& plan, double seconds) {
  const Agreement& first = *plan.parts.front();
  if (first.operation.kind != OpKind::allreduce) return;
  if (first.operation.is_on_gpu) return;  // the time is that of the GPU, and nobody waits for it
  size_t bytes = 0;
  for (const AgreementPtr& part : plan.parts) bytes += part->operation.bytes();
  autotune_->note(bytes, seconds);
  if (const std::optional<Tuning> next = autotune_->take_proposal()) coordinator_.propose(*next);
  if (!autotune_->is_done()) return;
  inform(autotune_->report());
  resources_->set_findings(autotune_->findings());
  if (!options_.autotune_file.empty()) autotune_->write(options_.autotune_file);
  autotune_.reset();
}

// Followed by a last look for work: a thread that did not ring, since another one had, has added its work before. A
// caller may have counted the engine's thread while it was awake.
void Engine::fall_asleep() {
  if (has_rung_for_new_) has_rung_for_new_.exchange(false);
  if (is_counted_asleep_) return;
  fabric_.bell().add_sleeper();
  is_counted_asleep_ = true;
}

void Engine::stay_awake() {
  if (is_counted_asleep_) fabric_.bell().remove_sleeper();
  is_counted_asleep_ = false;
}

// On one node it is enough to look whether the other ranks live. Other nodes may not be able to ring the bell, so the
// first rank of a node looks for their calls: often while there was work a moment ago, most often while a caller waits
// for them, rarely when idle. The others only give the Network a call now and then.
double Engine::pause_s() {
  constexpr double kShortest_s = 20e-6, kLongestCall_s = 0.1, kLongestPoll_s = 0.01, kSoon_s = 1e-3;
  const double idle_s = now_s() - quiet_since_s_;
  if (!fabric_.alarm() || (idle_s > kSoon_s && fabric_.will_ring_on_arrival()))
    return std::clamp(coordinator_.next_deadline() - now_s(), kSoon_s,
                      patience_.is_hurried() ? kLookAroundInWait_s : kLookAround_s);
  return std::clamp(idle_s / (patience_.is_hurried() ? 8 : 2), kShortest_s,
                    fabric_.is_rung_for_rounds() ? kLongestCall_s : kLongestPoll_s);
}

void Engine::end(const std::vector<int>& left) {
  backlog_.take_rest([&](const Backlog::Agreed& agreed) {
    turn.assert_held();
    run_agreed(agreed, {}, now_s());
  });
  fabric_.watch().now_doing("the shutdown");
  gpus_.leave();
  sets_.leave();
  has_ended_ = true;
  if (Node* node = fabric_.node()) node->leave();
  const bool by_itself = is_leaving_;
  inbox_.close(ErrorKind::shut_down,
               by_itself ? "ringtrain was shut down on this rank while the operation was pending"
                         : names_text(left) +
                               " exited early: shutdown() was called there, or the script came to its end. "
                               "No operation can complete without it. Do the ranks have different numbers of batches? "
                               "In PyTorch put the loop into `with hvd.Join(optimizer):`, elsewhere call hvd.join() "
                               "after it.");
  is_closed_ = true;
}

// ------------------------------------------------------------------------------------------------------ when it fails

template <typename Work>
void Engine::guarded(Work work) {
  if (const std::optional<Error> error = error_of(work)) fail(fabric_.watch().with_reason(*error));
}

void Engine::fail(const Error& error) {
  const ErrorKind kind = error.kind();
  const std::string message = error.what();
  has_failed_ = true;
  has_ended_ = true;
  if (kind == ErrorKind::failure)
    fabric_.say_last_words(ErrorKind::remote, to_string(world_.names[world_.rank]) + " failed: " + message);
  else
    fabric_.say_last_words(kind, message);
  inbox_.close(kind, message);
  gpus_.abort(error);
  waiting_callers_.call_done();
  is_closed_ = true;
}

std::string Engine::names_text(const std::vector<int>& ranks) const {
  const std::string first = to_string(world_.names[ranks.front()]);
  return ranks.size() == 1 ? first : first + " and " + std::to_string(ranks.size() - 1) + " more";
}

// ----------------------------------------------------------------------------------------- the Engine of this process

namespace {

// A std::atomic_load of a shared_ptr takes a lock of the standard library's, too, which a fork may leave locked.
Mutex mutex;
// Never destroyed: threads of XLA, of MXNet and of the script ask for the Engine until the process has ended.
std::shared_ptr<Engine>& engine GUARDED_BY(mutex) = *new std::shared_ptr<Engine>;
// Of all Engines of this process.
std::shared_ptr<Resources>& resources GUARDED_BY(mutex) = *new std::shared_ptr<Resources>;
bool is_forked_child GUARDED_BY(mutex) = false;  // of a process that had an Engine then
// What ended the last Engine; empty: there was none.
std::string& ended_by GUARDED_BY(mutex) = *new std::string;

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
