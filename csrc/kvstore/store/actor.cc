#include "kvstore/store/actor.h"

#include <cstring>
#include <limits>
#include <utility>

#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace ringtrain {
namespace {

// Calls visit(range) for each of the ranges; null: for all elements of a chunk of so many.
template <typename Visit>
void for_ranges(const ElementRanges* ranges, uint32_t count, Visit visit) {
  if (!ranges) return visit(ElementRange{0, count});
  for (const ElementRange& range : *ranges) visit(range);
}

size_t up_to_line(size_t bytes) {
  constexpr size_t kLine = 64;
  return (bytes + kLine - 1) / kLine * kLine;
}

}  // namespace

SlotPool::SlotPool(Part& part, size_t worker, const std::vector<Open>& open)
    : part_(part), worker_(worker), open_(open.begin(), open.end()) {
  part.memory().reserve(part.layout().slot_control_at(worker, 1), part.layout().slot_control_bytes());
  std::vector<bool> is_used(part.layout().slots() + 1);
  for (const Open& one : open) is_used[one.slot] = true;
  for (uint32_t slot = part.layout().slots(); slot > 0; --slot)
    if (!is_used[slot]) free_.push_back(slot);
}

uint32_t SlotPool::take() {
  constexpr uint32_t kAtOnce = 16;
  look();
  if (free_.empty()) return kNoSlot;
  const uint32_t slot = free_.back();
  if (slot > reserved_) {
    const uint32_t last = std::min(slot + kAtOnce - 1, part_.layout().slots());
    const size_t begin = part_.layout().slot_at(worker_, reserved_ + 1);
    part_.memory().reserve(begin, part_.layout().slot_at(worker_, last) + part_.layout().chunk_bytes() - begin);
    reserved_ = last;
  }
  free_.pop_back();
  return slot;
}

