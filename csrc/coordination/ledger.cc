#include "coordination/ledger.h"

#include <algorithm>
#include <limits>

#include "coordination/mismatch.h"

namespace ringtrain {

namespace {

Operation join_of(int process_set) {
  Operation join;
  join.kind = OpKind::join;
  join.name = kJoinName;
  join.process_set = process_set;
  return join;
}

}  // namespace

bool Ledger::can_join(const Operation& operation) {
  if (operation.kind == OpKind::barrier) return true;
  const bool ignores_zeros =
      operation.op == ReduceOp::average || operation.op == ReduceOp::sum || operation.op == ReduceOp::adasum;
  return operation.kind == OpKind::allreduce && ignores_zeros;
}

void Ledger::announce(int rank, const Request& request, double since) {
  const Operation& operation = request.operation;
  if (!membership_.has(operation.process_set)) return;  // removed while this was under way; its submitter was told
  if (operation.kind == OpKind::join) return join(rank, operation);
  const Key key = key_of(operation);
  Entry& entry = entries_[key];
  if (entry.announced.empty()) {
    entry.since = since;
    entry.order = announcements_++;
  }
  entry.since = std::min(entry.since, since);
  entry.announced[rank] = request;
  changed_.insert(key);
}

void Ledger::join(int rank, const Operation& operation) {
  Join& join = joins_[operation.process_set];
  join.ranks.push_back(rank);
  join.unnamed = std::max(join.unnamed, operation.numbers[0]);
  for (const auto& [key, entry] : entries_)
    if (key.first == operation.process_set) changed_.insert(key);
}

bool Ledger::has_joined(int process_set, int rank) const {
  const auto join = joins_.find(process_set);
  if (join == joins_.end()) return false;
  const std::vector<int>& ranks = join->second.ranks;
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

bool Ledger::is_complete(const Key& key, const Entry& entry) const {
  const std::vector<int>& members = membership_.ranks(key.first);
  return std::all_of(members.begin(), members.end(),
                     [&](int rank) { return entry.announced.count(rank) || has_joined(key.first, rank); });
}

std::vector<Agreement> Ledger::take_agreed() {
  std::vector<std::pair<uint64_t, Agreement>> complete;
  for (const Key& key : changed_) {
    const auto it = entries_.find(key);
    if (it == entries_.end() || !is_complete(key, it->second)) continue;
    complete.emplace_back(it->second.order, agree(it->second));
    entries_.erase(it);
  }
  changed_.clear();
  std::sort(complete.begin(), complete.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Agreement> agreements;
  for (auto& [order, agreement] : complete) agreements.push_back(std::move(agreement));
  for (Agreement& join : take_joins()) agreements.push_back(std::move(join));
  return agreements;
}

Agreement Ledger::agree(const Entry& entry) const {
  Agreement agreement;
  const Request& first = entry.announced.begin()->second;
  agreement.operation = first.operation;
  agreement.priority = first.priority;
  const Operation& operation = agreement.operation;
  const std::vector<int>& members = membership_.ranks(operation.process_set);
  std::vector<int> joined;
  for (const int rank : members)
    if (!entry.announced.count(rank)) joined.push_back(rank);

  agreement.joined = joined;
  agreement.message = find_mismatch(entry.announced);
  if (agreement.message.empty() && !joined.empty() && !can_join(operation))
    agreement.message = title_of(operation) + ": " + ranks_text(joined) +
                        " called join(), after which only allreduce with Sum, Average or Adasum and barrier can go on.";
  if (!agreement.message.empty()) {
    agreement.error = ErrorKind::mismatch;
    return agreement;
  }
  agreement.operation.is_registered =
      joined.empty() && std::all_of(entry.announced.begin(), entry.announced.end(),
                                    [](const auto& announced) { return announced.second.operation.is_registered; });
  if (operation.kind != OpKind::allgather) return agreement;
  for (size_t tensor = 0; tensor < operation.tensors.size(); ++tensor) {
    std::vector<int64_t>& rows = agreement.rows.emplace_back();
    for (const int rank : members) rows.push_back(entry.announced.at(rank).operation.tensors[tensor].shape[0]);
  }
  return agreement;
}

std::vector<Agreement> Ledger::take_joins() {
  std::vector<Agreement> agreements;
  for (auto it = joins_.begin(); it != joins_.end();) {
    const auto& [process_set, join] = *it;
    if (join.ranks.size() < membership_.ranks(process_set).size()) {
      ++it;
      continue;
    }
    Agreement& agreement = agreements.emplace_back();
    agreement.operation = join_of(process_set);
    agreement.result = join.ranks.back();
    agreement.unnamed = join.unnamed;
    it = joins_.erase(it);
  }
  return agreements;
}

std::string Ledger::describe(const Key& key, const Entry& entry, double now) const {
  std::vector<int> ready, missing;
  for (const int rank : membership_.ranks(key.first)) {
    if (entry.announced.count(rank))
      ready.push_back(rank);
    else if (!has_joined(key.first, rank))
      missing.push_back(rank);
  }
  const Operation& operation = entry.announced.begin()->second.operation;
  return title_of(operation) + ": waited " + std::to_string(static_cast<int>(now - entry.since)) + " s. " +
         ranks_text(ready) + " submitted it" + sites_text(entry) + ", " + ranks_text(missing) +
         " did not. Do all ranks run the same operations, or is a rank stuck in something else?";
}

// " (at train.py:31)", or which ranks did where; nothing if nobody knows.
std::string Ledger::sites_text(const Entry& entry) {
  std::map<std::string, std::vector<int>> by_site;
  for (const auto& [rank, request] : entry.announced)
    if (request.site) by_site[*request.site].push_back(rank);
  std::string text;
  for (const auto& [site, ranks] : by_site)
    text += (text.empty() ? " (" : "; ") + (by_site.size() > 1 ? ranks_text(ranks) + " " : "") + "at " + site;
  return text.empty() ? text : text + ")";
}

std::vector<Agreement> Ledger::take_stalled(double now, double limit_s) {
  std::vector<Agreement> agreements;
  for (auto it = entries_.begin(); it != entries_.end();) {
    const bool is_new = it->second.order >= first_of_round_;
    if (limit_s == 0 || is_new || now - it->second.since < limit_s) {
      ++it;
      continue;
    }
    Agreement& agreement = agreements.emplace_back();
    agreement.operation = it->second.announced.begin()->second.operation;
    agreement.error = ErrorKind::stalled;
    agreement.message = describe(it->first, it->second, now);
    it = entries_.erase(it);
  }
  return agreements;
}

std::vector<Agreement> Ledger::take_deadlocked() {
  std::vector<Agreement> agreements;
  const std::string message = describe_deadlock();
  const auto fail = [&](Operation operation) {
    Agreement& agreement = agreements.emplace_back();
    agreement.operation = std::move(operation);
    agreement.error = ErrorKind::deadlock;
    agreement.message = message;
  };
  for (const auto& [key, entry] : entries_) fail(entry.announced.begin()->second.operation);
  for (const auto& [process_set, join] : joins_) fail(join_of(process_set));
  entries_.clear();
  joins_.clear();
  return agreements;
}

std::string Ledger::describe_deadlock() const {
  constexpr size_t kMost = 8;
  std::string text;
  size_t told = 0;
  for (const auto& [key, entry] : entries_) {
    if (++told > kMost) continue;
    std::vector<int> ready;
    for (const auto& [rank, request] : entry.announced) ready.push_back(rank);
    text += (text.empty() ? "" : "; ") + ranks_text(ready) + " for " +
            title_of(entry.announced.begin()->second.operation) + sites_text(entry);
  }
  if (told > kMost) text += "; and " + std::to_string(told - kMost) + " more operations";
  for (const auto& [process_set, join] : joins_) text += "; " + ranks_text(join.ranks) + " in join()";
  return "deadlock: every rank waits, and none of these operations can be complete without something that a waiting "
         "rank would have to submit: " +
         text + ". Do all ranks run the same operations in the same order?";
}

std::vector<std::string> Ledger::take_warnings(double now, double limit_s) {
  std::vector<std::string> warnings;
  for (auto& [key, entry] : entries_) {
    if (entry.has_warned || now - entry.since < limit_s) continue;
    entry.has_warned = true;
    warnings.push_back(describe(key, entry, now));
  }
  return warnings;
}

double Ledger::next_deadline(double warning_s, double shutdown_s) const {
  double next = std::numeric_limits<double>::infinity();
  for (const auto& [key, entry] : entries_) {
    if (!entry.has_warned) next = std::min(next, entry.since + warning_s);
    if (shutdown_s > 0) next = std::min(next, entry.since + shutdown_s);
  }
  return next;
}

void Ledger::drop(int process_set) {
  joins_.erase(process_set);
  for (auto it = entries_.begin(); it != entries_.end();)
    it = it->first.first == process_set ? entries_.erase(it) : std::next(it);
}

}  // namespace ringtrain
