#include "kvstore/server/server_stores.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/wait.h"

namespace ringtrain {
namespace {

// How much there is of a chunk, array by array; 0 for those that nobody uses.
std::vector<size_t> array_bytes(Part& part, const KeyChunk& chunk) {
  const auto rule = part.rule(part.header().rule.load());
  std::vector<size_t> bytes = {chunk.value_bytes()};
  if (!rule) return bytes;
  bytes.push_back(is_half(chunk.dtype) ? chunk.wide_bytes() : 0);
  bytes.insert(bytes.end(), rule->state_names().size(), chunk.wide_bytes());
  return bytes;
}

constexpr size_t kCounts = 2, kCountsOfWorker = 4;  // of a chunk

size_t counts_bytes(Part& part) { return (kCounts + kCountsOfWorker * part.layout().capacity()) * sizeof(uint64_t); }

size_t total_bytes(Part& part, size_t number) {
  size_t total = counts_bytes(part);
  for (const size_t bytes : array_bytes(part, part.chunk(number))) total += bytes;
  return total;
}

void copy_counts(Part& part, size_t number, char* place) {
  const ChunkRecord& record = part.record(number);
  std::vector<uint64_t> counts = {record.closed.load(), record.updates};
  for (size_t i = 0; i < part.layout().capacity(); ++i) {
    const WorkerRecord& worker = part.worker(number, i);
    const bool has_open = worker.first_slot != kNoSlot;
    // its gradient is not kept
    const bool is_pending = record.pending == i + 1 && worker.pushes > 0;
    counts.push_back(has_open ? record.closed.load() - worker.offset : worker.pushes - is_pending);
    counts.push_back(worker.offset);
    counts.push_back(worker.term);
    counts.push_back(worker.change);
  }
  std::memcpy(place, counts.data(), counts_bytes(part));
}

void put_counts(Part& part, size_t number, const char* from) {
  std::vector<uint64_t> counts(counts_bytes(part) / sizeof(uint64_t));
  std::memcpy(counts.data(), from, counts_bytes(part));
  ChunkRecord& record = part.record(number);
  record.closed.store(counts[0]);
  record.updates = counts[1];
  for (size_t i = 0; i < part.layout().capacity(); ++i) {
    const uint64_t* const of_worker = &counts[kCounts + kCountsOfWorker * i];
    WorkerRecord& worker = part.worker(number, i);
    worker.pushes = of_worker[0];
    worker.offset = of_worker[1];
    worker.term = of_worker[2];
    worker.change = of_worker[3];
  }
}

// Calls move(place in the Part, bytes) for each array in use.
template <typename Move>
void for_arrays(Part& part, size_t number, Move move) {
  const std::vector<size_t> bytes = array_bytes(part, part.chunk(number));
  for (size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] > 0) move(part.array(i, number), bytes[i]);
}

// Returns chunks [first, last) as bytes, each as it is between two changes: counts, values and states. Pushes of open
// rounds are not among them. `actor`: the server's. Throws stalled where another process keeps a chunk.
Bytes copy_chunks(Actor& actor, size_t first, size_t last, double timeout_s) {
  Part& part = actor.part();
  last = std::min(last, part.chunk_count());
  std::vector<size_t> begins;
  size_t total = 0;
  for (size_t i = first; i < last; ++i) {
    begins.push_back(total);
    total += total_bytes(part, i);
  }
  Bytes bytes(total);
  visit_all(part, first, last, timeout_s, [&](size_t number) {
    const HeldChunk held(part, number, actor.number());
    if (!held) return false;
    char* place = bytes.data() + begins[number - first];
    copy_counts(part, number, place);
    place += counts_bytes(part);
    for_arrays(part, number, [&](const char* array, size_t count) {
      std::memcpy(place, array, count);
      place += count;
    });
    return true;
  });
  return bytes;
}

// Puts them back where the same rule is; returns the number of the next chunk. Throws failure for other bytes.
size_t put_chunks(Actor& actor, size_t first, const Bytes& bytes, double timeout_s) {
  Part& part = actor.part();
  std::vector<size_t> begins;
  size_t total = 0, last = first;
  for (; last < part.chunk_count() && total < bytes.size(); ++last) {
    begins.push_back(total);
    total += total_bytes(part, last);
  }
  if (total != bytes.size()) throw failure("these bytes are not those of chunks of this store with this optimizer");
  visit_all(part, first, last, timeout_s, [&](size_t number) {
    const HeldChunk held(part, number, actor.number());
    if (!held) return false;
    const char* place = bytes.data() + begins[number - first];
    put_counts(part, number, place);
    place += counts_bytes(part);
    for_arrays(part, number, [&](char* array, size_t count) {
      std::memcpy(array, place, count);
      place += count;
    });
    return true;
  });
  return last;
}

// The rule that was added last, for keys that come later.
std::optional<RuleWords> rule_words(Part& part) {
  const uint32_t number = part.header().rule.load(std::memory_order_acquire);
  if (!part.rule(number)) return std::nullopt;
  const RuleRecord& record = part.header().rules[number % PartHeader::kRules];
  RuleWords words;
  words.name = record.name;
  words.form = record.form;
  for (uint32_t i = 0; i < record.count; ++i)
    words.numbers.emplace_back(record.numbers[i].name, record.numbers[i].value);
  return words;
}

constexpr const char* kProgram = "program";

}  // namespace

