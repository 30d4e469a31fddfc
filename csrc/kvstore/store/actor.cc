#include "kvstore/store/actor.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "kvstore/store/convert.h"

namespace ringtrain {

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
      own_(new char[Layout::kChunkBytes]),
      sum_(new char[Layout::kChunkBytes]) {
  part_->memory().reserve(part_->layout().journal_at(number), part_->layout().journal_header_bytes());
  put_in_order(timeout_s);
}

// What it was changing is put back by who takes the mutex, which must be before its journal is written again.
void Actor::put_in_order(double timeout_s) {
  std::vector<SlotPool::Open> open;
  const bool has_slots = part_->spec().is_synchronous && !is_server();
  visit_all(*part_, 0, part_->chunk_count(), timeout_s, [&](size_t chunk) {
    const bool was_writing = part_->record(chunk).writer.load(std::memory_order_acquire) == number_ + 1;
    if (!was_writing && !has_slots) return true;
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return false;
    if (!has_slots) return true;
    const WorkerRecord& own = part_->worker(chunk, number_);
    for (uint32_t slot = own.first_slot; slot != kNoSlot; slot = part_->slot(number_, slot).next)
      open.push_back({chunk, slot, part_->slot(number_, slot).seq + own.offset});
    return true;
  });
  if (has_slots) slots_ = std::make_unique<SlotPool>(*part_, number_, open);
}

void Actor::require_term() const {
  if (is_server() || part_->first_term(number_) <= term_) return;
  throw expelled(number_);
}

Error expelled(uint32_t worker) {
  return Error(ErrorKind::peer_lost, "worker " + std::to_string(worker) +
                                         " was expelled from its job after a silence (kv_timeout_s), so its changes "
                                         "are refused; start it again");
}

Outcome Actor::push(size_t chunk, uint64_t seq, const Source& source, const Rates& rates, Answer* answer) {
  Outcome outcome;
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return Outcome::busy;
    require_term();
    const uint64_t before = part_->worker(chunk, number_).pushes;
    if (seq <= before)
      outcome = Outcome::duplicate;
    else if (seq != before + 1)
      return Outcome::early;
    else
      outcome = part_->spec().is_synchronous ? push_in_round(chunk, seq, source, rates)
                                             : push_at_once(chunk, seq, source, rates);
    if (answer && outcome != Outcome::full && is_ready(chunk, seq)) answer_from(chunk, *answer);
  }
  const bool is_awaited = part_->spec().is_synchronous || part_->spec().max_staleness != PartSpec::kNoBound;
  if (outcome == Outcome::applied && is_awaited) part_->ring();
  return outcome;
}

Outcome Actor::push_at_once(size_t chunk, uint64_t seq, const Source& source, const Rates& rates) {
  const UpdateRule* rule = rule_of(chunk);
  if (!rule) throw invalid("an asynchronous store without an optimizer would replace weights by gradients");
  if (rule->is_program()) return leave(chunk, seq, source);
  const void* gradient = widened(part_->chunk(chunk), source);
  ChunkChange change(*part_, chunk, number_, kept(arrays_of(part_->chunk(chunk), rule)));
  apply(chunk, *rule, gradient, rates);
  part_->worker(chunk, number_).pushes = seq;
  change.commit(1);
  return Outcome::applied;
}

