// Which way the tensors of a process set take between GPUs, by what all ranks have told of themselves.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/options.h"
#include "base/placement.h"

namespace ringtrain {

// The GPU of a rank, as it tells the others.
struct GpuFacts {
  std::string uuid;          // "": it has none
  std::string slot;          // its node and place on the bus: slices of one GPU have their own UUIDs, and share this
  std::string trouble;       // why it has none
  int32_t devices = 0;       // that this process may use
  int32_t nccl_version = 0;  // 0: it has none
  std::string nccl_trouble;  // why it has none
  bool may_share = false;    // this NCCL lets several ranks use one GPU

  void write_to(Writer& writer) const;
  static GpuFacts read_from(Reader& reader);
};

// Two ranks of one node that work on the same GPU while another one there is idle; null where there are none. Of every
// rank its node, its GPU ("": none) and how many GPUs its process may use.
std::optional<std::pair<int, int>> find_needless_sharing(const std::vector<int>& nodes,
                                                         const std::vector<std::string>& uuids,
                                                         const std::vector<int>& visible);

enum class GpuWay {
  none,          // some rank has no GPU
  nccl,          // among all ranks
  hierarchical,  // NCCL inside the nodes
  staged,        // through host memory
};

struct GpuChoice {
  GpuWay way = GpuWay::none;
  std::string reason;  // why not what was asked for, or why NCCL does not do it; "" if it does
};

// `facts`: of every rank of the world. The same on all ranks.
GpuChoice choose_gpu_way(const Placement& placement, const std::vector<GpuFacts>& facts, const Options& options);

}  // namespace ringtrain
