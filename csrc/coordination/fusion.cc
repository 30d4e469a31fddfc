#include "coordination/fusion.h"

#include <algorithm>
#include <numeric>

namespace ringtrain {
namespace {

// Whatever their dtypes. An alltoall does so, too, but no rank knows what the others send.
bool only_moves_bytes(const Operation& operation) {
  return operation.kind == OpKind::broadcast || operation.kind == OpKind::allgather;
}

bool is_fusable(const Agreement& agreement) {
  const std::vector<TensorSpec>& tensors = agreement.operation.tensors;
  if (agreement.error != ErrorKind::none || tensors.empty()) return false;
  if (only_moves_bytes(agreement.operation)) return true;
  return agreement.operation.kind == OpKind::allreduce &&
         std::all_of(tensors.begin(), tensors.end(),
                     [&](const TensorSpec& tensor) { return tensor.dtype == tensors.front().dtype; });
}

// Whether two such operations can be done as one.
bool can_be_joined(const Operation& a, const Operation& b) {
  const bool are_alike = only_moves_bytes(a) || a.tensors.front().dtype == b.tensors.front().dtype;
  return are_alike && holds_for_all_fields(
                          [&](const auto& field) { return !field.splits_plans || a.*field.member == b.*field.member; });
}

// The same on all ranks, whatever rows each of them gives.
size_t bytes_of(const Agreement& agreement) {
  if (agreement.operation.kind != OpKind::allgather) return agreement.operation.bytes();
  size_t bytes = 0;
  for (size_t t = 0; t < agreement.rows.size(); ++t) {
    const std::vector<int64_t>& rows = agreement.rows[t];
    bytes += static_cast<size_t>(std::accumulate(rows.begin(), rows.end(), int64_t{0})) *
             agreement.operation.tensors[t].row_bytes();
  }
  return bytes;
}

struct OpenPlan {
  const Operation* like;  // what can be joined to this one
  size_t index, bytes;
};

std::string title_of(const std::vector<AgreementPtr>& parts) {
  const std::string first = title_of(parts.front()->operation);
  return parts.size() == 1 ? first : first + " and " + std::to_string(parts.size() - 1) + " more";
}

}  // namespace

std::vector<PlanPtr> fuse(std::vector<AgreementPtr> agreements, size_t threshold_bytes) {
  std::stable_sort(agreements.begin(), agreements.end(),
                   [](const AgreementPtr& a, const AgreementPtr& b) { return a->priority > b->priority; });
  std::vector<std::vector<AgreementPtr>> parts;
  std::vector<OpenPlan> open;
  for (AgreementPtr& agreement : agreements) {
    if (is_fusable(*agreement)) {
      const Operation& operation = agreement->operation;
      const size_t bytes = bytes_of(*agreement);
      const auto it = std::find_if(open.begin(), open.end(),
                                   [&](const OpenPlan& plan) { return can_be_joined(*plan.like, operation); });
      if (it != open.end() && it->bytes + bytes <= threshold_bytes) {
        it->bytes += bytes;
        parts[it->index].push_back(std::move(agreement));
        continue;
      }
      const OpenPlan plan = {&operation, parts.size(), bytes};
      if (it == open.end())
        open.push_back(plan);
      else
        *it = plan;
    }
    parts.emplace_back().push_back(std::move(agreement));
  }
  std::vector<PlanPtr> plans;
  for (std::vector<AgreementPtr>& of_plan : parts) {
    std::string title = title_of(of_plan);
    plans.push_back(std::make_shared<const Plan>(Plan{std::move(of_plan), std::move(title)}));
  }
  return plans;
}

}  // namespace ringtrain