// The first ones close first, more or less.
void SlotPool::look() {
  constexpr size_t kAhead = 64;
  for (size_t i = 0; i < std::min(open_.size(), kAhead);) {
    const Open& one = open_[i];
    if (part_.record(one.chunk).closed.load(std::memory_order_acquire) < one.round) {
      ++i;
      continue;
    }
    free_.push_back(one.slot);
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void throw_busy(Part& part, size_t chunk, double timeout_s) {
  const int holder = part.holder(chunk);
  throw Error(ErrorKind::stalled, (holder < 0 ? std::string("the server") : "worker " + std::to_string(holder)) +
                                      " has been in the middle of an update for " + std::to_string(timeout_s) +
                                      " s: is its process stopped, by SIGSTOP or a debugger?");
}

Actor::Actor(std::shared_ptr<Part> part, uint32_t number, double timeout_s, uint32_t term)
    : part_(std::move(part)),
      number_(number),
      term_(term),
      timeout_s_(timeout_s),
      own_(new char[part_->layout().chunk_bytes()]),
      sum_(new char[part_->layout().chunk_bytes()]) {
  put_in_order(timeout_s);
}

// Frees the journals of dead processes, so that there are always enough: the next holder of a chunk does so.
void Actor::put_in_order(double timeout_s) {
  for (uint32_t i = 0; i < part_->layout().journals(); ++i)
    if (const uint32_t chunk = part_->journal_place(i).chunk.load())
      if (chunk <= part_->chunk_count()) const HeldChunk held(*part_, chunk - 1, number_);
  const bool has_slots = part_->spec().is_synchronous && !is_server();
  if (!has_slots) return;
  std::vector<SlotPool::Open> open;
  visit_all(*part_, 0, part_->chunk_count(), timeout_s, [&](size_t chunk) {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return false;
    const WorkerRecord& own = part_->worker(chunk, number_);
    for (uint32_t slot = own.first_slot; slot != kNoSlot; slot = part_->slot(number_, slot).next)
      open.push_back({chunk, slot, part_->slot(number_, slot).seq + own.offset});
    return true;
  });
  slots_ = std::make_unique<SlotPool>(*part_, number_, open);
}

void Actor::require_term() const {
  if (is_server() || part_->first_term(number_) <= term_) return;
  throw expelled(number_);
}

Error lacking(const std::string& what, bool is_recovery) {
  if (!is_recovery) return failure("this server has no such " + what);
  return Error(ErrorKind::peer_lost,
               "this server has no such " + what +
                   ": it has taken the place of a lost one, and the snapshot or the memory that it goes on with is "
                   "older (kv_snapshot_s)");
}

Error expelled(uint32_t worker) {
  return Error(ErrorKind::peer_lost,
               "worker " + std::to_string(worker) +
                   " was expelled from its job, after a silence (kv_timeout_s) or because another "
                   "process has taken its place: its changes are refused; start it again");
}

Outcome Actor::push(size_t chunk, uint64_t seq, const Source& source, const Rates& rates, Answer* answer,
                    bool has_begun) {
  if (source.ranges && part_->spec().is_synchronous)
    return push(chunk, seq, spread(part_->chunk(chunk), source), rates, answer, has_begun);
  Outcome outcome;
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return Outcome::busy;
    if (!has_begun) require_term();
    const uint64_t before = part_->worker(chunk, number_).pushes;
    if (seq <= before)
      outcome = Outcome::duplicate;
    else if (seq != before + 1)
      return Outcome::early;
    else
      outcome = part_->spec().is_synchronous ? push_in_round(chunk, seq, source, rates)
                                             : push_at_once(chunk, number_, seq, source, rates);
    if (answer && outcome != Outcome::full && is_ready(chunk, seq)) answer_from(chunk, *answer);
  }
  if (outcome == Outcome::applied && waits_for_others()) part_->ring();
  return outcome;
}

Outcome Actor::push_at_once(size_t chunk, size_t worker, uint64_t seq, const Source& source, const Rates& rates) {
  const KeyChunk& place = part_->chunk(chunk);
  const UpdateRule& rule = required_rule(chunk);
  if (rule.is_program()) return leave(chunk, worker, seq, source.ranges ? spread(place, source) : source);
  const void* const gradient = widened(place, source);
  ChunkChange change(*part_, chunk, number_, arrays_of(place, &rule), {worker, 1});
  apply(change, chunk, rule, source.ranges, gradient, rates);
  part_->worker(chunk, worker).pushes = seq;
  change.commit(1);
  return Outcome::applied;
}

Outcome Actor::push_in_round(size_t chunk, uint64_t seq, const Source& source, const Rates& rates) {
  const uint64_t closed = part_->record(chunk).closed.load(std::memory_order_relaxed);
  WorkerRecord& record = part_->worker(chunk, number_);
  if (record.first_slot == kNoSlot) record.offset = closed - record.pushes;  // rounds may have passed it
  const uint64_t round = seq + record.offset;
  Contribution own = {nullptr, rates};
  if (is_of_program(chunk)) {
    const Outcome outcome = deposit(chunk, seq, source, rates);
    return outcome == Outcome::held && has_gradient(chunk) ? Outcome::left : outcome;
  }
  if (round != closed + 1 || !can_close(chunk, &own)) return deposit(chunk, seq, source, rates);
  own.values = widened(part_->chunk(chunk), source);
  close(chunk, seq, &own);
  return Outcome::applied;
}

Outcome Actor::deposit(size_t chunk, uint64_t seq, const Source& source, const Rates& rates) {
  const uint32_t slot = slots_->take();
  if (slot == kNoSlot) return Outcome::full;
  const KeyChunk& place = part_->chunk(chunk);
  if (source.quantizer.kind == Quantizer::Kind::none)
    convert(source.values, source.dtype, part_->slot_data(number_, slot), wide(place.dtype), place.count);
  else
    copy(part_->slot_data(number_, slot), widened(place, source), place.wide_bytes());
  SlotRecord& record = part_->slot(number_, slot);
  record = {seq, rates.lr, rates.wd, kNoSlot, 0};
  WorkerRecord& own = part_->worker(chunk, number_);
  ChunkChange change(*part_, chunk, number_, 0, {number_, 1});
  if (own.first_slot == kNoSlot)
    own.first_slot = slot;
  else
    part_->slot(number_, own.last_slot).next = slot;
  own.last_slot = slot;
  own.pushes = seq;
  change.commit(0);
  slots_->note_open({chunk, slot, seq + own.offset});
  return Outcome::held;
}

// Whether everyone whom a round waits for has pushed; `own` is what this actor has not put anywhere yet.
bool Actor::can_close(size_t chunk, const Contribution* own) const {
  bool has_some = own != nullptr;
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    if (own && i == number_) continue;
    const WorkerRecord& worker = part_->worker(chunk, i);
    const bool has_pushed = worker.first_slot != kNoSlot;
    const bool is_passed = worker.passed > part_->record(chunk).closed.load(std::memory_order_relaxed);
    const Presence presence = part_->presence(i).load(std::memory_order_seq_cst);
    const bool is_awaited = !is_passed && (presence == Presence::here || presence == Presence::gone);
    if (!has_pushed && is_awaited) return false;
    has_some = has_some || has_pushed;
  }
  return has_some;
}

