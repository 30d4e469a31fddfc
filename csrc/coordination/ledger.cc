#include "coordination/ledger.h"

#include <algorithm>

#include "coordination/wire.h"

namespace ringtrain {
namespace {

// How many groups of ranks a message names, and with how many variants a new request is compared: a name for which each
// of N ranks has a request of its own costs N steps, not N times N.
constexpr size_t kMostTold = 8, kMostCompared = 8;

template <typename Value>
bool fit(const Value& a, const Value& b, OpKind) {
  return a == b;
}

// The ranks may give different numbers of rows to allgather and alltoall.
bool fit(const std::vector<TensorSpec>& a, const std::vector<TensorSpec>& b, OpKind kind) {
  if (kind != OpKind::allgather && kind != OpKind::alltoall) return a == b;
  const auto but_for_rows = [](const TensorSpec& one, const TensorSpec& other) {
    return one.dtype == other.dtype && one.shape.size() == other.shape.size() &&
           std::equal(one.shape.begin() + !one.shape.empty(), one.shape.end(),
                      other.shape.begin() + !other.shape.empty());
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), but_for_rows);
}

// Factors that look the same in the message count as equal.
bool fit(const Factors& a, const Factors& b, OpKind) { return a == b || factors_text(a) == factors_text(b); }

// By their lowest ranks.
using Variants = std::vector<const Variant*>;

// Returns "" if all fit together, else what each group of ranks did, and the remedy.
template <typename Value>
std::string mismatch_in(const Field<Value>& field, const Variants& variants) {
  if (!field.says) return "";
  struct Group {
    const Value* value;
    RankSet ranks;
  };
  std::vector<Group> groups;
  RankSet others;
  for (const Variant* variant : variants) {
    const Operation& operation = variant->request.operation;
    const Value& value = operation.*field.member;
    const auto fits = [&](const Group& one) { return fit(*one.value, value, operation.kind); };
    const auto same = std::find_if(groups.begin(), groups.end(), fits);
    if (same != groups.end())
      same->ranks.add(variant->ranks);
    else if (groups.size() < kMostTold)
      groups.push_back({&value, variant->ranks});
    else
      others.add(variant->ranks);
  }
  if (groups.size() == 1) return "";
  std::string text;
  for (const auto& [value, ranks] : groups)
    text += (text.empty() ? "" : ", ") + ranks_text(ranks) + " " + field.says(*value);
  if (!others.empty()) text += ", " + ranks_text(others) + " something else again";
  return text + ". " + field.remedy;
}

constexpr int kWorld = 0;
constexpr double kLongestAnswer_s = 2;

bool is_join(const Key& key) { return key.second == kJoinName; }
bool is_end(const Key& key) { return key.second == kEndName; }
bool is_from_any_rank(const Operation& operation) {
  return operation.kind == OpKind::transfer && operation.numbers[0] == kAnySource;
}

}  // namespace

bool are_alike(const Operation& agreed, const Operation& own) {
  return holds_for_all_fields(
      [&](const auto& field) { return !field.says || fit(agreed.*field.member, own.*field.member, agreed.kind); });
}

std::string find_mismatch(const std::vector<Variant>& variants) {
  Variants in_order;
  for (const Variant& variant : variants) in_order.push_back(&variant);
  std::sort(in_order.begin(), in_order.end(), [](const auto* a, const auto* b) { return a->ranks < b->ranks; });
  std::string text;
  for_each_field([&](const auto& field) {
    if (text.empty()) text = mismatch_in(field, in_order);
  });
  return text.empty() ? text : title_of(in_order.front()->request) + ": " + text;
}

Ledger::Ledger(const Membership& membership, const Limits& limits)
    : membership_(membership),
      limits_(limits),
      answer_s_(std::min(kLongestAnswer_s, limits.ask_s)),
      question_s_(-kNever) {}

bool Ledger::can_join(const Operation& operation) {
  if (operation.kind == OpKind::barrier) return true;
  const bool ignores_zeros =
      operation.op == ReduceOp::average || operation.op == ReduceOp::sum || operation.op == ReduceOp::adasum;
  return operation.kind == OpKind::allreduce && ignores_zeros;
}