std::shared_ptr<Part> ServerStores::part(uint32_t store, uint32_t number) const {
  const std::vector<std::shared_ptr<Part>> parts = table_->parts(store);
  return number < parts.size() ? parts[number] : nullptr;
}

Bytes ServerStores::answer(int worker, const Head& question, const Bytes& body) {
  const Lock lock(mutex_);
  if (question.number == 0) return answer_now(worker, question, body);
  Answered& last = answered_[worker];
  if (last.number != question.number) {
    last.body = answer_now(worker, question, body);
    last.number = question.number;
  }
  return last.body;
}

Bytes ServerStores::answer_now(int worker, const Head& question, const Bytes& body) {
  switch (question.said) {
    case Said::create:
      return create(worker, question, body);
    case Said::attach:
      return attach(worker, question);
    case Said::rule:
      set_rule(question.store, words_of<RuleWords>(body));
      return {};
    case Said::join:
      join(stores_[question.store], {static_cast<uint32_t>(worker), words_of<JoinWords>(body).number});
      return {};
    case Said::resume:
      resume(stores_[question.store], words_of<EndedJoins>(body));
      return {};
    default:
      throw failure("a server cannot answer this");
  }
}

Bytes ServerStores::create(int worker, const Head& question, const Bytes& body) {
  Reader reader(body);
  const PartSpec spec = PartSpec::get(reader);
  const auto workers = static_cast<int>(question.chunk);
  if (workers < 0 || workers > spec.capacity)
    throw invalid("a store for " + std::to_string(spec.capacity) + " workers cannot begin with " +
                  std::to_string(workers));
  const Store& store = stores_[question.store];
  if (const auto known = number_of_kept(store, spec))
    return bytes_of(words_of_part(*known, store.actors[*known]->part(), worker));
  Actor& actor = add(question.store, spec, workers);
  for (const auto& [known, term] : first_terms_)
    for (size_t chunk = 0; known < spec.capacity && chunk < actor.part().chunk_count(); ++chunk)
      actor.part().worker(chunk, static_cast<size_t>(known)).term = term;
  for (const int dead : gone_)
    if (dead < workers) actor.part().presence(static_cast<size_t>(dead)).store(Presence::gone);
  for (const auto& [joined, number] : store.joins) set_joined(actor, joined, number);
  if (store.rule) put_rule(actor, *store.rule, false);
  return bytes_of(words_of_part(static_cast<uint32_t>(store.actors.size() - 1), actor.part(), worker));
}

// The server before this one may have made these keys, and died before its answer arrived: the worker asks again.
std::optional<uint32_t> ServerStores::number_of_kept(const Store& store, const PartSpec& spec) {
  const auto bytes = [](const PartSpec& one) {
    Writer writer;
    one.put(writer);
    return writer.take();
  };
  const Bytes wanted = bytes(spec);
  for (size_t i = 0; i < store.kept; ++i)
    if (bytes(store.actors[i]->part().spec()) == wanted) return static_cast<uint32_t>(i);
  return std::nullopt;
}

