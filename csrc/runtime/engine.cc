#include "runtime/engine.h"

#include <pthread.h>

#include <algorithm>

#include "base/fork.h"

namespace ringtrain {
namespace {

constexpr double kMoment_s = 1e-3;
// How long it does not look whether the others live while nobody waits.
constexpr double kLookAround_s = 0.2;
constexpr double kNever = std::numeric_limits<double>::infinity();
// How long the others wait for a lane that always has work.
constexpr double kLongestOfOnePlace_s = 1e-3;
// How long the thread on the lookout leaves work to a caller that sees to all lanes.
constexpr double kStandBack_s = 0.8e-3;

}  // namespace

Engine::Engine(World world, Options options, std::shared_ptr<Resources> resources)
    : world_(std::move(world)),
      options_(std::move(options)),
      shares_cores_(world_.cores < 2 * world_.ranks_on_own_node()),
      resources_(std::move(resources)),
      inbox_(world_.size() > 1),
      tuning_(tuning_of(options_)),
      fabric_(world_, options_, *resources_, turn_),
      sets_(world_, options_, tuning_, fabric_),
      gpus_(world_, options_, tuning_, *resources_, fabric_, sets_),
      blocked_(blockage_),
      lookout_([this] { look_out(); }) {
  std::unique_ptr<Autotune> autotune;
  if (options_.autotune == "on" && world_.rank == 0 && world_.size() > 1)
    autotune = std::make_unique<Autotune>(
        tuning_, Autotune::knobs(options_, fabric_.alarm() == nullptr, fabric_.node() != nullptr));
  PeerWatch& watch = fabric_.watch();
  watch.set_pending([this] { return inbox_.pending_text(); });
  watch.set_limits({options_.stall_warning_time_s, options_.stall_shutdown_time_s});
  watch.set_on_aside([this] {
    lookout_.hand_over();
    if (attention_.end()) fabric_.bell().ring();
  });
  mail_ = std::make_unique<Mail>(world_, options_, static_cast<Mail::Owner&>(*this), turn_, fabric_, inbox_, blockage_,
                                 blocked_, attention_);
  world_lane_ = std::make_shared<Lane>(sets_.open_set(0), shared(), std::move(autotune));
  lanes_ = std::make_shared<const Lanes>(Lanes{world_lane_});
  inbox_.allow(0, world_lane_->arrivals());
  beginning_.unlock();
  lookout_.start();
}

Lane::Shared Engine::shared() {
  return {*this,     options_, turn_,      inbox_, fabric_,    sets_,  gpus_,
          blockage_, blocked_, residuals_, *mail_, attention_, world_, shares_cores_};
}

Engine::~Engine() { shutdown(); }

// Looked up after it was added: a lane that ends meanwhile hands it on.
std::shared_ptr<Handle> Engine::submit(SubmissionPtr submission, Caller caller) {
  const bool is_registered = this->is_registered(*submission);
  if (submission->operation().is_registered != is_registered) submission->own_operation().is_registered = is_registered;
  submission->is_awaited = caller == Caller::waits;
  const int process_set = submission->operation().process_set;
  const bool is_end = process_set == 0 && submission->operation().name == kEndName;
  if (is_end) submit_ends(*submission);
  const bool is_message = submission->operation().kind == OpKind::transfer;
  submission->handle->set_process_set(is_message ? Handle::kMessage : process_set);
  if (is_message) lookout_.share();
  std::shared_ptr<Handle> handle = inbox_.add(std::move(submission));
  if (is_end) mail_->end_for_others();
  with_place_of(*handle, [caller](Workplace& place) {
    if (caller == Caller::goes_on || !place.callers_work()) place.ring_for_new();
  });
  return handle;
}

bool Engine::begin(const DirectEnds& ends) {
  if (!lookout_.is_shared()) lookout_.share();
  return mail_->begin(ends);
}

// A rank that submits nothing more to the world submits nothing to its process sets, whose ranks may wait for it.
void Engine::submit_ends(const Submission& end) {
  const std::shared_ptr<const Lanes> lanes = this->lanes();
  for (const auto& lane : *lanes) {
    if (lane == world_lane_) continue;
    auto own = std::make_shared<Submission>();
    own->request = std::make_shared<Request>(*end.request);
    own->own_operation().process_set = lane->process_set();
    submit(std::move(own), Caller::goes_on);
  }
}

std::shared_ptr<const Engine::Lanes> Engine::lanes() {
  const Lock lock(lanes_mutex_);
  return lanes_;
}

// That of the world where the process set has none.
std::shared_ptr<Lane> Engine::lane_of(int process_set) {
  const std::shared_ptr<const Lanes> lanes = this->lanes();
  const auto it = std::lower_bound(lanes->begin(), lanes->end(), process_set,
                                   [](const auto& lane, int set) { return lane->process_set() < set; });
  return it != lanes->end() && (*it)->process_set() == process_set ? *it : world_lane_;
}

template <typename Do>
void Engine::with_place_of(const Handle& handle, Do act) {
  const int process_set = handle.process_set();
  if (process_set == Handle::kMessage) return act(*mail_);
  if (process_set == 0) return act(*world_lane_);
  act(*lane_of(process_set));
}

void Engine::change_lanes(const std::function<void(Lanes&)>& change) {
  auto lanes = std::make_shared<Lanes>(*this->lanes());
  change(*lanes);
  const Lock lock(lanes_mutex_);
  lanes_ = std::move(lanes);
}

std::map<int, std::vector<int>> Engine::process_sets() {
  const Lock lock(lanes_mutex_);
  return ranks_of_sets_;
}

Coordinator::Counts Engine::counts() {
  const Lock lock(lanes_mutex_);
  Coordinator::Counts sum = counts_of_ended_;
  for (const auto& lane : *lanes_) sum += lane->counts();
  return sum;
}

uint64_t Engine::rounds_on_node() {
  const Lock lock(lanes_mutex_);
  uint64_t sum = rounds_on_node_of_ended_;
  for (const auto& lane : *lanes_)
    if (lane->is_on_node()) sum += lane->counts().rounds;
  return sum;
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

void Engine::answer(const std::string& whereabouts) {
  const std::shared_ptr<const Lanes> lanes = this->lanes();
  for (const auto& lane : *lanes) lane->answer(whereabouts);
  fabric_.bell().ring();
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
  world_lane_->leave();
  if (world_lane_->has_ended()) leave_lanes();
  lookout_.end();
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

// ------------------------------------------------------------------------------------------------- on the lookout

// Between turns it spins for a moment, without keeping callers from theirs, and then sleeps on the bell. While a caller
// works in the only lane it sleeps on, not counted as a sleeper: the bell need not wake it for what the caller will
// see.
void Engine::look_out() {
  Places places;
  while (!has_ended_) {
    const uint32_t seen = fabric_.bell().value.load(std::memory_order_acquire);
    if (shares_cores_ && attention_.any() && world_lane_->callers_work()) Waiter::nap(kStandBack_s);
    const std::shared_ptr<const Lanes> lanes = this->lanes();
    places.assign({mail_.get()});
    for (const auto& lane : *lanes) places.push_back(lane.get());
    const double longest_s = lookout_.is_shared() ? kLongestOfOnePlace_s : kNever;
    bool has_worked = false, are_more_left = false, are_left_to_callers = true;
    for (Workplace* const place : places) {
      if (place->is_dormant()) continue;
      const Workplace::Turns turns = place->take_turns(longest_s);
      if (!Lookout::is_here()) return step_down(*place);
      has_worked |= turns == Workplace::Turns::some;
      are_more_left |= turns == Workplace::Turns::more_are_left;
      are_left_to_callers &= turns == Workplace::Turns::left_to_caller || place->is_quiet();
    }
    if (are_left_to_callers) {
      fabric_.bell().sleep_uncounted(seen, kLookAround_s);
      continue;
    }
    if (has_ended_ || are_more_left || (has_worked && spin(places, seen))) continue;
    if (const std::optional<double> pause_s = lie_down(places)) fabric_.bell().sleep_uncounted(seen, *pause_s);
  }
}

// Another thread is on the lookout, and has found the place busy. Unless it would sleep for as long anyway, it has to
// look again.
void Engine::step_down(Workplace& place) {
  const std::optional<double> pause_s = place.lie_down();
  if (!pause_s || *pause_s < kLookAround_s) fabric_.bell().ring_all();
}

bool Engine::spin(const Places& places, uint32_t seen) {
  return own_waiter_.is_quick([&] {
    return fabric_.bell().value.load(std::memory_order_acquire) != seen ||
           std::any_of(places.begin(), places.end(), [](Workplace* place) { return place->is_called_for(); });
  });
}

// How long it may sleep, unless there is something to do.
std::optional<double> Engine::lie_down(const Places& places) {
  double pause_s = kLookAround_s;
  for (Workplace* const place : places) {
    if (place->is_dormant()) continue;
    const std::optional<double> own_s = place->lie_down();
    if (!own_s) return std::nullopt;
    pause_s = std::min(pause_s, *own_s);
  }
  return pause_s;
}

// -------------------------------------------------------------------------------------------------- who waits

// The lanes that there were when the wait began: the thread on the lookout sees to others.
class Engine::OtherLanes final : public Neighbours {
 public:
  explicit OtherLanes(std::shared_ptr<const Lanes> lanes) : lanes_(std::move(lanes)) {}
  bool any() const { return lanes_ && lanes_->size() > 1; }
  bool need_help(const Workplace& own) override {
    return std::any_of(lanes_->begin(), lanes_->end(), [&](const auto& lane) { return needs_help(*lane, own); });
  }
  void help(const Workplace& own, const Wait& wait) override {
    for (const auto& lane : *lanes_)
      if (needs_help(*lane, own)) lane->help(wait);
  }

 private:
  static bool needs_help(const Lane& lane, const Workplace& own) { return &lane != &own && lane.needs_help(); }

  const std::shared_ptr<const Lanes> lanes_;
};

bool Engine::wait(Handle& handle, double timeout_s, const Interrupt& is_interrupted, double give_up_s) {
  if (handle.is_done()) return true;
  if (turn_.is_held_here()) throw failure("what is called when an operation is done must not wait for another one");
  const double begin = now_s();
  // A caller that waits for a message sleeps on a bell of its own, so it would not hear.
  OtherLanes neighbours(lookout_.is_shared() && handle.process_set() != Handle::kMessage ? lanes() : nullptr);
  Wait wait{begin + timeout_s, begin + give_up_s, is_interrupted, begin, neighbours.any() ? &neighbours : nullptr};
  bool is_done = false;
  do {
    with_place_of(handle, [&](Workplace& place) { is_done = place.wait(handle, wait); });
  } while (!is_done && !has_ended_ && wait.now < wait.returns_s);
  // Another thread is about to find that all has ended, in the middle of this operation.
  if (!is_done && has_ended_) is_done = handle.wait(std::clamp(wait.returns_s - wait.now, 0.0, kLookAround_s));
  const double end = wait.now;
  exposed_ns_ += static_cast<uint64_t>((end - begin) * 1e9);
  if (!inbox_.has_timeline()) return is_done;
  if (const auto timeline = inbox_.timeline()) timeline->note_wait(begin, end);
  return is_done;
}

// ------------------------------------------------------------------------------------------------------ the lanes

void Engine::open(int process_set) {
  sets_.open(process_set);
  if (!sets_.contains_this_rank(process_set)) return;
  const auto lane = std::make_shared<Lane>(sets_.open_set(process_set), shared());
  lookout_.share();
  change_lanes([&](Lanes& lanes) { lanes.push_back(lane); });
  inbox_.allow(process_set, lane->arrivals());
  const Lock lock(lanes_mutex_);
  ranks_of_sets_[process_set] = lane->members();
}

void Engine::close(int process_set, ErrorKind kind, const std::string& why) {
  const std::shared_ptr<Lane> lane = lane_of(process_set);
  if (lane != world_lane_) lane->drain(fabric_.watch());
  mail_->messages().forget(process_set);
  inbox_.forbid(process_set, kind, why);
  mail_->call_done();
  gpus_.close(process_set);
  sets_.close(process_set);
  const Lock lock(lanes_mutex_);
  ranks_of_sets_.erase(process_set);
}

// Submissions that have not been agreed on go to the lane of the world, as those that come from now on do. Once that
// has ended, too, they fail.
void Engine::has_ended(Lane& lane, const std::vector<int>& left) {
  if (&lane == world_lane_.get()) return end_world(left);
  const int process_set = lane.process_set();
  retire(lane);
  if (world_lane_->has_ended()) {
    end_set(process_set, left);
  } else {
    inbox_.allow(process_set, world_lane_->arrivals());
    std::vector<Fresh> pending = lane.take_pending();
    if (sets_.membership().has(process_set)) world_lane_->take_in(std::move(pending));
  }
  lane.close();
}

void Engine::retire(Lane& lane) {
  const auto is_used_no_more = [](const std::shared_ptr<Lane>& one) { return one.use_count() == 1; };
  ended_.erase(std::remove_if(ended_.begin(), ended_.end(), is_used_no_more), ended_.end());
  ended_.push_back(lane_of(lane.process_set()));
  change_lanes([&](Lanes& lanes) {
    lanes.erase(std::find_if(lanes.begin(), lanes.end(), [&](const auto& one) { return one.get() == &lane; }));
  });
  const Lock lock(lanes_mutex_);
  counts_of_ended_ += lane.counts();
  if (lane.is_on_node()) rounds_on_node_of_ended_ += lane.counts().rounds;
}

void Engine::end_lanes(const std::vector<int>& of_ranks) {
  const auto is_of_them = [&](int rank) { return std::find(of_ranks.begin(), of_ranks.end(), rank) != of_ranks.end(); };
  const std::shared_ptr<const Lanes> lanes = this->lanes();  // each one that ends changes them
  for (const auto& lane : *lanes) {
    const std::vector<int>& members = lane->members();
    if (lane != world_lane_ && std::any_of(members.begin(), members.end(), is_of_them)) lane->drain(fabric_.watch());
  }
}

// Ranks have left the job. Process sets that have a lane without them go on, until this rank leaves or another one of
// theirs.
void Engine::end_world(const std::vector<int>& left) {
  left_ = left;
  if (Alarm* alarm = fabric_.alarm()) alarm->leave_out(left);
  fabric_.watch().now_doing("the shutdown");
  gpus_.leave();
  mail_->note_end_of_rounds();
  end_lanes(left);
  for (const int id : sets_.ids())
    if (lane_of(id) == world_lane_) end_set(id, left);
  if (is_leaving_) leave_lanes();
}

void Engine::end_set(int process_set, const std::vector<int>& left) {
  mail_->messages().finish(process_set);
  inbox_.end(process_set, {ErrorKind::shut_down, end_text(left)});
  mail_->call_done();
  sets_.close(process_set);
  if (sets_.is_empty()) end();
}

void Engine::leave_lanes() {
  const std::shared_ptr<const Lanes> lanes = this->lanes();
  for (const auto& lane : *lanes) lane->leave();
}

void Engine::end() {
  has_ended_ = true;
  if (Node* node = fabric_.node()) node->leave();
  mail_->messages().abandon();
  mail_->close();
  is_closed_ = true;
  fabric_.bell().ring_all();  // this may not be the thread on the lookout
}

// `left`: all of a lane that has ended with that of the world, which these ranks have not left first.
std::string Engine::end_text(const std::vector<int>& left) const {
  if (is_leaving_) return "ringtrain was shut down on this rank while the operation was pending";
  const bool has_left = std::find(left.begin(), left.end(), world_.rank) != left.end();
  return names_text(has_left ? left_ : left) +
         " exited early: shutdown() was called there, or the script came to its end. "
         "No operation can complete without it. Do the ranks have different numbers of batches? "
         "In PyTorch put the loop into `with hvd.Join(optimizer):`, elsewhere call hvd.join() after it. "
         "Does each rank stop early by a loss of its own? Decide by the average, hvd.allreduce(loss).";
}

// ------------------------------------------------------------------------------------------------------ when it fails

// By the first thread that meets an error. Those of other lanes then meet this one, each with what it has been carrying
// out.
void Engine::fail(const Error& error) {
  if (!has_failed_.exchange(true)) {
    tell_failure(error);
    mail_->messages().abandon();
    inbox_.close(error);
    gpus_.abort(error);
  } else {
    inbox_.close(error);
  }
  const std::shared_ptr<const Lanes> lanes = this->lanes();
  for (const auto& lane : *lanes) lane->close();
  mail_->close();
  is_closed_ = true;
  fabric_.bell().ring_all();  // this may not be the thread on the lookout
}

void Engine::tell_failure(const Error& error) {
  const ErrorKind kind = error.kind();
  const std::string message = error.what();
  has_ended_ = true;
  fabric_.own_failure().set(error);
  if (kind == ErrorKind::failure)
    fabric_.say_last_words(ErrorKind::remote, to_string(world_.names[world_.rank]) + " failed: " + message);
  else
    fabric_.say_last_words(kind, message);
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
std::weak_ptr<Engine>& last_engine GUARDED_BY(mutex) = *new std::weak_ptr<Engine>;  // before that one
// Of all Engines of this process.
std::shared_ptr<Resources>& resources GUARDED_BY(mutex) = *new std::shared_ptr<Resources>;
bool is_forked_child GUARDED_BY(mutex) = false;  // of a process that had an Engine then
// What ended the last Engine; empty: there was none.
std::string& ended_by GUARDED_BY(mutex) = *new std::string;

std::shared_ptr<Engine> exchange_engine(std::shared_ptr<Engine> next) {
  const Lock lock(mutex);
  if (engine) last_engine = engine;
  return std::exchange(engine, std::move(next));
}

// No other thread holds the mutex at a fork. The child's copy of the Engine lacks its thread, and is left alone,
// as is what its parent's Engines share.
[[maybe_unused]] const int registered =
    pthread_atfork([]() ACQUIRE(mutex) { mutex.lock(); }, []() RELEASE(mutex) { mutex.unlock(); },
                   []() RELEASE(mutex) {
                     is_forked_child |= engine != nullptr;
                     engine.reset();
                     last_engine.reset();
                     resources.reset();
                     mutex.unlock();
                   });

}  // namespace

std::shared_ptr<Engine> current_engine() {
  const Lock lock(mutex);
  return engine;
}

std::shared_ptr<Engine> current_or_leaving_engine() {
  const Lock lock(mutex);
  return engine ? engine : last_engine.lock();
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
