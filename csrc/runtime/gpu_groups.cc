#include "runtime/gpu_groups.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "collectives/choose.h"
#include "collectives/gpu/nccl_group.h"
#include "collectives/gpu/staged_group.h"

namespace ringtrain {
namespace {

template <typename Value>
int place_of(const std::vector<Value>& values, const Value& value) {
  return static_cast<int>(std::find(values.begin(), values.end(), value) - values.begin());
}

}  // namespace

void GpuGroups::set_up(GpuTensors* tensors, const NcclLibrary* nccl, std::shared_ptr<NcclMemory> memory) {
  tensors_ = tensors;
  if (tensors && nccl) nccl_ = std::make_shared<NcclCaller>(*nccl, tensors->gpu(), watch_);
  memory_ = std::move(memory);
}

void GpuGroups::make(GpuWay way, int process_set, const Placement& placement) {
  if (way == GpuWay::nccl) make_nccl(process_set, placement);
  if (way == GpuWay::hierarchical) make_hierarchy(process_set, placement);
  if (way == GpuWay::staged) make_staged(process_set, placement);
}

void GpuGroups::make_nccl(int process_set, const Placement& placement) {
  Seat seat;
  if (placement.own >= 0) seat = {0, placement.own, static_cast<int>(placement.ranks.size())};
  std::unique_ptr<NcclGroup> nccl = connect(process_set, seat);
  NcclGroup* own = nccl.get();
  if (own) {
    if (process_set == 0) of_world_ = communicators_[0].front();
    own->set_fallback(make_staged_group(process_set, false));
    tensors_->set_group(process_set, std::move(nccl));
  }
  const bool all_know_memory = fabric_.channel().all_agree(!own || own->packed().prepare());
  if (!own) return;
  if (!all_know_memory) own->packed().drop();
  own->probe_packing(watch_);
}

void GpuGroups::make_hierarchy(int process_set, const Placement& placement) {
  Seat on_node, across;
  const int owners = placement.fewest_ranks_on_a_node();
  if (placement.own >= 0) {
    const int node = placement.own_node(), place = placement.place_on_node();
    const std::vector<int> nodes = placement.distinct_nodes();
    on_node = {node, place, static_cast<int>(placement.on_node(node).size())};
    if (place < owners) across = {place, place_of(nodes, node), static_cast<int>(nodes.size())};
  }
  GpuHierarchy::Parts parts;
  parts.owners = owners;
  parts.node = connect(process_set, on_node);
  parts.cross = make_cross(process_set, placement, across);
  if (placement.own < 0) return;
  tensors_->set_group(process_set,
                      std::make_unique<GpuHierarchy>(std::move(parts), make_staged_group(process_set, false),
                                                     tensors_->gpu(), tensors_->pool()));
}

std::unique_ptr<Group> GpuGroups::make_cross(int process_set, const Placement& placement, const Seat& seat) {
  if (options_.gpu_cross_algorithm == "nccl") return connect(process_set, seat);
  if (seat.color == NcclComm::kNoColor) return nullptr;
  std::vector<int> ranks;
  for (const int node : placement.distinct_nodes())
    ranks.push_back(placement.ranks[static_cast<size_t>(placement.on_node(node)[static_cast<size_t>(seat.color)])]);
  const int tag = kFirstGroupTag + process_set % kGroupTags;
  const auto peers = [&] { return Endpoint(*fabric_.network(), ranks, seat.place, tag, &watch_); };
  auto staged = std::make_unique<StagedGroup>(
      make_network_group(options_.cross_algorithm, peers(), tuning_, wire_dtype(options_)), tensors_->relay(), false);
  if (options_.gpu_cross_algorithm == "mpi") return staged;
  const LibraryCollectives* const library = fabric_.network()->collectives();
  if (library && library->denies_cuda() && placement.own == 0)
    warn("gpu_cross_algorithm is cuda_aware_mpi, but this MPI says that it takes no addresses of GPUs: it may crash");
  return std::make_unique<CudaMpiGroup>(peers(), tensors_->gpu(), std::move(staged));
}

// On one node the parts lie where all of its ranks can read them, if all have room there.
void GpuGroups::make_staged(int process_set, const Placement& placement) {
  const bool is_member = placement.own >= 0;
  const bool use_arena = fabric_.channel().all_agree(!is_member || tensors_->relay().prepare());
  if (!is_member) return;
  tensors_->set_group(process_set, make_staged_group(process_set, use_arena));
}

// Through host memory.
std::unique_ptr<Group> GpuGroups::make_staged_group(int process_set, bool use_arena) {
  return std::make_unique<StagedGroup>(sets_.shared_group(process_set), tensors_->relay(), use_arena);
}

std::unique_ptr<NcclGroup> GpuGroups::connect(int process_set, const Seat& seat) {
  const bool is_member = seat.color != NcclComm::kNoColor;
  std::unique_ptr<NcclComm> comm;
  if (of_world_) {
    finish_work();  // NCCL wants a communicator without work under way
    comm = of_world_->split(seat.color, seat.place, seat.place, seat.size);
  } else {
    const NcclId id = agree_on_id(seat);
    if (is_member) comm = NcclComm::make(nccl_, id, seat.place, seat.size);
  }
  if (!comm) return nullptr;
  auto& own = communicators_[process_set].emplace_back(std::move(comm));
  return std::make_unique<NcclGroup>(own, tensors_->pool(), memory_, process_set);
}

// The first rank of each color makes one, and all ranks of the color get it.
NcclId GpuGroups::agree_on_id(const Seat& seat) {
  struct Offer {
    int color;
    NcclId id;
  };
  Offer own = {seat.color, {}};
  const bool is_first = seat.color != NcclComm::kNoColor && seat.place == 0;
  if (is_first) own.id = NcclComm::new_id(*nccl_);
  Writer offer, all;
  if (is_first) offer.put(own);
  for (const Bytes& bytes : fabric_.channel().gather(offer.take())) {
    Reader reader(bytes);
    if (!reader.at_end()) all.put(reader.get<Offer>());
  }
  const Bytes told = fabric_.channel().broadcast(all.take());
  for (Reader reader(told); !reader.at_end();) {
    const auto one = reader.get<Offer>();
    if (one.color == seat.color) return one.id;
  }
  return {};
}

void GpuGroups::finish_work() {
  if (tensors_) tensors_->gpu()->wait(*tensors_->gpu()->record(tensors_->gpu()->stream()), watch_);
}

void GpuGroups::close(int process_set) {
  finish_work();
  if (tensors_) tensors_->drop_group(process_set);
  if (process_set == 0) of_world_.reset();
  for (const auto& comm : communicators_[process_set]) comm->close();
  communicators_.erase(process_set);
}

void GpuGroups::require_well() const {
  for (const auto& [process_set, comms] : communicators_)
    for (const auto& comm : comms) comm->require_well();
}

void GpuGroups::abort() {
  std::vector<NcclComm*> all;
  for (const auto& [process_set, comms] : communicators_)
    for (const auto& comm : comms) all.push_back(comm.get());
  NcclComm::abort(all);
}

}  // namespace ringtrain
