#include "kvstore/server/server_stores.h"

#include <utility>

#include "base/error.h"
#include "kvstore/store/chunk_copies.h"

namespace ringtrain {

namespace {

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

}  // namespace

ServerStores::ServerStores(bool shares_memory, double timeout_s)
    : shares_memory_(shares_memory), timeout_s_(timeout_s) {}

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
      for (const auto& actor : stores_[question.store].actors) join(*actor, worker);
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
  Actor& actor = add(question.store, spec, workers);
  const Store& store = stores_[question.store];
  if (store.rule) put_rule(actor, *store.rule, false);
  return bytes_of(words_of_part(static_cast<uint32_t>(store.actors.size() - 1), actor.part(), worker));
}

Actor& ServerStores::add(uint32_t store, const PartSpec& spec, int workers) {
  return keep(store, Part::create(spec, workers, shares_memory_ ? Part::Memory::shared : Part::Memory::of_process));
}

Actor& ServerStores::keep(uint32_t store, const std::shared_ptr<Part>& part) {
  auto actor = std::make_unique<Actor>(part, part->layout().actor_of_server(), timeout_s_);
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
  std::vector<PartWords> words;
  for (size_t i = question.part; i < store.actors.size(); ++i) {
    set_presence(*store.actors[i], worker, Presence::here);
    words.push_back(words_of_part(static_cast<uint32_t>(i), store.actors[i]->part(), worker));
  }
  Writer writer;
  write_list(writer, words);
  return writer.take();
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

void ServerStores::join(Actor& actor, int worker) {
  set_presence(actor, worker, Presence::joined);
  Part& part = actor.part();
  std::vector<int> joined;
  for (size_t i = 0; i < part.layout().capacity(); ++i) {
    const Presence presence = part.presence(i).load(std::memory_order_seq_cst);
    if (presence == Presence::here) return;
    if (presence == Presence::joined) joined.push_back(static_cast<int>(i));
  }
  for (const int other : joined) set_presence(actor, other, Presence::here);
}

void ServerStores::set_presence(int worker, Presence presence) {
  const Lock lock(mutex_);
  for (auto& [number, store] : stores_)
    for (const auto& actor : store.actors) set_presence(*actor, worker, presence);
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
  const auto for_all = [&](auto visit) { visit_all(part, 0, part.chunk_count(), timeout_s_, visit); };
  if (presence == Presence::here) for_all([&](size_t chunk) { return actor.let_in(chunk, number); });
  now.store(presence, std::memory_order_seq_cst);
  if (presence == Presence::joined) for_all([&](size_t chunk) { return actor.settle(chunk); });
  part.ring();
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
  if (store.rule) store.rule->write(writer);
  return writer.take();
}

void ServerStores::restore(uint32_t number, const Bytes& description) {
  Reader reader(description);
  const PartSpec spec = PartSpec::get(reader);
  const Lock lock(mutex_);
  Actor& actor = add(number, spec, 0);
  for (size_t i = 0; i < actor.part().layout().capacity(); ++i) actor.part().presence(i).store(reader.get<Presence>());
  if (reader.get<uint8_t>() == 0) return;
  stores_[number].rule = RuleWords::read(reader);
  put_rule(actor, *stores_[number].rule, false);
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
    part->header().has_parked.store(0);  // those that waited at the server before are to ask again
    if (const std::optional<RuleWords> rule = rule_words(*part)) store.rule = rule;
  }
}

Bytes ServerStores::copy(size_t part, size_t first, size_t last) {
  const Lock lock(mutex_);
  return copy_chunks(actor_of(part), first, last, timeout_s_);
}

size_t ServerStores::put(size_t part, size_t first, const Bytes& chunks) {
  const Lock lock(mutex_);
  return put_chunks(actor_of(part), first, chunks, timeout_s_);
}

}  // namespace ringtrain
