#include "runtime/gpus.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "collectives/choose.h"
#include "collectives/gpu/staged_group.h"

namespace ringtrain {
namespace {

template <typename Value>
int place_of(const std::vector<Value>& values, const Value& value) {
  return static_cast<int>(std::find(values.begin(), values.end(), value) - values.begin());
}

// With which NCCL lets several ranks use one GPU, and the first version that knows it.
constexpr const char* kAllowSharing = "NCCL_MULTI_RANK_GPU_ENABLE";
constexpr int kSharesFrom = 23000;
constexpr double kMoment_s = 1e-3;

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
  tensors_->set_group(process_set, std::make_unique<GpuHierarchy>(std::move(parts), sets_.shared_group(process_set),
                                                                  tensors_->relay(), tensors_->pool()));
}

std::unique_ptr<Group> GpuGroups::make_cross(int process_set, const Placement& placement, const Seat& seat) {
  if (options_.gpu_cross_algorithm == "nccl") return connect(process_set, seat);
  if (seat.color == NcclComm::kNoColor) return nullptr;
  const std::vector<int> ranks = placement.column(static_cast<size_t>(seat.color));
  const int tag = kFirstGroupTag + process_set % kGroupTags;
  const auto peers = [&] { return Endpoint(*fabric_.network(), ranks, seat.place, tag, &watch_); };
  auto host = make_network_group(peers(), tuning_, cross_setup(placement, options_));
  if (options_.gpu_cross_algorithm == "mpi")
    return std::make_unique<StagedGroup>(std::move(host), tensors_->relay(), false);
  const LibraryCollectives* const library = fabric_.network()->collectives();
  if (library && library->denies_cuda() && placement.own == 0)
    warn("gpu_cross_algorithm is cuda_aware_mpi, but this MPI says that it takes no addresses of GPUs: it may crash");
  return std::make_unique<CudaMpiGroup>(peers(), std::move(host), tensors_->relay());
}

// On one node the parts are where all of its ranks can read them, if all have room there.
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
    finish_work();  // NCCL needs a communicator without work under way
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
  for (const Bytes& bytes : fabric_.channel().gather_by_rank(offer.take())) {
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

Gpus::Gpus(const World& world, const Options& options, const Tuning& tuning, Resources& resources, Fabric& fabric,
           ProcessSets& sets)
    : world_(world),
      options_(options),
      resources_(resources),
      fabric_(fabric),
      sets_(sets),
      watch_(*this),
      groups_(options, tuning, fabric, sets, watch_),
      backlog_({options.stall_warning_time_s, options.stall_shutdown_time_s}) {}

GpuPtr Gpus::own_gpu() {
  const Lock lock(mutex_);
  return gpu_;
}

GpuPtr Gpus::use(int ordinal) {
  const Lock lock(mutex_);
  if (!gpu_) gpu_ = resources_.gpu(ordinal);
  if (gpu_->ordinal() != ordinal)
    throw invalid("an array is on GPU " + std::to_string(ordinal) + ", but this rank works on GPU " +
                  std::to_string(gpu_->ordinal()) +
                  ": ringtrain uses one GPU for each rank. Copy the array there, or " + "make GPU " +
                  std::to_string(ordinal) + " the current one before the first operation");
  return gpu_;
}

std::shared_ptr<NcclMemory> Gpus::nccl_memory() {
  const Lock lock(mutex_);
  if (!memory_) memory_ = resources_.nccl_memory(NcclLibrary::open(world_.nccl), gpu_);
  return memory_;
}

std::shared_ptr<char> Gpus::allocate(int ordinal, size_t bytes) {
  use(ordinal);
  if (options_.gpu_algorithm == "staged") return nullptr;
  try {
    return nccl_memory()->allocate(bytes);
  } catch (const Error&) {
    return nullptr;  // no NCCL
  }
}

bool Gpus::is_registered(int process_set, const void* memory, size_t bytes) {
  std::shared_ptr<NcclMemory> own;
  {
    const Lock lock(mutex_);
    own = memory_;
  }
  return own && own->is_registered(memory, bytes, process_set);
}

int Gpus::usual_ordinal() const {
  const int devices = CudaDriver::get().devices();
  if (devices == 0) throw failure("the CUDA driver shows none (CUDA_VISIBLE_DEVICES)");
  if (world_.gpu >= 0) return world_.gpu;
  return world_.place_on_node(world_.rank) * static_cast<int>(options_.gpus_per_rank) % devices;
}

// ------------------------------------------------------------------------------------------------------------ opening

const std::string& Gpus::open(int process_set) {
  const auto known = troubles_.find(process_set);
  if (known != troubles_.end()) return known->second;
  if (!has_met_) meet();
  const Placement placement = sets_.place(process_set);
  const GpuChoice choice = choose_gpu_way(placement, facts_, options_);
  std::string& trouble = troubles_[process_set];
  if (choice.way == GpuWay::none) {
    trouble = choice.reason;
    return trouble;
  }
  if (!choice.reason.empty()) warn_of_staging(choice.reason, placement);
  const auto current = make_current();
  groups_.make(choice.way, process_set, placement);
  return trouble;
}

Gpu::Current Gpus::make_current() const { return Gpu::Current(tensors_ ? tensors_->gpu().get() : nullptr); }

const char* Gpus::name_of_group(int process_set) const {
  return tensors_ && tensors_->has_group(process_set) ? tensors_->group(process_set).name() : "gpu";
}

// Everybody tells all others what there is.
void Gpus::meet() {
  Writer own;
  own_facts().write_to(own);
  Writer all;
  for (const Bytes& bytes : fabric_.channel().gather_by_rank(own.take())) {
    Reader reader(bytes);
    GpuFacts::read_from(reader).write_to(all);
  }
  const Bytes told = fabric_.channel().broadcast(all.take());
  Reader reader(told);
  for (int rank = 0; rank < world_.size(); ++rank) facts_.push_back(GpuFacts::read_from(reader));
  if (const GpuPtr gpu = own_gpu()) tensors_ = GpuTensors::of(gpu, fabric_.arena().get(), sets_, backlog_, watch_);
  groups_.set_up(tensors_.get(), nccl_, nccl_ ? nccl_memory() : nullptr);
  if (world_.rank == 0 && world_.looks_for_sharing) warn_of_sharing();
  allow_sharing();
  has_met_ = true;
}

GpuFacts Gpus::own_facts() {
  GpuFacts facts;
  try {
    GpuPtr gpu = own_gpu();
    if (!gpu) gpu = use(usual_ordinal());
    facts.devices = gpu->driver().devices();
    facts.uuid = gpu->uuid();
    const int node = world_.nodes[static_cast<size_t>(world_.rank)];
    facts.slot = std::to_string(node) + " " + gpu->driver().bus_id(gpu->ordinal());
  } catch (const Error& error) {
    facts.trouble = error.what();
    return facts;
  }
  if (options_.gpu_algorithm == "staged") return facts;
  try {
    nccl_ = &NcclLibrary::open(world_.nccl);
    facts.nccl_version = nccl_->version();
    const char* allowed = std::getenv(kAllowSharing);
    facts.may_share = nccl_->version() >= kSharesFrom && (!allowed || std::string(allowed) == "1");
  } catch (const Error& error) {
    facts.nccl_trouble = error.what();
  }
  return facts;
}

// Once in a job, by the first rank that it concerns.
void Gpus::warn_of_staging(const std::string& reason, const Placement& placement) {
  if (!has_warned_of_staging_ && world_.rank == placement.ranks.front())
    warn("arrays on GPUs pass through host memory, which is slower: " + reason);
  has_warned_of_staging_ = true;
}

void Gpus::warn_of_sharing() const {
  std::vector<std::string> uuids;
  std::vector<int> visible;
  for (const GpuFacts& facts : facts_) {
    uuids.push_back(facts.uuid);
    visible.push_back(facts.devices);
  }
  const auto pair = find_needless_sharing(world_.nodes, uuids, visible);
  if (!pair) return;
  const auto second = static_cast<size_t>(pair->second);
  warn("ranks " + std::to_string(pair->first) + " and " + std::to_string(pair->second) + " share " + uuids[second] +
       ", although they see " + std::to_string(visible[second]) +
       " GPUs: make that of local_rank() the current one before the first array is made on a GPU");
}

// Before NCCL looks at it.
void Gpus::allow_sharing() const {
  std::set<std::string> seen;
  for (const GpuFacts& facts : facts_) {
    if (facts.uuid.empty() || seen.insert(facts.slot).second || !facts.may_share) continue;
    setenv(kAllowSharing, "1", 0);
    return;
  }
}

// ---------------------------------------------------------------------------------------------------------- the end

void Gpus::close(int process_set) {
  const auto current = make_current();
  if (troubles_.erase(process_set)) groups_.close(process_set);
}

void Gpus::look() {
  constexpr double kPause_s = 0.01;
  if (backlog_.is_empty() || now_s() < next_look_s_) return;
  next_look_s_ = now_s() + kPause_s;
  groups_.require_well();
  const auto current = make_current();
  backlog_.look();
}

void Gpus::Watchful::check(double waited_s) {
  try {
    gpus_.fabric_.watch().check(waited_s);
  } catch (const Error& error) {
    turn.assert_held();  // only who has it waits for the GPU
    gpus_.abort(error);
    throw;
  }
}

void Gpus::abort(const Error& reason) {
  if (!tensors_) return;
  const auto current = make_current();
  backlog_.fail(reason);
  groups_.abort();
}

void Gpus::leave() {
  if (!tensors_) return;
  for (; !backlog_.is_empty(); Waiter::nap(kMoment_s)) {
    look();
    fabric_.watch().look();
  }
  while (!troubles_.empty()) close(troubles_.begin()->first);
}

}  // namespace ringtrain