Actor& ServerStores::add(uint32_t store, const PartSpec& spec, int workers) {
  return keep(store, Part::create(spec, workers, shares_memory_ ? Part::Memory::shared : Part::Memory::of_process));
}

Actor& ServerStores::keep(uint32_t store, const std::shared_ptr<Part>& part) {
  auto actor = std::make_unique<Actor>(part, part->layout().actor_of_server(), timeout_s_);
  part->header().is_recovery.store(is_recovery());
  for (const auto& [worker, term] : first_terms_)
    if (static_cast<size_t>(worker) < part->layout().capacity())
      part->raise_first_term(static_cast<size_t>(worker), term);
  table_->add(store, part);
  auto& actors = stores_[store].actors;
  order_.emplace_back(store, actors.size());
  actors.push_back(std::move(actor));
  return *actors.back();
}

Bytes ServerStores::attach(int worker, const Head& question) {
  Store& store = stores_[question.store];
  size_t pieces = 0;
  for (size_t i = question.part; i < store.actors.size(); ++i) pieces += store.actors[i]->part().spec().pieces.size();
  if (pieces < question.chunk) throw lacking("keys", is_recovery());
  store.joins.erase(static_cast<uint32_t>(worker));
  std::vector<PartWords> words;
  for (size_t i = question.part; i < store.actors.size(); ++i) {
    count_from_term(*store.actors[i], worker);
    set_presence(*store.actors[i], worker, Presence::here);
    words.push_back(words_of_part(static_cast<uint32_t>(i), store.actors[i]->part(), worker));
  }
  return bytes_of(words);
}

// A process that takes the place of a worker counts its pushes from 1 at all servers. They may have counted different
// numbers of pushes of the process before it, which would not count as many of its own. In rounds they take the places
// of those, so that each worker is in each round once.
void ServerStores::count_from_term(Actor& actor, int worker) {
  Part& part = actor.part();
  const auto number = static_cast<size_t>(worker);
  if (part.spec().is_synchronous || number >= part.layout().capacity()) return;
  const auto first = first_terms_.find(worker);
  if (first == first_terms_.end() || first->second == 0) return;
  for (const double end = now_s() + timeout_s_; !finish_late(worker) || !actor.finish_push_of(number); Waiter::nap(0))
    if (now_s() > end) throw_busy(part, 0, timeout_s_);
  visit_all(part, 0, part.chunk_count(), timeout_s_,
            [&](size_t chunk) { return actor.count_anew(chunk, number, first->second); });
}

PartWords ServerStores::words_of_part(uint32_t number, Part& part, int worker) const {
  PartWords words;
  words.number = number;
  if (part.memory().is_shared()) {
    words.ticket = part.memory().ticket();
    words.bytes = part.memory().bytes();
  }
  words.spec = part.spec();
  for (size_t i = 0; i < part.chunk_count(); ++i)
    words.pushes.push_back(part.worker(i, static_cast<size_t>(worker)).pushes);
  return words;
}

void ServerStores::set_rule(uint32_t number, const RuleWords& rule) {
  Store& store = stores_[number];
  const bool keeps_states = rule.keeps_states && store.rule && store.rule->name == rule.name;
  for (const auto& actor : store.actors) put_rule(*actor, rule, keeps_states);
  store.rule = rule;
  store.rule->begin_num_update = 0;  // of keys that come later
}

void ServerStores::put_rule(Actor& actor, const RuleWords& rule, bool keeps_states) {
  Part& part = actor.part();
  const std::map<std::string, double> numbers(rule.numbers.begin(), rule.numbers.end());
  const uint32_t number = rule.name.empty() ? 0 : part.add_rule(rule.name, rule.form, numbers);
  visit_all(part, 0, part.chunk_count(), timeout_s_, [&](size_t chunk) {
    return keeps_states ? actor.take_numbers(chunk, number)
                        : actor.take_rule(chunk, number, static_cast<uint64_t>(rule.begin_num_update));
  });
}