// In the order of the workers.
std::vector<Actor::Contribution> Actor::contributions(size_t chunk, const Contribution* own) {
  std::vector<Contribution> all;
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    const uint32_t slot = part_->worker(chunk, i).first_slot;
    if (own && i == number_)
      all.push_back(*own);
    else if (slot != kNoSlot)
      all.push_back({part_->slot_data(i, slot), {part_->slot(i, slot).lr, part_->slot(i, slot).wd}});
  }
  return all;
}

const void* Actor::sum_of(size_t chunk, const std::vector<Contribution>& all) {
  if (all.size() == 1) return all.front().values;
  const KeyChunk& place = part_->chunk(chunk);
  std::vector<const void*> sources;
  for (const Contribution& one : all) sources.push_back(one.values);
  void* sum = sum_.get();
  reduce({wide(place.dtype), Reduce::sum, 1.0}, &sum, 1, sources.data(), static_cast<int>(sources.size()), place.count);
  return sum;
}

// Those that were in the round. `own` was in none.
void Actor::let_slots_go(size_t chunk, const Contribution* own) {
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    WorkerRecord& worker = part_->worker(chunk, i);
    if (worker.first_slot == kNoSlot || (own && i == number_)) continue;
    worker.first_slot = part_->slot(i, worker.first_slot).next;
    if (worker.first_slot == kNoSlot) worker.last_slot = kNoSlot;
  }
}

// From the first to the last worker that has something in the round that is closed.
ChunkChange::Workers Actor::in_round(size_t chunk, const Contribution* own) const {
  size_t first = part_->layout().capacity(), last = 0;
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    if (part_->worker(chunk, i).first_slot == kNoSlot && !(own && i == number_)) continue;
    first = std::min(first, i);
    last = i + 1;
  }
  return {first, last - std::min(first, last)};
}

void Actor::close(size_t chunk, uint64_t seq, const Contribution* own) {
  const KeyChunk& place = part_->chunk(chunk);
  const UpdateRule* rule = rule_of(chunk);
  const std::vector<Contribution> all = contributions(chunk, own);
  const void* total = sum_of(chunk, all);
  ChunkChange change(*part_, chunk, number_, arrays_of(place, rule), in_round(chunk, own));
  if (rule)
    apply(change, chunk, *rule, nullptr, total, all.front().rates);
  else
    store(change, chunk, total);
  let_slots_go(chunk, own);
  if (own) part_->worker(chunk, number_).pushes = seq;
  change.commit(1);
}

Reading Actor::read(size_t chunk, uint64_t pushes, Answer& answer) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return Reading::busy;
  if (!is_ready(chunk, pushes)) return Reading::not_yet;
  answer_from(chunk, answer);
  return Reading::done;
}

bool Actor::is_ready(size_t chunk, uint64_t pushes) const {
  if (is_server()) return true;
  const WorkerRecord& own = part_->worker(chunk, number_);
  const ChunkRecord& record = part_->record(chunk);
  if (part_->spec().is_synchronous)
    return pushes == 0 ||
           (own.pushes >= pushes && record.closed.load(std::memory_order_relaxed) >= pushes + own.offset);
  if (own.pushes < pushes || record.pending == number_ + 1) return false;
  if (part_->spec().max_staleness == PartSpec::kNoBound) return true;
  const uint64_t bound = static_cast<uint64_t>(part_->spec().max_staleness);
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    const uint64_t position = part_->worker(chunk, i).position();
    if (position + bound < own.pushes + own.offset && bounds_others(i)) return false;
  }
  return true;
}

// Whether staleness has others wait for this worker. One that came back waits for the others, and they do not wait for
// it: servers and chunks have let it in at different pushes of the others, so that it may be ahead of a worker in one
// chunk and behind it in another one, and each would wait for the other.
bool Actor::bounds_others(size_t worker) const {
  return part_->presence(worker).load(std::memory_order_seq_cst) == Presence::here && part_->first_term(worker) == 0;
}

bool Actor::may_be_ready(size_t chunk, uint64_t pushes) const {
  return !part_->spec().is_synchronous || is_ready(chunk, pushes);
}