Outcome Actor::push_in_round(size_t chunk, uint64_t seq, const Source& source, const Rates& rates) {
  const uint64_t round = seq + part_->worker(chunk, number_).offset;
  Contribution own = {nullptr, rates};
  if (is_of_program(chunk)) {
    const Outcome outcome = deposit(chunk, seq, source, rates);
    return outcome == Outcome::held && has_gradient(chunk) ? Outcome::left : outcome;
  }
  if (round != part_->record(chunk).closed.load(std::memory_order_relaxed) + 1 || !can_close(chunk, &own))
    return deposit(chunk, seq, source, rates);
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
  ChunkChange change(*part_, chunk, number_, 0);
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
    const bool has_pushed = part_->worker(chunk, i).first_slot != kNoSlot;
    const Presence presence = part_->presence(i).load(std::memory_order_seq_cst);
    if (!has_pushed && (presence == Presence::here || presence == Presence::gone)) return false;
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

void Actor::close(size_t chunk, uint64_t seq, const Contribution* own) {
  const KeyChunk& place = part_->chunk(chunk);
  const UpdateRule* rule = rule_of(chunk);
  const std::vector<Contribution> all = contributions(chunk, own);
  const void* total = sum_of(chunk, all);
  ChunkChange change(*part_, chunk, number_, kept(arrays_of(place, rule)));
  if (rule)
    apply(chunk, *rule, total, all.front().rates);
  else
    store(chunk, total);
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
    return pushes == 0 || record.closed.load(std::memory_order_relaxed) >= pushes + own.offset;
  if (own.pushes < pushes || record.pending == number_ + 1) return false;
  if (part_->spec().max_staleness == PartSpec::kNoBound) return true;
  const uint64_t bound = static_cast<uint64_t>(part_->spec().max_staleness);
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    const WorkerRecord& other = part_->worker(chunk, i);
    if (other.pushes + other.offset + bound < own.pushes + own.offset &&
        part_->presence(i).load(std::memory_order_seq_cst) == Presence::here)
      return false;
  }
  return true;
}

bool Actor::may_be_ready(size_t chunk, uint64_t pushes) const {
  return !part_->spec().is_synchronous || is_ready(chunk, pushes);
}

std::string Actor::missing(size_t chunk, uint64_t pushes) const {
  const bool waits_for_others = part_->spec().is_synchronous || part_->spec().max_staleness != PartSpec::kNoBound;
  if (!waits_for_others) return "the server has not come to it";
  const uint64_t ahead = part_->spec().is_synchronous ? 0 : static_cast<uint64_t>(part_->spec().max_staleness);
  const uint64_t wanted = pushes + part_->worker(chunk, number_).offset;
  std::string text;
  for (size_t i = 0; i < part_->layout().capacity(); ++i) {
    const WorkerRecord& other = part_->worker(chunk, i);
    const Presence presence = part_->presence(i).load(std::memory_order_seq_cst);
    const bool is_awaited = presence == Presence::here || (presence == Presence::gone && part_->spec().is_synchronous);
    if (i == number_ || !is_awaited || other.pushes + other.offset + ahead >= wanted) continue;
    text += "worker " + std::to_string(i) + " has pushed it " + std::to_string(other.pushes) + " times, ";
  }
  return text + "worker " + std::to_string(number_) + " " + std::to_string(pushes) + " times";
}

size_t Actor::held() {
  if (!slots_) return 0;
  slots_->look();
  return slots_->open();
}

void Actor::answer_from(size_t chunk, Answer& answer) {
  const KeyChunk& place = part_->chunk(chunk);
  convert(part_->value(chunk), place.dtype, answer.place, answer.dtype, place.count);
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
  convert(source.values, source.dtype, own_.get(), wide(chunk.dtype), chunk.count);
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

uint32_t Actor::arrays_of(const KeyChunk& chunk, const UpdateRule* rule) const {
  uint32_t arrays = kValue;
  if (rule) arrays |= ((1u << rule->state_names().size()) - 1) * kFirstState | (is_half(chunk.dtype) ? kMaster : 0);
  return arrays;
}

uint32_t Actor::kept(uint32_t arrays) {
  // Only a process that dies in the middle leaves them half changed, and these die with it.
  if (!part_->memory().is_shared()) return 0;
  for (size_t i = 0; i < Layout::kArrays; ++i)
    if ((arrays & ~reserved_arrays_) >> i & 1)
      part_->memory().reserve(part_->layout().journal_array_at(number_, i), Layout::kChunkBytes);
  reserved_arrays_ |= arrays;
  return arrays;
}

void Actor::apply(size_t chunk, const UpdateRule& rule, const void* gradient, const Rates& rates) {
  const KeyChunk& place = part_->chunk(chunk);
  const bool has_master = is_half(place.dtype);
  UpdateRule::Arrays arrays;
  arrays.dtype = wide(place.dtype);
  arrays.weight = has_master ? part_->master(chunk) : part_->value(chunk);
  arrays.grad = gradient;
  arrays.count = place.count;
  for (size_t i = 0; i < rule.state_names().size(); ++i) arrays.states.push_back(part_->state(i, chunk));
  ChunkRecord& record = part_->record(chunk);
  rule.update(arrays, {static_cast<int64_t>(++record.updates), rates.lr, rates.wd});
  if (has_master) convert(part_->master(chunk), DType::float32, part_->value(chunk), place.dtype, place.count);
}

void Actor::store(size_t chunk, const void* wide_values) {
  const KeyChunk& place = part_->chunk(chunk);
  convert(wide_values, wide(place.dtype), part_->value(chunk), place.dtype, place.count);
}

bool Actor::assign(size_t chunk, const void* values) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  require_term();
  const KeyChunk& place = part_->chunk(chunk);
  const bool has_master = is_half(place.dtype) && rule_of(chunk);
  ChunkChange change(*part_, chunk, number_, kept(kValue | (has_master ? kMaster : 0)));
  copy(part_->value(chunk), values, place.value_bytes());
  if (has_master) convert(values, place.dtype, part_->master(chunk), DType::float32, place.count);
  change.commit(0);
  return true;
}