// One whose round is over comes again where its worker has found another server, and has not heard of the end yet.
void ServerStores::join(Store& store, const JoinWords& join) {
  const auto ended = store.ended_joins.find(join.worker);
  if (ended != store.ended_joins.end() && ended->second == join.number) return;
  store.joins[join.worker] = join.number;
  for (const auto& actor : store.actors) set_joined(*actor, join.worker, join.number);
}

void ServerStores::resume(Store& store, const EndedJoins& ended) {
  for (const JoinWords& join : ended) {
    store.ended_joins[join.worker] = join.number;
    const auto joined = store.joins.find(join.worker);
    if (joined == store.joins.end() || joined->second != join.number) continue;
    store.joins.erase(joined);
    for (const auto& actor : store.actors) set_presence(*actor, static_cast<int>(join.worker), Presence::here);
  }
}

void ServerStores::set_presence(int worker, Presence presence) {
  const Lock lock(mutex_);
  if (presence == Presence::gone)
    gone_.insert(worker);
  else
    gone_.erase(worker);
  unfinished_.insert(worker);
  finish_all();
  for (auto& [number, store] : stores_) {
    const auto joined = store.joins.find(static_cast<uint32_t>(worker));
    // The news that it has come back may arrive after its join.
    if (presence == Presence::here && joined != store.joins.end()) continue;
    if (joined != store.joins.end()) store.joins.erase(joined);
    for (const auto& actor : store.actors) set_presence(*actor, worker, presence);
  }
}

bool ServerStores::finish_pushes() {
  if (!has_unfinished_.load(std::memory_order_relaxed)) return true;
  const Lock lock(mutex_);
  finish_all();
  return !has_unfinished_.load(std::memory_order_relaxed);
}

void ServerStores::finish(std::vector<LateChunk> chunks) {
  const Lock lock(mutex_);
  for (LateChunk& one : chunks) late_[one.worker].push_back(std::move(one));
  finish_all();
}

// Returns whether there are none of this worker any more. Ignores errors: see finish_all().
bool ServerStores::finish_late(int worker) {
  const auto late = late_.find(worker);
  if (late == late_.end()) return true;
  std::vector<LateChunk> left;
  for (LateChunk& one : late->second) {
    const auto is_same = [&](const LateChunk& other) {
      return other.store == one.store && other.part == one.part && other.chunk == one.chunk;
    };
    bool is_done = std::none_of(left.begin(), left.end(), is_same);
    Actor& actor = *stores_[one.store].actors[one.part];
    const auto apply = [&] {
      is_done = actor.push_for(static_cast<size_t>(worker), one.chunk, one.seq, one.source, one.rates);
    };
    if (is_done) error_of(apply);
    if (!is_done) left.push_back(std::move(one));
  }
  const bool is_done = left.empty();
  late->second = std::move(left);
  if (is_done) late_.erase(late);
  return is_done;
}

void ServerStores::finish_all() {
  for (auto worker = unfinished_.begin(); worker != unfinished_.end();) {
    bool is_done = true;
    for (const auto& [number, store] : stores_)
      for (const auto& actor : store.actors) is_done = actor->finish_push_of(static_cast<size_t>(*worker)) && is_done;
    worker = is_done ? unfinished_.erase(worker) : std::next(worker);
  }
  for (auto late = late_.begin(); late != late_.end();) finish_late((late++)->first);
  has_unfinished_.store(!unfinished_.empty() || !late_.empty(), std::memory_order_relaxed);
}

bool ServerStores::let_pass(int worker, uint32_t number) {
  const Lock lock(mutex_);
  const auto store = stores_.find(number);
  if (store == stores_.end()) return false;
  const auto place = static_cast<size_t>(worker);
  bool has_changed = false;
  for (const auto& actor : store->second.actors) {
    Part& part = actor->part();
    const bool waits_for_others = part.spec().is_synchronous || part.spec().max_staleness != PartSpec::kNoBound;
    if (!waits_for_others || place >= part.layout().capacity() || part.presence(place).load() != Presence::here)
      continue;
    if (!part.header().is_restored.load() && part.first_term(place) == 0) continue;
    for (size_t chunk = 0; chunk < part.chunk_count(); ++chunk)
      has_changed = actor->let_pass(chunk, place) || has_changed;
  }
  return has_changed;
}