std::vector<size_t> Actor::awaited(size_t chunk, uint64_t pushes) const {
  if (!waits_for_others()) return {};
  const uint64_t ahead = part_->spec().is_synchronous ? 0 : static_cast<uint64_t>(part_->spec().max_staleness);
  const uint64_t wanted = pushes + part_->worker(chunk, number_).offset;
  std::vector<size_t> workers;
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    const WorkerRecord& other = part_->worker(chunk, i);
    const Presence presence = part_->presence(i).load(std::memory_order_seq_cst);
    const bool is_awaited =
        part_->spec().is_synchronous ? presence == Presence::here || presence == Presence::gone : bounds_others(i);
    if (i != number_ && is_awaited && other.position() + ahead < wanted) workers.push_back(i);
  }
  return workers;
}

std::string Actor::missing(size_t chunk, uint64_t pushes) const {
  if (!waits_for_others()) return "the server has not come to it";
  std::string text;
  for (const size_t i : awaited(chunk, pushes))
    text +=
        "worker " + std::to_string(i) + " has pushed it " + std::to_string(part_->worker(chunk, i).pushes) + " times, ";
  return text + "worker " + std::to_string(number_) + " " + std::to_string(pushes) + " times";
}

size_t Actor::held() {
  if (!slots_) return 0;
  slots_->look();
  return slots_->open();
}

void Actor::answer_from(size_t chunk, Answer& answer) {
  const KeyChunk& place = part_->chunk(chunk);
  char* to = static_cast<char*>(answer.place);
  for_ranges(answer.ranges, place.count, [&](const ElementRange& range) {
    convert(part_->value(chunk) + range.begin * size_of(place.dtype), place.dtype, to, answer.dtype, range.count);
    to += range.count * size_of(answer.dtype);
  });
  answer.num_update = num_update(chunk);
  answer.is_there = true;
}

const void* Actor::widened(const KeyChunk& chunk, const Source& source) {
  if (source.quantizer.kind != Quantizer::Kind::none) {
    if (chunk.dtype != DType::float32) throw invalid("codes are for float32 keys only");
    dequantize(source.quantizer, static_cast<const uint8_t*>(source.values), reinterpret_cast<float*>(own_.get()),
               chunk.count);
    return own_.get();
  }
  if (source.dtype == wide(chunk.dtype)) return source.values;
  const size_t count = source.ranges ? count_of(*source.ranges) : chunk.count;
  convert(source.values, source.dtype, own_.get(), wide(chunk.dtype), count);
  return own_.get();
}

const UpdateRule* Actor::rule_of(size_t chunk) {
  const uint32_t number = part_->record(chunk).rule;
  if (number != rule_number_) {
    rule_ = part_->rule(number);
    rule_number_ = number;
  }
  return rule_.get();
}

const UpdateRule& Actor::required_rule(size_t chunk) {
  if (const UpdateRule* const rule = rule_of(chunk)) return *rule;
  if (part_->header().is_recovery.load()) throw lacking("optimizer", true);
  throw invalid("an asynchronous store without an optimizer would replace weights by gradients");
}

uint32_t Actor::arrays_of(const KeyChunk& chunk, const UpdateRule* rule) const {
  uint32_t arrays = kValue;
  if (rule) arrays |= ((1u << rule->state_names().size()) - 1) * kFirstState | (is_half(chunk.dtype) ? kMaster : 0);
  return arrays;
}

void Actor::apply(ChunkChange& change, size_t chunk, const UpdateRule& rule, const ElementRanges* ranges,
                  const void* gradient, const Rates& rates) {
  const KeyChunk& place = part_->chunk(chunk);
  const bool has_master = is_half(place.dtype);
  const size_t bytes = size_of(wide(place.dtype));
  const UpdateRule::Step step = {static_cast<int64_t>(++part_->record(chunk).updates), rates.lr, rates.wd};
  if (ranges) change.copy_arrays();
  const char* grad = static_cast<const char*>(gradient);
  for_ranges(ranges, place.count, [&](const ElementRange& range) {
    const size_t begin = range.begin * bytes;
    UpdateRule::Arrays arrays;
    arrays.dtype = wide(place.dtype);
    arrays.weight = part_->array(has_master ? 1 : 0, chunk) + begin;
    arrays.new_weight = change.to(has_master ? 1 : 0) + begin;
    arrays.grad = grad;
    arrays.count = range.count;
    for (size_t i = 2; i < 2 + rule.state_names().size(); ++i) {
      arrays.states.push_back(part_->array(i, chunk) + begin);
      arrays.new_states.push_back(change.to(i) + begin);
    }
    rule.update(arrays, step);
    if (has_master) {
      char* const value = change.to(0) + range.begin * size_of(place.dtype);
      convert(arrays.new_weight, DType::float32, value, place.dtype, range.count);
    }
    grad += range.count * bytes;
  });
}

