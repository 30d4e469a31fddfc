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
using FusionKey = std::tuple<int32_t, ReduceOp, DType, double, double>;

FusionKey fusion_key(const Request& request) {
  return {request.process_set, request.op, request.tensors.front().dtype, request.prescale, request.postscale};
}

struct OpenPlan {
  size_t index;
  size_t bytes;
};

}  // namespace

std::vector<Plan> fuse(std::vector<Agreement> agreements, size_t threshold_bytes) {
  std::stable_sort(agreements.begin(), agreements.end(),
                   [](const Agreement& a, const Agreement& b) { return a.request.priority > b.request.priority; });
  std::vector<Plan> plans;
  std::map<FusionKey, OpenPlan> open;
  for (Agreement& agreement : agreements) {
    if (is_fusable(agreement)) {
      const size_t bytes = agreement.request.bytes();
      const FusionKey key = fusion_key(agreement.request);
      const auto it = open.find(key);
      if (it != open.end() && it->second.bytes + bytes <= threshold_bytes) {
        it->second.bytes += bytes;
        plans[it->second.index].parts.push_back(std::move(agreement));
        continue;
      }
      open[key] = {plans.size(), bytes};
    }
    plans.emplace_back().parts.push_back(std::move(agreement));
  }
  return plans;
}

}  // namespace ringtrain