bool ServerStores::admit(int worker, uint32_t term) {
  const Lock lock(mutex_);
  uint32_t& first = first_terms_[worker];
  if (term <= first) return term == first;
  first = term;
  for (auto& [number, store] : stores_)
    for (const auto& actor : store.actors)
      if (static_cast<size_t>(worker) < actor->part().layout().capacity())
        actor->part().raise_first_term(static_cast<size_t>(worker), term);
  return true;
}

void ServerStores::set_presence(Actor& actor, int worker, Presence presence) {
  Part& part = actor.part();
  const auto number = static_cast<size_t>(worker);
  if (number >= part.layout().capacity()) return;
  std::atomic<Presence>& now = part.presence(number);
  if (now.load() == presence) return;
  if (presence == Presence::gone && now.load() == Presence::absent) return;
  const auto for_all = [&](auto visit) { visit_all(part, 0, part.chunk_count(), timeout_s_, visit); };
  if (presence == Presence::here) for_all([&](size_t chunk) { return actor.let_in(chunk, number); });
  now.store(presence, std::memory_order_seq_cst);
  if (presence == Presence::joined) for_all([&](size_t chunk) { return actor.settle(chunk); });
  part.ring();
}

void ServerStores::set_joined(Actor& actor, uint32_t worker, int64_t number) {
  if (worker >= actor.part().layout().capacity()) return;
  actor.part().join(worker).store(number);
  set_presence(actor, static_cast<int>(worker), Presence::joined);
}

// ------------------------------------------------------------------------------------------------------------- copies

Actor& ServerStores::actor_of(size_t part) {
  if (part >= order_.size()) throw invalid("this server has no part " + std::to_string(part));
  const auto [store, number] = order_[part];
  return *stores_[store].actors[number];
}

std::vector<std::pair<uint32_t, size_t>> ServerStores::parts() {
  const Lock lock(mutex_);
  std::vector<std::pair<uint32_t, size_t>> all;
  for (size_t i = 0; i < order_.size(); ++i) all.emplace_back(order_[i].first, actor_of(i).part().chunk_count());
  return all;
}

Bytes ServerStores::describe(size_t part) {
  const Lock lock(mutex_);
  Part& one = actor_of(part).part();
  const Store& store = stores_[order_[part].first];
  Writer writer;
  one.spec().put(writer);
  for (size_t i = 0; i < one.layout().capacity(); ++i) writer.put(one.presence(i).load());
  writer.put(static_cast<uint8_t>(store.rule.has_value()));
  if (store.rule) put_words(writer, *store.rule);
  return writer.take();
}

void ServerStores::restore(uint32_t number, const Bytes& description) {
  Reader reader(description);
  const PartSpec spec = PartSpec::get(reader);
  const Lock lock(mutex_);
  Actor& actor = add(number, spec, 0);
  actor.part().header().is_restored.store(1);
  ++stores_[number].kept;
  for (size_t i = 0; i < actor.part().layout().capacity(); ++i) actor.part().presence(i).store(reader.get<Presence>());
  if (reader.get<uint8_t>() == 0) return;
  RuleWords& rule = stores_[number].rule.emplace();
  get_words(reader, rule);
  put_rule(actor, rule, false);
}

void ServerStores::adopt(const std::vector<Found>& all) {
  std::vector<std::pair<uint32_t, std::shared_ptr<Part>>> parts;
  std::map<uint32_t, uint32_t> numbers;
  for (const Found& found : all) {
    if (found.number != numbers[found.store]++)
      throw failure("a part of store " + std::to_string(found.store) + " is in the memory of no worker");
    Reader reader(found.spec);
    parts.emplace_back(found.store, Part::attach(PartSpec::get(reader), found.pid, found.ticket));
    const auto rule = parts.back().second->rule(parts.back().second->header().rule.load());
    if (rule && rule->is_program()) throw failure("what its optimizer remembers was in the server that is lost");
  }
  const Lock lock(mutex_);
  for (const auto& [number, part] : parts) {
    Store& store = stores_[number];
    keep(number, part);
    ++store.kept;
    part->header().has_parked.store(0);  // those that waited at the server before are to ask again
    for (size_t i = 0; i < part->layout().capacity(); ++i)
      if (part->presence(i).load() == Presence::joined) store.joins[static_cast<uint32_t>(i)] = part->join(i).load();
    // The server before this one may have died before it could apply the rest of their pushes.
    for (size_t i = 0; i < part->layout().capacity(); ++i)
      if (part->presence(i).load() == Presence::gone) unfinished_.insert(static_cast<int>(i));
    if (const std::optional<RuleWords> rule = rule_words(*part)) store.rule = rule;
  }
  finish_all();
}