void Actor::store(ChunkChange& change, size_t chunk, const void* wide_values) {
  const KeyChunk& place = part_->chunk(chunk);
  convert(wide_values, wide(place.dtype), change.to(0), place.dtype, place.count);
}

bool Actor::was_carried_out(size_t chunk, uint64_t change) const {
  require_term();
  return change != 0 && change_number(term_, change) <= part_->worker(chunk, number_).change;
}

template <typename Write>
bool Actor::change_once(size_t chunk, uint32_t arrays, uint64_t change, Write write) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  if (was_carried_out(chunk, change)) return true;
  ChunkChange whole(*part_, chunk, number_, arrays, {number_, change != 0});
  write(whole);
  if (change != 0) part_->worker(chunk, number_).change = change_number(term_, change);
  whole.commit(0);
  return true;
}

bool Actor::assign(size_t chunk, const void* values, uint64_t change) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  if (was_carried_out(chunk, change)) return true;
  const KeyChunk& place = part_->chunk(chunk);
  const bool has_master = is_half(place.dtype) && rule_of(chunk);
  ChunkChange whole(*part_, chunk, number_, kValue | (has_master ? kMaster : 0), {number_, change != 0});
  copy(whole.to(0), values, place.value_bytes());
  if (has_master) convert(values, place.dtype, whole.to(1), DType::float32, place.count);
  if (change != 0) part_->worker(chunk, number_).change = change_number(term_, change);
  whole.commit(0);
  return true;
}

bool Actor::settle(size_t chunk) {
  bool has_closed = false;
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return false;
    has_closed = close_all(chunk);
  }
  if (has_closed) part_->ring();
  return true;
}

bool Actor::close_all(size_t chunk) {
  bool has_closed = false;
  for (; !is_of_program(chunk) && can_close(chunk, nullptr); has_closed = true) close(chunk, 0, nullptr);
  return has_closed;
}

bool Actor::let_pass(size_t chunk, size_t worker) {
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return false;
    WorkerRecord& record = part_->worker(chunk, worker);
    const uint64_t position = position_to_pass(chunk, worker);
    if (position <= record.position()) return false;
    ChunkChange change(*part_, chunk, number_, 0, {worker, 1});
    record.passed = position;
    change.commit(0);
    if (part_->spec().is_synchronous) close_all(chunk);
  }
  part_->ring();
  return true;
}

// The round that is open, if another worker has pushed into it; or as far behind the first of the others as the bound
// allows. 0: nobody waits for it.
uint64_t Actor::position_to_pass(size_t chunk, size_t worker) const {
  uint64_t most = 0;
  bool is_open = false;
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    const WorkerRecord& other = part_->worker(chunk, i);
    if (i == worker || part_->presence(i).load(std::memory_order_seq_cst) != Presence::here) continue;
    most = std::max(most, other.position());
    is_open = is_open || other.first_slot != kNoSlot;
  }
  if (part_->spec().is_synchronous)
    return is_open ? part_->record(chunk).closed.load(std::memory_order_relaxed) + 1 : 0;
  const auto bound = static_cast<uint64_t>(part_->spec().max_staleness);
  return most > bound ? most - bound : 0;
}

bool Actor::let_in(size_t chunk, size_t worker) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  const uint64_t others = position_for(chunk, worker);
  WorkerRecord& record = part_->worker(chunk, worker);
  ChunkChange change(*part_, chunk, number_, 0, {worker, 1});
  if (record.pushes + record.offset < others) record.offset = others - record.pushes;
  change.commit(0);
  return true;
}

// Where a worker begins: in the round that is open, or beside the last of those that bound the others. Where there are
// none, such as after a join, beside the first of all workers: the others are let in after it, beside it.
uint64_t Actor::position_for(size_t chunk, size_t worker) const {
  if (part_->spec().is_synchronous) return part_->record(chunk).closed.load(std::memory_order_relaxed);
  uint64_t fewest = std::numeric_limits<uint64_t>::max(), most = 0;
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    const uint64_t position = part_->worker(chunk, i).position();
    most = std::max(most, position);
    if (i != worker && bounds_others(i)) fewest = std::min(fewest, position);
  }
  return fewest < std::numeric_limits<uint64_t>::max() ? fewest : most;
}

