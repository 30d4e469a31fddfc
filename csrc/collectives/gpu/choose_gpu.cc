#include "collectives/gpu/choose_gpu.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace ringtrain {
namespace {

// In the order in which they travel.
template <typename Facts>
auto fields_of(Facts& facts) {
  return std::tie(facts.uuid, facts.slot, facts.trouble, facts.devices, facts.nccl_version, facts.nccl_trouble,
                  facts.may_share);
}

// Two of these ranks of the world that work on one GPU; nothing where each has its own.
std::optional<std::pair<int, int>> find_sharing(const std::vector<int>& ranks, const std::vector<GpuFacts>& facts) {
  std::map<std::string, int> first_with;
  for (const int rank : ranks) {
    const auto [with, is_first] = first_with.emplace(facts[static_cast<size_t>(rank)].slot, rank);
    if (!is_first) return std::make_pair(with->second, rank);
  }
  return std::nullopt;
}

std::string sharing_text(const std::pair<int, int>& ranks, const std::vector<GpuFacts>& facts, const char* why) {
  return "ranks " + std::to_string(ranks.first) + " and " + std::to_string(ranks.second) + " share the GPU of " +
         facts[static_cast<size_t>(ranks.second)].uuid + ", " + why +
         ". Is there a GPU for each rank? See the option gpus_per_rank";
}

// Why NCCL cannot connect these ranks of the world; "" if it can.
std::string why_not_nccl(const std::vector<int>& ranks, const std::vector<GpuFacts>& facts) {
  const int first = ranks.front();
  for (const int rank : ranks) {
    const GpuFacts& own = facts[static_cast<size_t>(rank)];
    const int32_t expected = facts[static_cast<size_t>(first)].nccl_version;
    const std::string name = "rank " + std::to_string(rank);
    if (own.nccl_version == 0) return name + " has no NCCL (" + own.nccl_trouble + ")";
    if (own.nccl_version != expected)
      return name + " has NCCL " + std::to_string(own.nccl_version) + ", but rank " + std::to_string(first) + " has " +
             std::to_string(expected) + ": install the same version everywhere";
  }
  // Every rank looks at the GPUs of all.
  const bool all_may_share =
      std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return facts[static_cast<size_t>(rank)].may_share; });
  const auto shared = find_sharing(ranks, facts);
  if (shared && !all_may_share) return sharing_text(*shared, facts, "which NCCL allows from 2.30 on");
  return "";
}

// Why NCCL is not taken unless it is asked for; "" if it is. Kernels of two processes on one GPU take turns, and in its
// turn a kernel of NCCL waits for the other: on an H200 a training step of two ranks took 8 times as long as without
// communication, and 1.2 times through host memory.
std::string why_not_by_default(const std::vector<int>& ranks, const std::vector<GpuFacts>& facts) {
  std::string reason = why_not_nccl(ranks, facts);
  const auto shared = find_sharing(ranks, facts);
  if (reason.empty() && shared)
    reason =
        sharing_text(*shared, facts, "where kernels take turns and NCCL is slow; gpu_algorithm=nccl takes it anyway");
  return reason;
}

std::vector<std::vector<int>> ranks_of_nodes(const Placement& placement) {
  std::vector<std::vector<int>> all;
  for (const int node : placement.distinct_nodes()) {
    std::vector<int>& ranks = all.emplace_back();
    for (const int place : placement.on_node(node)) ranks.push_back(placement.ranks[static_cast<size_t>(place)]);
  }
  return all;
}

}  // namespace

void GpuFacts::write_to(Writer& writer) const {
  std::apply([&](const auto&... fields) { (writer.put(fields), ...); }, fields_of(*this));
}

GpuFacts GpuFacts::read_from(Reader& reader) {
  GpuFacts facts;
  std::apply([&](auto&... fields) { (reader.get(fields), ...); }, fields_of(facts));
  return facts;
}

std::optional<std::pair<int, int>> find_needless_sharing(const std::vector<int>& nodes,
                                                         const std::vector<std::string>& uuids,
                                                         const std::vector<int>& visible) {
  std::map<int, std::map<std::string, int>> first_on;  // by node and GPU
  for (size_t rank = 0; rank < nodes.size(); ++rank)
    if (!uuids[rank].empty()) first_on[nodes[rank]].emplace(uuids[rank], static_cast<int>(rank));
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    if (uuids[rank].empty()) continue;
    const std::map<std::string, int>& used = first_on[nodes[rank]];
    const int first = used.at(uuids[rank]);
    if (first != static_cast<int>(rank) && used.size() < static_cast<size_t>(visible[rank]))
      return std::make_pair(first, static_cast<int>(rank));
  }
  return std::nullopt;
}

GpuChoice choose_gpu_way(const Placement& placement, const std::vector<GpuFacts>& facts, const Options& options) {
  for (const int rank : placement.ranks) {
    const GpuFacts& own = facts[static_cast<size_t>(rank)];
    if (own.uuid.empty()) return {GpuWay::none, "rank " + std::to_string(rank) + " has no GPU: " + own.trouble};
  }
  if (options.gpu_algorithm == "staged") return {GpuWay::staged, ""};
  const std::string plain = options.socket_encryption == "on" && !placement.is_on_one_node()
                                ? "NCCL does not encrypt what it sends between hosts, and socket_encryption is on"
                                : "";
  if (options.gpu_algorithm == "hierarchical" && !placement.is_on_one_node()) {
    std::string reason = options.gpu_cross_algorithm == "nccl" ? plain : "";
    if (reason.empty() && options.gpu_cross_algorithm == "nccl") reason = why_not_nccl(placement.ranks, facts);
    for (const std::vector<int>& ranks : ranks_of_nodes(placement))
      if (reason.empty()) reason = why_not_nccl(ranks, facts);
    return {reason.empty() ? GpuWay::hierarchical : GpuWay::staged, reason};
  }
  const bool is_default = options.gpu_algorithm == "auto";
  std::string reason = plain;
  if (reason.empty())
    reason = is_default ? why_not_by_default(placement.ranks, facts) : why_not_nccl(placement.ranks, facts);
  if (reason.empty()) return {GpuWay::nccl, ""};
  return {options.gpu_algorithm == "nccl" ? GpuWay::none : GpuWay::staged, reason};
}

}  // namespace ringtrain