bool Actor::settle(size_t chunk) {
  bool has_closed = false;
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return false;
    for (; !is_of_program(chunk) && can_close(chunk, nullptr); has_closed = true) close(chunk, 0, nullptr);
  }
  if (has_closed) part_->ring();
  return true;
}

bool Actor::let_in(size_t chunk, size_t worker) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  uint64_t others = part_->record(chunk).closed.load(std::memory_order_relaxed);
  if (!part_->spec().is_synchronous) {
    bool is_first = true;
    for (size_t i = 0; i < part_->layout().capacity(); ++i) {
      if (i == worker || part_->presence(i).load(std::memory_order_seq_cst) != Presence::here) continue;
      const WorkerRecord& other = part_->worker(chunk, i);
      others = is_first ? other.pushes + other.offset : std::min(others, other.pushes + other.offset);
      is_first = false;
    }
    if (is_first) others = 0;
  }
  WorkerRecord& record = part_->worker(chunk, worker);
  ChunkChange change(*part_, chunk, number_, 0);
  if (record.pushes + record.offset < others) record.offset = others - record.pushes;
  change.commit(0);
  return true;
}

bool Actor::take_rule(size_t chunk, uint32_t rule, uint64_t num_update) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  ChunkRecord& record = part_->record(chunk);
  const KeyChunk& place = part_->chunk(chunk);
  const std::shared_ptr<const UpdateRule> next = part_->rule(rule);
  ChunkChange change(*part_, chunk, number_, 0);
  record.rule = rule;
  record.updates = num_update;
  record.pending = 0;
  for (size_t i = 0; next && i < next->state_names().size(); ++i)
    std::memset(part_->state(i, chunk), 0, place.wide_bytes());
  if (next && is_half(place.dtype))
    convert(part_->value(chunk), place.dtype, part_->master(chunk), DType::float32, place.count);
  change.commit(0);
  return true;
}

bool Actor::take_numbers(size_t chunk, uint32_t rule) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  ChunkChange change(*part_, chunk, number_, 0);
  part_->record(chunk).rule = rule;
  change.commit(0);
  return true;
}

bool Actor::read_array(size_t chunk, size_t array, void* place) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  const KeyChunk& one = part_->chunk(chunk);
  copy(place, part_->array(array, chunk), array == 0 ? one.value_bytes() : one.wide_bytes());
  return true;
}

bool Actor::write_array(size_t chunk, size_t array, const void* values) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  require_term();
  const KeyChunk& one = part_->chunk(chunk);
  ChunkChange change(*part_, chunk, number_, kept(1u << array));
  copy(part_->array(array, chunk), values, array == 0 ? one.value_bytes() : one.wide_bytes());
  change.commit(0);
  return true;
}

bool Actor::set_num_update(size_t chunk, uint64_t num_update) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return false;
  require_term();
  ChunkChange change(*part_, chunk, number_, 0);
  part_->record(chunk).updates = num_update;
  change.commit(0);
  return true;
}

uint64_t Actor::fewest_pushes(size_t piece, size_t worker) const {
  uint64_t fewest = 0;
  for (size_t i = part_->layout().first_chunk(piece); i < part_->layout().first_chunk(piece + 1); ++i)
    fewest = i == part_->layout().first_chunk(piece) ? pushes_of(i, worker) : std::min(fewest, pushes_of(i, worker));
  return fewest;
}

}  // namespace ringtrain