bool Actor::count_anew(size_t chunk, size_t worker, uint32_t term) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  WorkerRecord& record = part_->worker(chunk, worker);
  if (record.term >= term) return true;
  ChunkChange change(*part_, chunk, number_, 0, {worker, 1});
  record.offset += std::exchange(record.pushes, 0);
  record.term = term;
  change.commit(0);
  return true;
}

bool Actor::take_rule(size_t chunk, uint32_t rule, uint64_t num_update) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  ChunkRecord& record = part_->record(chunk);
  const KeyChunk& place = part_->chunk(chunk);
  const std::shared_ptr<const UpdateRule> next = part_->rule(rule);
  ChunkChange change(*part_, chunk, number_, next ? arrays_of(place, next.get()) & ~kValue : 0, {0, 0});
  record.rule = rule;
  record.updates = num_update;
  record.pending = 0;
  for (size_t i = 0; next && i < next->state_names().size(); ++i) std::memset(change.to(2 + i), 0, place.wide_bytes());
  if (next && is_half(place.dtype))
    convert(part_->value(chunk), place.dtype, change.to(1), DType::float32, place.count);
  change.commit(0);
  return true;
}

bool Actor::take_numbers(size_t chunk, uint32_t rule) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  ChunkChange change(*part_, chunk, number_, 0, {0, 0});
  part_->record(chunk).rule = rule;
  change.commit(0);
  return true;
}

bool Actor::read_array(size_t chunk, size_t array, void* place) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  copy(place, part_->array(array, chunk), part_->chunk(chunk).bytes_of(array));
  return true;
}

bool Actor::write_array(size_t chunk, size_t array, const void* values, uint64_t change) {
  return change_once(chunk, 1u << array, change,
                     [&](ChunkChange& whole) { copy(whole.to(array), values, part_->chunk(chunk).bytes_of(array)); });
}

bool Actor::set_num_update(size_t chunk, uint64_t num_update, uint64_t change) {
  return change_once(chunk, 0, change, [&](ChunkChange&) { part_->record(chunk).updates = num_update; });
}

uint64_t Actor::fewest_pushes(size_t piece, size_t worker) const {
  uint64_t fewest = 0;
  for (size_t i = part_->layout().first_chunk(piece); i < part_->layout().first_chunk(piece + 1); ++i)
    fewest = i == part_->layout().first_chunk(piece) ? pushes_of(i, worker) : std::min(fewest, pushes_of(i, worker));
  return fewest;
}

// All of the chunk: zeros where nothing is pushed.
Source Actor::spread(const KeyChunk& chunk, const Source& source) {
  if (!spread_) spread_.reset(new char[part_->layout().chunk_bytes()]);
  std::memset(spread_.get(), 0, chunk.wide_bytes());
  const char* from = static_cast<const char*>(source.values);
  const DType dtype = wide(chunk.dtype);
  for (const ElementRange& range : *source.ranges) {
    convert(from, source.dtype, spread_.get() + range.begin * size_of(dtype), dtype, range.count);
    from += range.count * size_of(source.dtype);
  }
  return {spread_.get(), dtype, {}};
}

// Pushes of several chunks, which are to be whole also if their process dies between two of them.

// A process of an earlier term holds it for a moment, unless it was stopped. A server that lets this process in has
// waited for that.
std::unique_ptr<HeldStage> Actor::hold_stage() const {
  for (const double end = now_s() + timeout_s_; now_s() < end; Waiter::nap(0))
    if (auto held = std::make_unique<HeldStage>(*part_, number_); *held) return held;
  throw Error(ErrorKind::stalled, "a process before this one has been in the middle of a push of worker " +
                                      std::to_string(number_) + " for " + std::to_string(timeout_s_) +
                                      " s: is it stopped, by SIGSTOP or a debugger?");
}

template <typename Next>
void Actor::advance_stage(Next next) {
  std::atomic<uint64_t>& word = part_->stage(number_).state;
  StageState state = {word.load()};
  do {
    if (state.is_closed_to(term_)) throw expelled(number_);
  } while (!word.compare_exchange_weak(state.word, next(state).word));
}