void Ledger::announce(const RankSet& ranks, const Request& request, double first_s, double last_s) {
  const Operation& operation = request.operation;
  if (!membership_.has(operation.process_set)) return;  // removed meanwhile; the submitter was told
  const Key key = key_of(operation);
  const auto it = entries_.try_emplace(key).first;
  Entry& entry = it->second;
  const bool is_first = entry.announced.empty();
  if (is_first) entry.order = announcements_++;
  add_variant(entry, ranks, request);
  if (is_join(key))
    entry.since = is_first ? last_s : std::max(entry.since, last_s);
  else
    entry.since = is_first ? first_s : std::min(entry.since, first_s);
  // Some member may use the set for as long as the job lasts, and nobody waits for its end.
  if (operation.kind == OpKind::close_process_set || is_end(key)) entry.since = kNever;
  entry.last = ranks.last();
  changed_.insert(key);
  reschedule(it->first, entry);
  if (is_join(key)) {
    joining_.insert(operation.process_set);
    note_change_of(operation.process_set);
  }
  if (is_end(key))
    for (const auto& [other, waiting] : entries_) changed_.insert(other);
}

void Ledger::add_variant(Entry& entry, const RankSet& ranks, const Request& request) {
  ranks.for_each([&](int rank) {
    if (entry.announced.contains(rank)) throw invalid_from(rank, title_of(request) + " a second time before its end");
  });
  const size_t compared = std::min(kMostCompared, entry.variants.size());
  const auto same = std::find_if(entry.variants.end() - static_cast<std::ptrdiff_t>(compared), entry.variants.end(),
                                 [&](const Variant& one) { return one.request == request; });
  const auto index = static_cast<size_t>(same - entry.variants.begin());
  if (same == entry.variants.end())
    entry.variants.push_back({request, ranks});
  else
    same->ranks.add(ranks);
  if (entry.announced.empty() || ranks.first() < entry.announced.first()) entry.first = index;
  entry.announced.add(ranks);
}

void Ledger::note_change_of(int process_set) {
  for (auto it = entries_.lower_bound({process_set, ""}); it != entries_.end() && it->first.first == process_set; ++it)
    changed_.insert(it->first);
}

void Ledger::reschedule(const Key& key, Entry& entry) {
  double due_s = std::min(next_question(entry), next_warning(entry));
  if (limits_.shutdown_s > 0) due_s = std::min(due_s, entry.since + limits_.shutdown_s);
  if (due_s == entry.due_s) return;
  due_.erase({entry.due_s, &key});
  entry.due_s = due_s;
  if (due_s < kNever) due_.insert({due_s, &key});
}

Ledger::Entries::iterator Ledger::erase(Entries::iterator it) {
  due_.erase({it->second.due_s, &it->first});
  if (is_join(it->first)) joining_.erase(it->first.first);
  return entries_.erase(it);
}

void Ledger::note_progress(int process_set, double now) {
  for (const int joining : joining_) {
    if (process_set != kWorld && process_set != joining) continue;
    const auto it = entries_.find({joining, kJoinName});
    it->second.since = now;
    it->second.questions = 0;
    it->second.is_told = false;
    reschedule(it->first, it->second);
  }
}

const std::vector<int>& Ledger::members_of(const Entry& entry, std::vector<int>& own) const {
  const Operation& operation = first_of(entry);
  if (!is_of_participants(operation.kind)) return membership_.ranks(operation.process_set);
  return own = participants_of(operation);
}

bool Ledger::is_complete(const Key& key, const Entry& entry) const {
  const Operation& operation = first_of(entry);
  if (operation.kind == OpKind::transfer) return false;
  std::vector<int> own;
  const std::vector<int>& members = members_of(entry, own);
  const auto join = entries_.find({key.first, kJoinName});
  const bool is_of_set = !is_of_participants(operation.kind);  // then no other ranks announce it
  if (is_of_set && join == entries_.end()) return entry.announced.size() == members.size();
  return std::all_of(members.begin(), members.end(), [&](int rank) {
    return entry.announced.contains(rank) || (join != entries_.end() && join->second.announced.contains(rank));
  });
}

RankSet Ledger::ended_members(const Key& key, const Entry& entry) const {
  RankSet ended;
  auto end = entries_.find({key.first, kEndName});  // in the lane of a process set
  if (end == entries_.end()) end = entries_.find({kWorld, kEndName});
  if (end == entries_.end() || is_end(key)) return ended;
  const OpKind kind = first_of(entry).kind;
  if (kind == OpKind::close_process_set || is_from_any_rank(first_of(entry))) return ended;
  missing(key, entry).for_each([&](int rank) {
    if (end->second.announced.contains(rank)) ended.add(rank);
  });
  return ended;
}