Bytes ServerStores::copy(size_t part, size_t first, size_t last) {
  const Lock lock(mutex_);
  return copy_chunks(actor_of(part), first, last, timeout_s_);
}

size_t ServerStores::put(size_t part, size_t first, const Bytes& chunks) {
  const Lock lock(mutex_);
  return put_chunks(actor_of(part), first, chunks, timeout_s_);
}

// The updates of a program of the server: it gets gradients piece by piece, and returns values.

// Of all pieces in turn, so that none keeps the others waiting.
std::optional<ServerStores::Taken> ServerStores::take() {
  const Lock lock(mutex_);
  size_t pieces = 0;
  for (size_t i = 0; i < order_.size(); ++i) pieces += actor_of(i).part().spec().pieces.size();
  for (; pieces > 0; --pieces) {
    while (next_part_ >= order_.size() || next_piece_ >= actor_of(next_part_).part().spec().pieces.size()) {
      next_part_ = next_part_ + 1 < order_.size() ? next_part_ + 1 : 0;
      next_piece_ = 0;
    }
    if (auto taken = take_piece(next_part_, next_piece_++)) return taken;
  }
  return std::nullopt;
}

std::optional<ServerStores::Taken> ServerStores::take_piece(size_t number, size_t piece) {
  const uint32_t store = order_[number].first;
  const std::optional<RuleWords>& rule = stores_[store].rule;
  if (!rule || rule->name != kProgram) return std::nullopt;
  Actor& actor = actor_of(number);
  Part& part = actor.part();
  const size_t first = part.layout().first_chunk(piece), last = part.layout().first_chunk(piece + 1);
  const KeyPiece& of_key = part.spec().pieces[piece];
  const size_t element = size_of(wide(of_key.dtype));
  Taken taken{store, static_cast<uint32_t>(number), static_cast<uint32_t>(piece), of_key, {}, {}};
  bool is_there = first < last;
  const auto take_chunk = [&](size_t chunk) {
    if (!is_there) return true;
    taken.gradient.resize(of_key.count * element);
    taken.weight.resize(of_key.count * element);
    const size_t at = part.chunk(chunk).begin * element;
    const Reading reading = actor.take(chunk, taken.gradient.data() + at, taken.weight.data() + at);
    is_there = reading != Reading::not_yet;
    return reading != Reading::busy;
  };
  visit_all(part, first, last, timeout_s_, take_chunk);
  if (!is_there) return std::nullopt;
  return taken;
}

void ServerStores::finish(size_t number, size_t piece, const Bytes& weight,
                          const std::function<void(Part&, size_t)>& changed) {
  const Lock lock(mutex_);
  Actor& actor = actor_of(number);
  Part& part = actor.part();
  if (piece >= part.spec().pieces.size()) throw invalid("this part has no piece " + std::to_string(piece));
  const KeyPiece& of_key = part.spec().pieces[piece];
  const size_t element = size_of(wide(of_key.dtype));
  if (weight.size() != of_key.count * element) throw invalid("these are not the bytes of the value that was taken");
  const size_t first = part.layout().first_chunk(piece), last = part.layout().first_chunk(piece + 1);
  visit_all(part, first, last, timeout_s_, [&](size_t chunk) {
    if (!actor.finish(chunk, weight.data() + part.chunk(chunk).begin * element)) return false;
    changed(part, chunk);
    return true;
  });
}

}  // namespace ringtrain