void Actor::stage(size_t piece, uint64_t seq, const Source& source, const Rates& rates,
                  const std::vector<const ElementRanges*>& ranges) {
  const Layout& layout = part_->layout();
  const auto held = hold_stage();
  // Read before the term is checked: a later process has raised that before its pushes are counted.
  const uint64_t term = part_->worker(layout.first_chunk(piece), number_).term;
  std::atomic_thread_fence(std::memory_order_acquire);
  require_term();
  size_t count = ranges.empty() ? part_->spec().pieces[piece].count : 0, all_ranges = 0;
  for (const ElementRanges* const of_chunk : ranges) {
    count += count_of(*of_chunk);
    all_ranges += of_chunk->size();
  }
  const size_t before =
      ranges.empty() ? 0 : up_to_line(ranges.size() * sizeof(uint32_t) + all_ranges * sizeof(ElementRange));
  const size_t value_bytes = source.quantizer.kind == Quantizer::Kind::none
                                 ? count * size_of(source.dtype)
                                 : quantized_bytes(source.quantizer.kind, count);
  if (staged_bytes_ < before + value_bytes) {
    part_->memory().reserve(layout.stage_at(number_), before + value_bytes);
    staged_bytes_ = before + value_bytes;
  }
  StageRecord& record = part_->stage(number_);
  advance_stage([](const StageState& state) { return state.begun(); });
  std::atomic_thread_fence(std::memory_order_seq_cst);
  char* place = part_->stage_data(number_);
  for (const ElementRanges* const of_chunk : ranges) {
    const auto of_it = static_cast<uint32_t>(of_chunk->size());
    std::memcpy(place, &of_it, sizeof(of_it));
    place += sizeof(of_it);
  }
  for (const ElementRanges* const of_chunk : ranges) {
    std::memcpy(place, of_chunk->data(), of_chunk->size() * sizeof(ElementRange));
    place += of_chunk->size() * sizeof(ElementRange);
  }
  copy(part_->stage_data(number_) + before, source.values, value_bytes);
  record.seq = seq;
  record.term = term;
  record.piece = static_cast<uint32_t>(piece);
  record.dtype = static_cast<uint32_t>(source.dtype);
  record.codes = static_cast<uint32_t>(source.quantizer.kind);
  record.threshold = source.quantizer.threshold;
  record.ranges_before = before;
  record.value_bytes = value_bytes;
  record.lr = rates.lr;
  record.wd = rates.wd;
}

void Actor::publish() {
  advance_stage([](const StageState& state) { return state.published(); });
}

bool Actor::finish_push_of(size_t worker) {
  const Layout& layout = part_->layout();
  if (layout.stage_bytes() == 0 || worker >= layout.capacity()) return true;
  const HeldStage held(*part_, worker);
  if (!held) return false;
  const StageRecord& record = part_->stage(worker);
  const StageState state = {record.state.load()};
  const uint32_t piece = record.piece;
  const bool has_ranges = record.ranges_before > 0;
  if (!state.is_published() || piece >= part_->spec().pieces.size()) return true;
  bool is_done = true;
  const size_t first = layout.first_chunk(piece), last = layout.first_chunk(piece + 1);
  size_t begin = 0, next_ranges = (last - first) * sizeof(uint32_t);
  for (size_t chunk = first; chunk < last; ++chunk) {
    ElementRanges ranges;
    if (has_ranges) ranges = staged_ranges(worker, chunk - first, next_ranges);
    // A push that was refused is refused again, for each chunk: nothing of it counts.
    error_of([&] {
      is_done = finish_chunk_of(worker, chunk, state.version(), has_ranges ? &ranges : nullptr, begin) && is_done;
    });
    begin += has_ranges ? count_of(ranges) : part_->chunk(chunk).count;
  }
  part_->ring();
  return is_done;
}

// Returns those of one chunk, which begin at byte `next`, and moves `next` behind them.
ElementRanges Actor::staged_ranges(size_t worker, size_t place, size_t& next) const {
  const char* const stage = part_->stage_data(worker);
  uint32_t count = 0;
  std::memcpy(&count, stage + place * sizeof(count), sizeof(count));
  const size_t bytes = count * sizeof(ElementRange), there = part_->layout().stage_bytes();
  if (next > there || bytes > there - next) return {};
  ElementRanges ranges(count);
  if (count > 0) std::memcpy(ranges.data(), stage + next, bytes);
  next += bytes;
  return ranges;
}