std::vector<Agreement> Ledger::take_agreed() {
  std::vector<std::pair<uint64_t, Agreement>> complete;
  std::vector<Entries::iterator> joins;  // erased last: is_complete() of other entries looks at them
  for (const Key& key : changed_) {
    const auto it = entries_.find(key);
    if (it == entries_.end()) continue;
    if (const RankSet ended = ended_members(key, it->second); !ended.empty()) {
      complete.emplace_back(it->second.order, refuse(it->second, ended));
      erase(it);
      continue;
    }
    if (!is_complete(key, it->second)) continue;
    if (is_join(key)) {
      joins.push_back(it);
      continue;
    }
    complete.emplace_back(it->second.order, agree(it->second));
    erase(it);
  }
  changed_.clear();
  std::sort(complete.begin(), complete.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Agreement> agreements;
  for (auto& [order, agreement] : complete) agreements.push_back(std::move(agreement));
  for (const Entries::iterator& join : joins) {
    agreements.push_back(agree_on_join(join->second));
    erase(join);
  }
  return agreements;
}

Agreement Ledger::agree(const Entry& entry) const {
  Agreement agreement;
  const Request& first = request_of(entry);
  agreement.operation = first.operation;
  agreement.priority = first.priority;
  const Operation& operation = agreement.operation;
  std::vector<int> own;
  const std::vector<int>& members = members_of(entry, own);
  RankSet joined;
  for (const int rank : members)
    if (!entry.announced.contains(rank)) joined.add(rank);

  joined.for_each([&](int rank) { agreement.joined.push_back(rank); });
  agreement.message = members.size() > 1 ? unordered_text(entry) : "";
  if (agreement.message.empty()) agreement.message = find_mismatch(entry.variants);
  if (agreement.message.empty() && !joined.empty() && !can_join(operation))
    agreement.message =
        title_of(first) + ": " + ranks_text(joined) +
        " called join(). After join() a rank takes part only in barrier() and in allreduce with Sum, Average or "
        "Adasum: call other operations before it.";
  if (!agreement.message.empty()) {
    agreement.error = ErrorKind::mismatch;
    return agreement;
  }
  agreement.operation.is_registered =
      joined.empty() && std::all_of(entry.variants.begin(), entry.variants.end(),
                                    [](const Variant& one) { return one.request.operation.is_registered; });
  if (operation.kind == OpKind::allgather) agreement.rows = rows_of(entry);
  return agreement;
}

std::vector<std::vector<int64_t>> Ledger::rows_of(const Entry& entry) const {
  const int set = first_of(entry).process_set;
  std::vector<std::vector<int64_t>> rows(first_of(entry).tensors.size(),
                                         std::vector<int64_t>(membership_.ranks(set).size()));
  for (const auto& [request, ranks] : entry.variants)
    ranks.for_each([&, &tensors = request.operation.tensors](int rank) {
      const auto place = static_cast<size_t>(membership_.place(set, rank));
      for (size_t tensor = 0; tensor < rows.size(); ++tensor) rows[tensor][place] = tensors[tensor].shape[0];
    });
  return rows;
}

Agreement Ledger::agree_on_join(const Entry& entry) {
  Agreement agreement;
  agreement.operation = first_of(entry);
  agreement.result = entry.last;
  for (const auto& [request, ranks] : entry.variants)
    agreement.unnamed = std::max(agreement.unnamed, request.operation.numbers[0]);
  return agreement;
}

Agreement Ledger::failed(const Entry& entry, ErrorKind error, std::string message) {
  Agreement agreement;
  agreement.operation = first_of(entry);
  agreement.error = error;
  agreement.message = std::move(message);
  return agreement;
}

Agreement Ledger::refuse(const Entry& entry, const RankSet& ended) {
  return failed(entry, ErrorKind::shut_down,
                title_of(request_of(entry)) + ": " + ranks_text(ended) +
                    " will never submit it: the script has ended there, or has called shutdown(). Do the ranks have "
                    "different numbers of batches? JAX's own sharding needs the same number on all ranks: drop the "
                    "last batches, or pad them.");
}

RankSet Ledger::missing(const Key& key, const Entry& entry) const {
  RankSet ranks;
  std::vector<int> own;
  // Any other rank of the set could send something.
  const bool is_of_set = is_from_any_rank(first_of(entry));
  const auto join = entries_.find({key.first, kJoinName});
  const auto has_joined = [&](int rank) { return join != entries_.end() && join->second.announced.contains(rank); };
  for (const int rank : is_of_set ? membership_.ranks(key.first) : members_of(entry, own))
    if (!entry.announced.contains(rank) && !has_joined(rank)) ranks.add(rank);
  return ranks;
}

std::string Ledger::describe(const Key& key, const Entry& entry, double now) const {
  const RankSet& ready = entry.announced;
  const std::string head =
      title_of(request_of(entry)) + ": waited " + std::to_string(static_cast<int>(now - entry.since)) + " s";
  const std::string absent = missing_text(missing(key, entry));
  if (is_join(key))
    return head + " since the last operation. " + ranks_text(ready) + " joined" + sites_text(entry) + ", " + absent +
           ". Is a rank stuck in something else?";
  return head + ". " + ranks_text(ready) + " submitted it" + sites_text(entry) + ", " + absent +
         ". Do all ranks run the same operations, or is a rank stuck in something else?" +
         (ready.last() == 0 ? " Is it under `if rank() == 0`?" : "");
}

// "rank 1 did not: it is in load() at train.py:17", or "ranks 1-3 did not: rank 1 is in ..., rank 2 is at ...".
std::string Ledger::missing_text(const RankSet& ranks) const {
  constexpr size_t kMost = 4;
  std::string text = ranks_text(ranks) + " did not";
  size_t told = 0;
  ranks.for_each([&](int rank) {
    const auto answer = told == kMost ? answers_.end() : answers_.find(rank);
    if (answer == answers_.end()) return;
    text += (told++ == 0 ? ": " : ", ") + (ranks.size() == 1 ? "it" : "rank " + std::to_string(rank)) + " is " +
            answer->second;
  });
  return text;
}

// Returns "" unless ranks have submitted the operation from one of several threads, whose order is not defined.
std::string Ledger::unordered_text(const Entry& entry) {
  RankSet unordered;
  for (const auto& [request, ranks] : entry.variants)
    if (request.is_unordered) unordered.add(ranks);
  if (unordered.empty()) return "";
  return title_of(request_of(entry)) + ": " + ranks_text(unordered) + " submitted it" + sites_text(entry) +
         " while another thread of the same rank waited for an operation without a name. Operations without a name are "
         "matched by their order, which threads do not keep: give each operation a name that is the same on all ranks.";
}

// Returns " (at train.py:31)", or which ranks submitted the operation where; "" if no rank knows.
std::string Ledger::sites_text(const Entry& entry) {
  std::map<std::string, RankSet> by_site;
  for (const auto& [request, ranks] : entry.variants)
    if (request.site) by_site[*request.site].add(ranks);
  std::string text;
  size_t told = 0;
  for (const auto& [site, ranks] : by_site) {
    if (told++ == kMostTold) break;
    text += (text.empty() ? " (" : "; ") + (by_site.size() > 1 ? ranks_text(ranks) + " " : "") + "at " + site;
  }
  return text.empty() ? text : text + (by_site.size() > kMostTold ? "; and elsewhere)" : ")");
}

// Asked once before the warning and once before the error.
double Ledger::next_question(const Entry& entry) const {
  if (entry.questions == 0) return entry.since + limits_.ask_s;
  const bool is_last = entry.questions > 1 || limits_.shutdown_s == 0;
  return is_last ? kNever : entry.since + std::max(limits_.ask_s, limits_.shutdown_s - answer_s_);
}

double Ledger::next_warning(const Entry& entry) const {
  return entry.is_told || entry.questions == 0 ? kNever
                                               : std::max(entry.since + limits_.warning_s, entry.asked_s + answer_s_);
}

void Ledger::note_answer(int rank, std::string whereabouts) {
  answered_.add(rank);
  has_new_answers_ = true;
  answers_[rank] = std::move(whereabouts);
}

bool Ledger::have_answered(const RankSet& ranks) const {
  bool have_all = true;
  ranks.for_each([&](int rank) { have_all &= answered_.contains(rank); });
  return have_all;
}

// Entries that become due while a question is open share the question.
std::string Ledger::take_question(double now) {
  std::string question;
  if (now < next_deadline()) return question;
  for (auto& [key, entry] : entries_) {
    if (is_new(entry) || now < next_question(entry)) continue;
    if (question.empty() && now >= question_s_ + answer_s_) {
      question = title_of(request_of(entry)) + " waits for " + ranks_text(missing(key, entry));
      question_s_ = now;
      answered_ = {};
    }
    if (entry.questions++ == 0) entry.asked_s = question_s_;
    reschedule(key, entry);
  }
  return question;
}

std::vector<std::string> Ledger::take_warnings(double now) {
  if (!std::exchange(has_new_answers_, false) && now < next_deadline()) return {};
  std::map<RankSet, std::vector<Entries::iterator>> groups;  // by the ranks that are waited for
  for (auto it = entries_.begin(); it != entries_.end(); ++it)
    if (!is_new(it->second)) groups[missing(it->first, it->second)].push_back(it);
  std::vector<std::string> warnings;
  for (auto& [ranks, group] : groups) {
    const auto is_due = [&, answered = have_answered(ranks)](const Entries::iterator& it) {
      const Entry& entry = it->second;
      const bool is_overdue = entry.questions > 0 && now >= entry.since + limits_.warning_s;
      return !entry.is_told && is_overdue && (answered || now >= entry.asked_s + answer_s_);
    };
    if (std::none_of(group.begin(), group.end(), is_due)) continue;
    const auto is_told = [](const Entries::iterator& it) { return it->second.is_told; };
    const bool is_known = std::any_of(group.begin(), group.end(), is_told);
    for (const auto& it : group) {
      it->second.is_told |= is_due(it) || !is_known;
      reschedule(it->first, it->second);
    }
    if (is_known) continue;
    const auto first = *std::min_element(group.begin(), group.end(), [](const auto& a, const auto& b) {
      return std::tie(a->second.since, a->second.order) < std::tie(b->second.since, b->second.order);
    });
    const std::string text = describe(first->first, first->second, now);
    const size_t count = group.size();
    warnings.push_back(count == 1 ? text : std::to_string(count) + " operations wait; the first is " + text);
  }
  return warnings;
}

std::vector<Agreement> Ledger::take_stalled(double now) {
  std::vector<Agreement> agreements;
  if (now < next_deadline()) return agreements;
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (limits_.shutdown_s == 0 || is_new(it->second) || now - it->second.since < limits_.shutdown_s) {
      ++it;
      continue;
    }
    agreements.push_back(failed(it->second, ErrorKind::stalled, describe(it->first, it->second, now)));
    it = erase(it);
  }
  return agreements;
}

