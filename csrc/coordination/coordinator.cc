#include "coordination/coordinator.h"

#include <cstring>

#include "base/log.h"
#include "coordination/plan.h"
#include "coordination/wire.h"

namespace ringtrain {
namespace {

// Work on GPUs is done in one order, that of the world: so NCCL's kernels are.
bool has_gpu_work(const Announcements& announcements) {
  return std::any_of(announcements.requests.begin(), announcements.requests.end(),
                     [](const Announced& one) { return one.request.operation.is_on_gpu; });
}

constexpr double kNever = std::numeric_limits<double>::infinity();

// The last word of a round; a flag stays set only if it is set on every rank.
enum Flags : uint64_t { kNothingNew = 1, kStaying = 2, kBlocked = 4 };

}  // namespace

void Ready::add(int slot, Pending pending) {
  const auto place = static_cast<size_t>(slot);
  if (place >= places_.size()) {
    places_.resize(place + 1);
    bits_.resize(words_for(place + 1));
  }
  drop(slot);
  places_[place] = {std::move(pending), last_, -1};
  last_ = after(last_) = slot;
  set_bit(bits_, place);
}

Pending Ready::take(int slot) {
  const auto place = static_cast<size_t>(slot);
  clear_bit(bits_, place);
  Place taken = std::exchange(places_[place], {});
  after(taken.before) = taken.after;
  before(taken.after) = taken.before;
  return std::move(taken.pending);
}

void Ready::add_bits_to(Words& words) const {
  for (size_t i = 0; i < std::min(bits_.size(), words.size()); ++i) words[i] |= bits_[i];
}

Coordinator::Coordinator(Channel& channel, Membership& membership, Blockage& blockage, const Limits& limits,
                         int process_set)
    : channel_(channel),
      membership_(membership),
      blockage_(blockage),
      members_(membership.ranks(process_set)),
      rank_(members_.at(static_cast<size_t>(channel.rank()))),
      process_set_(process_set),
      limits_(limits),
      cache_(limits.cache_capacity),
      ledger_(membership, {ask_s(limits), limits.stall_warning_s, limits.stall_shutdown_s}) {}

void Coordinator::begin_round(const News& news) {
  has_just_joined_ = false;
  take_in(news.fresh, news.now);
  reannounce_overdue(news.now);
  is_leaving_ = news.is_leaving;
  if (!news.whereabouts.empty()) whereabouts_ = news.whereabouts;
  blockage_of_round_ = blockage_.to_tell(news.blockage, news.now);
  make_own_words(news.now);
  put_value();
  round_.clear();
  channel_.begin_and(words_);
  stage_ = Stage::bits;
}

Round* Coordinator::finish_round(double deadline) {
  if (stage_ == Stage::bits && !take_bits(deadline)) return nullptr;
  if (stage_ != Stage::none && !settle(deadline)) return nullptr;
  if (ledger_.has_joins())
    for (const PlanPtr& plan : round_.plans) note_progress(*plan);
  blockage_.note_agreed(round_.plans.size());
  next_deadline_ = find_next_deadline();
  return &round_;
}

// Unless something is to be settled, the round is over.
bool Coordinator::take_bits(double deadline) {
  if (!channel_.finish_and(words_, deadline)) return false;
  stage_ = Stage::none;
  const uint64_t flags = words_.back();
  words_.pop_back();
  lateness_.hear(words_);
  uint64_t common = 0;
  int last = -1;
  for_each_bit(words_, [&](int slot) {
    cache_.use(slot);
    ready_.drop(slot);
    last = slot;
    ++common;
  });
  ++rounds_;
  agreed_by_bit_ += common;
  are_all_blocked_ = (flags & kBlocked) && common == 0;
  round_.closes_lanes = are_all_blocked_ && std::exchange(may_have_lanes_, false);
  if (round_.closes_lanes) blockage_.forget_told();
  if ((flags & kNothingNew) && (flags & kStaying) && !are_all_blocked_) {
    plan(words_);
    if (common == 1) take_values(last);
    if (!round_.values.data.empty()) ++came_with_values_;
  } else {
    begin_to_settle();
  }
  return true;
}

void Coordinator::note_progress(const Plan& plan) {
  const Agreement& first = *plan.parts.front();
  if (first.error == ErrorKind::none) ledger_.note_progress(first.operation.process_set, now_s());
}

void Coordinator::plan(const Words& bits) {
  if (const std::vector<PlanPtr>* known = cache_.plans_for(bits)) {
    round_.plans = *known;
    return;
  }
  round_.plans = fuse(agreements_of(bits), limits_.fusion_threshold_bytes);
  cache_.remember_plans(bits, round_.plans);
}

// Operations agreed in the round that removed their process set fail on all its ranks, with all that is pending there.
void Coordinator::drop_removed(std::vector<AgreementPtr>& agreements) const {
  const auto is_of_removed = [&](const AgreementPtr& one) { return !membership_.has(one->operation.process_set); };
  agreements.erase(std::remove_if(agreements.begin(), agreements.end(), is_of_removed), agreements.end());
}

void Coordinator::take_in(const std::vector<Fresh>& fresh, double now) {
  for (const auto& [request, value] : fresh) {
    const std::optional<int> slot = cache_.find(*request);
    if (slot && !membership_.has_joined(request->operation.process_set, rank_))
      ready_.add(*slot, {request, now, value});
    else
      to_announce_.push_back({request, now});
  }
  std::set<int> joining;
  for (const auto& [request, value] : fresh)
    if (request->operation.kind == OpKind::join) joining.insert(request->operation.process_set);
  if (!joining.empty()) reannounce_all_of(joining);
}

// A bit does not tell rank 0 which ranks have set it, so operations that wait for long are announced in full. All
// ranks that had set the bit announce it in the next round: see note(). The Ledger asks and warns only after that.
// Younger operations are announced along with the first overdue one, so that one warning counts them all.
void Coordinator::reannounce_overdue(double now) {
  if (ready_.oldest() < now - ask_s(limits_)) reannounce_all();
}

// Early enough for an answer before the warning or the error.
double Coordinator::ask_s(const Limits& limits) {
  const double warning = limits.stall_warning_s, shutdown = limits.stall_shutdown_s;
  return shutdown > 0 ? std::min(warning, shutdown / 2) : warning;
}

void Coordinator::reannounce(int slot) {
  if (ready_.has(slot)) to_announce_.push_back(ready_.take(slot));
}

void Coordinator::reannounce_all() {
  for (int slot = 0; slot < cache_.slot_count(); ++slot) reannounce(slot);
}

// A join may be settled in the round in which it is announced, before a bit has become common. And from then on a bit
// of this rank means that it contributes zeros.
void Coordinator::reannounce_all_of(const std::set<int>& process_sets) {
  for (int slot = 0; slot < cache_.slot_count(); ++slot)
    if (cache_.has(slot) && process_sets.count(cache_.at(slot)->operation.process_set)) reannounce(slot);
}

bool Coordinator::is_always_ready(int slot) const {
  if (!cache_.has(slot)) return false;
  const Operation& operation = cache_.at(slot)->operation;
  if (!membership_.contains(operation.process_set, rank_)) return true;
  return membership_.has_joined(operation.process_set, rank_) && Ledger::can_join(operation);
}

void Coordinator::find_always_ready() {
  always_ready_.emplace();
  for (int slot = 0; slot < cache_.slot_count(); ++slot) look_whether_always_ready(slot);
}

void Coordinator::look_whether_always_ready(int slot) {
  if (!always_ready_) return;
  const auto bit = static_cast<size_t>(slot);
  always_ready_->resize(words_for(static_cast<size_t>(cache_.slot_count())));
  clear_bit(*always_ready_, bit);
  if (is_always_ready(slot)) set_bit(*always_ready_, bit);
}

void Coordinator::make_own_words(double now) {
  if (!always_ready_) find_always_ready();
  words_.assign(always_ready_->size(), 0);
  ready_.add_bits_to(words_);
  lateness_.keep(words_);
  for (size_t i = 0; i < words_.size(); ++i) words_[i] |= (*always_ready_)[i];
  lateness_.tell(words_);
  const bool has_news = !to_announce_.empty() || proposal_ || !whereabouts_.empty() || ledger_.next_deadline() <= now ||
                        (messages_ && messages_->has_news(now));
  words_.push_back((has_news ? 0 : kNothingNew) | (is_leaving_ ? 0 : kStaying) |
                   (Blockage::is_odd(blockage_of_round_) ? kBlocked : 0));
}

// The whole latency of a single operation is time for which its caller waits.
void Coordinator::put_value() {
  Value value;
  const std::optional<int> slot = ready_.only_one();
  if (const void* memory = slot ? ready_.at(*slot).value : nullptr) {
    const Operation& operation = ready_.at(*slot).request->operation;
    const size_t bytes = operation.bytes();
    if (bytes <= channel_.most_value_bytes() && membership_.joined(operation.process_set).empty()) {
      const char* const begin = static_cast<const char*>(memory);
      value_.assign(begin, begin + bytes);
      const bool is_of_all = operation.process_set == process_set_;
      value = {*slot, static_cast<uint32_t>(bytes), value_.data(), is_of_all ? &operation : nullptr};
    }
  }
  channel_.put_value(value);
}

// All ranks see the same, so all come to the same result: nothing unless every rank that takes part has put its own.
void Coordinator::take_values(int slot) {
  Round::Values& values = round_.values;
  if (const Value sum = channel_.sum_of_all(); sum.slot == slot) {
    values.data.push_back(sum.data);
    values.are_added_up = true;
    return;
  }
  const Operation& operation = cache_.at(slot)->operation;
  for (const int rank : membership_.ranks(operation.process_set)) {
    const Value value = channel_.value_of(membership_.place(process_set_, rank));
    if (value.slot != slot || value.bytes != operation.bytes()) return values.data.clear();
    values.data.push_back(value.data);
  }
}

// When it was agreed on before, others may have joined.
AgreementPtr Coordinator::agreement_of(int slot) const {
  const AgreementPtr& known = cache_.at(slot);
  const std::vector<int>& joined = membership_.joined(known->operation.process_set);
  if (known->joined == joined) return known;
  auto agreement = std::make_shared<Agreement>(*known);
  agreement->joined = joined;
  return agreement;
}

std::vector<AgreementPtr> Coordinator::agreements_of(const Words& bits) const {
  std::vector<AgreementPtr> agreements;
  for_each_bit(bits, [&](int slot) { agreements.push_back(agreement_of(slot)); });
  return agreements;
}

void Coordinator::begin_to_settle() {
  agreements_ = agreements_of(words_);
  lateness_.forget();
  const bool are_judged = are_all_blocked_ && !round_.closes_lanes;
  if (are_judged) reannounce_all();
  if (messages_) messages_->announce(are_judged, to_announce_, withdrawn_);
  for (const Key& message : withdrawn_) announced_.erase(message);
  message_ = announcement();
  stage_ = Stage::announcements;
}

bool Coordinator::settle(double deadline) {
  if (stage_ == Stage::announcements) {
    const std::optional<Gathered> announcements = channel_.gather_until(deadline, message_);
    if (!announcements) return false;
    message_ = channel_.rank() == 0 ? to_bytes(decide(*announcements)) : Bytes();
    stage_ = Stage::decision;
  }
  const std::optional<Bytes> decision = channel_.broadcast_until(deadline, message_);
  if (!decision) return false;
  stage_ = Stage::none;
  if (messages_) messages_->settled();
  for (AgreementPtr& agreement : apply_decision(read_decision(*decision, membership_)))
    agreements_.push_back(std::move(agreement));
  drop_removed(agreements_);
  round_.plans = fuse(std::exchange(agreements_, {}), limits_.fusion_threshold_bytes);
  return true;
}

std::vector<AgreementPtr> Coordinator::apply_decision(Decision decision) {
  for (const Agreement& agreement : decision.agreements)
    require_own(agreement, own_request(agreement.operation), rank_, membership_);
  for_each_bit(decision.evicted, [&](int slot) {
    if (slot >= cache_.slot_count() || !cache_.has(slot))
      throw invalid_from(0, "the end of an operation that is not in the cache");
    reannounce(slot);
    evict(slot);
  });
  for (const auto [process_set, rank] : decision.joined) membership_.join(process_set, rank);
  if (!decision.joined.empty()) always_ready_.reset();
  std::vector<AgreementPtr> agreements;
  for (Agreement& agreement : decision.agreements) agreements.push_back(apply(std::move(agreement)));
  round_.left = std::move(decision.left);
  round_.tuning = decision.tuning;
  round_.question = std::move(decision.question);
  if (decision.tuning) limits_.fusion_threshold_bytes = decision.tuning->fusion_threshold_bytes;
  if (decision.tuning || !decision.joined.empty()) cache_.forget_plans();
  return agreements;
}

Bytes Coordinator::announcement() {
  const double now = now_s();
  AnnouncementWriter writer;
  announced_in_full_ += to_announce_.size();
  for (Pending& pending : to_announce_) {
    writer.add(*pending.request, std::max(0.0, now - pending.since));
    if (pending.request->operation.kind == OpKind::join) has_just_joined_ = true;
    Key key = key_of(pending.request->operation);
    announced_[std::move(key)] = std::move(pending);
  }
  to_announce_.clear();
  return writer.take(is_leaving_, blockage_.count() == blockage_of_round_, messages_ ? messages_->on_their_way() : 0,
                     std::exchange(withdrawn_, {}), std::exchange(whereabouts_, {}));
}

Decision Coordinator::decide(const Gathered& gathered) {
  ledger_.begin_round();
  const double now = now_s();
  std::vector<int> ranks;
  for (size_t place = 0; place < gathered.count(); ++place)
    ranks.push_back(members_[static_cast<size_t>(channel_.rank_at(place))]);
  Announcements announcements = read_announcements(gathered, ranks, membership_);
  Decision decision;
  decision.evicted.resize(words_for(static_cast<size_t>(cache_.slot_count())));
  decision.left = std::move(announcements.leaving);
  for (auto& [rank, whereabouts] : announcements.whereabouts) ledger_.note_answer(rank, std::move(whereabouts));
  for (const Key& message : announcements.withdrawn) ledger_.withdraw(message);
  for (const Announced& announced : announcements.requests) note(announced, now, decision);
  decision.tuning = std::exchange(proposal_, std::nullopt);
  if (process_set_ != 0 && has_gpu_work(announcements)) {
    decision.left = members_;
    return decision;
  }
  decision.agreements = ledger_.take_agreed();
  const bool have_been_blocked =
      are_all_blocked_ && !round_.closes_lanes && announcements.have_been_blocked && announcements.on_their_way == 0;
  if (decision.agreements.empty() && have_been_blocked) decision.agreements = ledger_.take_deadlocked();
  decision.question = ledger_.take_question(now);
  for (const std::string& warning : ledger_.take_warnings(now)) warn(warning);
  for (Agreement& stalled : ledger_.take_stalled(now)) decision.agreements.push_back(std::move(stalled));
  return decision;
}

// A rank that has the same operation cached only sets its bit. The cache forgets it, so that all meet in the Ledger.
// The same holds for what a joined rank cannot take part in, and for all that a rank would take part in that has ended.
void Coordinator::note(const Announced& announced, double now, Decision& decision) {
  const Operation& operation = announced.request.operation;
  ledger_.announce(announced.ranks, announced.request, now - announced.oldest_s, now - announced.youngest_s);
  if (const std::optional<int> slot = cache_.find(view_of(operation)))
    set_bit(decision.evicted, static_cast<size_t>(*slot));
  if (operation.kind == OpKind::join)
    announced.ranks.for_each([&](int rank) { decision.joined.push_back({operation.process_set, rank}); });
  else if (operation.name != kEndName)
    return;
  for (int slot = 0; slot < cache_.slot_count(); ++slot)
    if (cache_.has(slot) && !can_go_on(cache_.at(slot)->operation, announced))
      set_bit(decision.evicted, static_cast<size_t>(slot));
}

// Whether its bit still means the same after a join or an end.
bool Coordinator::can_go_on(const Operation& cached, const Announced& announced) const {
  const Operation& operation = announced.request.operation;
  if (operation.kind == OpKind::join)
    return cached.process_set != operation.process_set || (Ledger::can_join(cached) && !cached.is_registered);
  const std::vector<int>& members = membership_.ranks(cached.process_set);
  return std::none_of(members.begin(), members.end(), [&](int rank) { return announced.ranks.contains(rank); });
}

// Returns what is pending here under the name of an operation; null if there is nothing. Rank 0 cannot have agreed on
// what is pending as a bit, unless it is wrong.
const Request* Coordinator::own_request(const Operation& operation) const {
  const auto announced = announced_.find(key_of(operation));
  if (announced != announced_.end()) return announced->second.request.get();
  const std::optional<int> slot = cache_.find(view_of(operation));
  return slot && ready_.has(*slot) ? ready_.at(*slot).request.get() : nullptr;
}

AgreementPtr Coordinator::apply(Agreement agreement) {
  const Operation& operation = agreement.operation;
  RequestPtr own;
  const auto announced = announced_.find(key_of(operation));
  if (announced != announced_.end()) {
    own = std::move(announced->second.request);
    announced_.erase(announced);
  }
  if (operation.kind == OpKind::join) {
    membership_.end_join(operation.process_set);
    cache_.forget_plans();
    always_ready_.reset();
  }
  if (agreement.error == ErrorKind::none) {
    if (operation.kind == OpKind::add_process_set || operation.kind == OpKind::open_process_set) {
      may_have_lanes_ = true;
      agreement.result = membership_.add({operation.numbers.begin(), operation.numbers.end()});
    }
    if (operation.kind == OpKind::remove_process_set || operation.kind == OpKind::close_process_set)
      forget_process_set(static_cast<int>(operation.numbers.front()));
  }
  const auto shared = std::make_shared<const Agreement>(std::move(agreement));
  if (PlanCache::is_cacheable(*shared)) remember(shared, std::move(own));
  return shared;
}

// The entry whose place it takes may be pending as a bit.
void Coordinator::remember(const AgreementPtr& agreement, RequestPtr own) {
  if (!membership_.has(agreement->operation.process_set)) return;
  const std::optional<int> slot = cache_.insert(agreement, std::move(own));
  if (!slot) return;
  reannounce(*slot);
  look_whether_always_ready(*slot);
}

void Coordinator::evict(int slot) {
  cache_.evict(slot);
  look_whether_always_ready(slot);
}

void Coordinator::forget_process_set(int id) {
  for (int slot = 0; slot < cache_.slot_count(); ++slot) {
    if (!cache_.has(slot) || cache_.at(slot)->operation.process_set != id) continue;
    ready_.drop(slot);
    evict(slot);
  }
  const auto is_of_it = [&](const Pending& pending) { return pending.request->operation.process_set == id; };
  to_announce_.erase(std::remove_if(to_announce_.begin(), to_announce_.end(), is_of_it), to_announce_.end());
  for (auto it = announced_.lower_bound({id, ""}); it != announced_.end() && it->first.first == id;)
    it = announced_.erase(it);
  ledger_.drop(id);
  membership_.remove(id);
}

std::vector<Fresh> Coordinator::take_pending() {
  std::vector<Pending> pending = std::exchange(to_announce_, {});
  for (int slot = 0; slot < cache_.slot_count(); ++slot)
    if (ready_.has(slot)) pending.push_back(ready_.take(slot));
  for (auto& [key, one] : announced_) pending.push_back(std::move(one));
  announced_.clear();
  std::stable_sort(pending.begin(), pending.end(),
                   [](const Pending& one, const Pending& other) { return one.since < other.since; });
  std::vector<Fresh> fresh;
  for (Pending& one : pending) fresh.push_back({std::move(one.request), one.value});
  return fresh;
}

double Coordinator::next_deadline() const {
  if (process_set_ != 0) return next_deadline_;
  return std::min({next_deadline_, blockage_.next_deadline(), messages_ ? messages_->next_deadline() : kNever});
}

double Coordinator::find_next_deadline() const {
  const bool has_been_evicted = !to_announce_.empty();
  if (has_been_evicted || has_just_joined_) return 0;
  return std::min(ledger_.next_deadline(), ready_.oldest() + ask_s(limits_));
}

}  // namespace ringtrain