// `begin`: where the elements of the chunk begin among the values.
bool Actor::finish_chunk_of(size_t worker, size_t chunk, uint64_t version, const ElementRanges* ranges, size_t begin) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  const StageRecord& record = part_->stage(worker);
  const WorkerRecord& of_worker = part_->worker(chunk, worker);
  if (of_worker.pushes + 1 != record.seq || of_worker.term != record.term) return true;
  const auto dtype = static_cast<DType>(record.dtype);
  const Quantizer quantizer = {static_cast<Quantizer::Kind>(record.codes), record.threshold};
  const uint64_t seq = record.seq;
  const Rates rates = {record.lr, record.wd};
  const size_t count = ranges ? count_of(*ranges) : part_->chunk(chunk).count;
  const auto bytes_of = [&](size_t elements) {
    return quantizer.kind == Quantizer::Kind::none ? elements * size_of(dtype)
                                                   : quantized_bytes(quantizer.kind, elements);
  };
  const size_t from = record.ranges_before + bytes_of(begin);
  if (bytes_of(count) > part_->layout().chunk_bytes() || from + bytes_of(count) > part_->layout().stage_bytes())
    return true;
  std::memcpy(sum_.get(), part_->stage_data(worker) + from, bytes_of(count));
  std::atomic_thread_fence(std::memory_order_acquire);
  if (StageState{record.state.load()}.version() != version) return true;
  return push_at_once(chunk, worker, seq, {sum_.get(), dtype, quantizer, ranges}, rates) != Outcome::full;
}

bool Actor::push_for(size_t worker, size_t chunk, uint64_t seq, const Source& source, const Rates& rates) {
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return false;
    if (part_->worker(chunk, worker).pushes + 1 != seq) return true;
    if (push_at_once(chunk, worker, seq, source, rates) == Outcome::full) return false;
  }
  part_->ring();
  return true;
}

// Chunks whose values a program of the server updates: workers leave gradients, and the server takes them.

bool Actor::is_of_program(size_t chunk) {
  const UpdateRule* const rule = rule_of(chunk);
  return rule && rule->is_program();
}

bool Actor::has_gradient(size_t chunk) const {
  return part_->spec().is_synchronous ? can_close(chunk, nullptr) : part_->record(chunk).pending != 0;
}

// One at a time: who comes before the program has taken that has to come again.
Outcome Actor::leave(size_t chunk, size_t worker, uint64_t seq, const Source& source) {
  ChunkRecord& record = part_->record(chunk);
  if (record.pending != 0) return Outcome::full;
  const KeyChunk& place = part_->chunk(chunk);
  // until it is pending it is nobody's, so no journal has to keep what was there
  std::memcpy(part_->state(0, chunk), widened(place, source), place.wide_bytes());
  ChunkChange change(*part_, chunk, number_, 0, {worker, 1});
  part_->worker(chunk, worker).pushes = seq;
  record.pending = static_cast<uint32_t>(worker) + 1;
  change.commit(0);
  return Outcome::left;
}

Reading Actor::take(size_t chunk, void* gradient, void* weight) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return Reading::busy;
  if (!is_of_program(chunk) || !has_gradient(chunk)) return Reading::not_yet;
  const KeyChunk& place = part_->chunk(chunk);
  const void* const next =
      part_->spec().is_synchronous ? sum_of(chunk, contributions(chunk, nullptr)) : part_->state(0, chunk);
  std::memcpy(gradient, next, place.wide_bytes());
  std::memcpy(weight, is_half(place.dtype) ? part_->master(chunk) : part_->value(chunk), place.wide_bytes());
  return Reading::done;
}

// If there is another rule by now, the gradient has gone with the one before.
bool Actor::finish(size_t chunk, const void* weight) {
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return false;
    if (!is_of_program(chunk) || !has_gradient(chunk)) return true;
    const KeyChunk& place = part_->chunk(chunk);
    const bool has_master = is_half(place.dtype);
    ChunkChange change(*part_, chunk, number_, has_master ? kValue | kMaster : kValue, in_round(chunk, nullptr));
    if (has_master) std::memcpy(change.to(1), weight, place.wide_bytes());
    store(change, chunk, weight);
    ChunkRecord& record = part_->record(chunk);
    ++record.updates;
    record.pending = 0;
    if (part_->spec().is_synchronous) let_slots_go(chunk, nullptr);
    change.commit(1);
  }
  part_->ring();
  return true;
}

}  // namespace ringtrain