std::vector<Agreement> Ledger::take_deadlocked() {
  std::vector<Agreement> agreements;
  const std::string message = describe_deadlock();
  for (const auto& [key, entry] : entries_) agreements.push_back(failed(entry, ErrorKind::deadlock, message));
  while (!entries_.empty()) erase(entries_.begin());
  return agreements;
}

// By the ranks that have announced them, each group in the order of announcement.
Ledger::Groups Ledger::groups_of_ranks() const {
  Groups groups;
  for (auto it = entries_.begin(); it != entries_.end(); ++it)
    if (!is_join(it->first)) groups[it->second.announced].push_back(it);
  for (auto& [ranks, group] : groups)
    std::sort(group.begin(), group.end(),
              [](const auto& a, const auto& b) { return a->second.order < b->second.order; });
  return groups;
}

std::string Ledger::describe_deadlock() const {
  const Groups groups = groups_of_ranks();
  std::string text;
  size_t told = 0;
  for (const auto& [ranks, group] : groups) {
    const Entry& first = group.front()->second;
    if (++told > kMostTold) continue;
    text += (text.empty() ? "" : "; ") + ranks_text(ranks) + " for " + title_of(request_of(first)) + sites_text(first);
    if (group.size() > 1) text += " and " + std::to_string(group.size() - 1) + " more operations";
  }
  if (told > kMostTold) text += "; and others";
  for (const auto& [key, entry] : entries_)
    if (is_join(key)) text += "; " + ranks_text(entry.announced) + " in join()";
  return "deadlock: every rank waits for an operation that another waiting rank has not submitted: " + text + ". " +
         deadlock_hint(groups);
}

// The likely reason, as a question.
std::string Ledger::deadlock_hint(const Groups& groups) {
  const std::string order = "Do all ranks run the same operations in the same order?";
  if (groups.size() < 2) return order;
  const size_t count = groups.begin()->second.size();
  const auto has_as_many = [&](const auto& group) { return group.second.size() == count; };
  if (count > 1 && std::all_of(groups.begin(), groups.end(), has_as_many))
    return "Do all ranks build the same model? The names of their operations differ.";
  const auto of_rank_0 = groups.find(RankSet({0, 0}));
  std::string hint = order;
  if (of_rank_0 != groups.end())
    hint += " Is " + title_of(request_of(of_rank_0->second.front()->second)) + " under `if rank() == 0`?";
  return hint +
         " Do they have different numbers of batches? In PyTorch put the loop into `with hvd.Join(optimizer):`, "
         "elsewhere call hvd.join() after it.";
}

void Ledger::withdraw(const Key& message) {
  const auto it = entries_.find(message);
  if (it != entries_.end()) erase(it);
}

void Ledger::drop(int process_set) {
  auto it = entries_.lower_bound({process_set, ""});
  while (it != entries_.end() && it->first.first == process_set) it = erase(it);
}

}  // namespace ringtrain
