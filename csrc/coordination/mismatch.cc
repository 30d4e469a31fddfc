#include "coordination/mismatch.h"

#include <algorithm>

namespace ringtrain {
namespace {

using Operations = std::map<int, const Operation*>;

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

// A difference that nobody can see in the message is none.
bool fit(const Factors& a, const Factors& b, OpKind) { return a == b || factors_text(a) == factors_text(b); }

// "" where all fit together, else who did what, each variant once, and the remedy.
template <typename Value>
std::string mismatch_in(const Field<Value>& field, const Operations& operations) {
  if (!field.says) return "";
  std::vector<std::pair<const Value*, std::vector<int>>> variants;
  for (const auto& [rank, operation] : operations) {
    const Value& value = operation->*field.member;
    const auto same = std::find_if(variants.begin(), variants.end(), [&, kind = operation->kind](const auto& variant) {
      return fit(*variant.first, value, kind);
    });
    if (same == variants.end())
      variants.push_back({&value, {rank}});
    else
      same->second.push_back(rank);
  }
  if (variants.size() == 1) return "";
  std::string text;
  for (const auto& [value, ranks] : variants)
    text += (text.empty() ? "" : ", ") + ranks_text(ranks) + " " + field.says(*value);
  return text + ". " + field.remedy;
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (first ? ", " : "") + std::to_string(ranks[first]);
    if (last > first) text += "-" + std::to_string(ranks[last]);
    first = last + 1;
  }
  return text;
}

bool are_alike(const Operation& agreed, const Operation& own) {
  return holds_for_all_fields(
      [&](const auto& field) { return !field.says || fit(agreed.*field.member, own.*field.member, agreed.kind); });
}

std::string find_mismatch(const std::map<int, Request>& requests) {
  Operations operations;
  for (const auto& [rank, request] : requests) operations[rank] = &request.operation;
  std::string text;
  for_each_field([&](const auto& field) {
    if (text.empty()) text = mismatch_in(field, operations);
  });
  return text.empty() ? text : title_of(requests.begin()->second.operation) + ": " + text;
}

}  // namespace ringtrain
