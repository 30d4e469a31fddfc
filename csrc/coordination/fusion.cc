#include "coordination/fusion.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace ringtrain {
namespace {

bool is_fusable(const Agreement& agreement) {
  if (agreement.error != ErrorKind::none || agreement.request.kind != OpKind::allreduce) return false;
  const std::vector<TensorSpec>& tensors = agreement.request.tensors;
  return !tensors.empty() && std::all_of(tensors.begin(), tensors.end(), [&](const TensorSpec& tensor) {
    return tensor.dtype == tensors.front().dtype;
  });
}

// Agreements with equal keys may be joined.
using FusionKey = std::tuple<int32_t, ReduceOp, DType, double, double, bool, bool>;

FusionKey fusion_key(const Request& request) {
  return {request.process_set, request.op,       request.tensors.front().dtype, request.prescale, request.postscale,
          request.is_in_arena, request.is_on_gpu};
}

struct OpenPlan {
  size_t index;
  size_t bytes;
};

std::string title_of(const std::vector<AgreementPtr>& parts) {
  const std::string first = title_of(parts.front()->request);
  return parts.size() == 1 ? first : first + " and " + std::to_string(parts.size() - 1) + " more";
}

}  // namespace

std::vector<PlanPtr> fuse(std::vector<AgreementPtr> agreements, size_t threshold_bytes) {
  std::stable_sort(agreements.begin(), agreements.end(), [](const AgreementPtr& a, const AgreementPtr& b) {
    return a->request.priority > b->request.priority;
  });
  std::vector<std::vector<AgreementPtr>> parts;
  std::map<FusionKey, OpenPlan> open;
  for (AgreementPtr& agreement : agreements) {
    if (is_fusable(*agreement)) {
      const size_t bytes = agreement->request.bytes();
      const FusionKey key = fusion_key(agreement->request);
      const auto it = open.find(key);
      if (it != open.end() && it->second.bytes + bytes <= threshold_bytes) {
        it->second.bytes += bytes;
        parts[it->second.index].push_back(std::move(agreement));
        continue;
      }
      open[key] = {parts.size(), bytes};
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
