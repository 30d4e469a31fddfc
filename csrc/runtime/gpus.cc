#include "runtime/gpus.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "collectives/cuda_mpi_group.h"
#include "collectives/either_group.h"
#include "collectives/gpu_hierarchy.h"
#include "collectives/packing_contest.h"
#include "collectives/staged_group.h"

namespace ringtrain {
namespace {

// With which NCCL lets several ranks use one GPU, and the first version that knows it.
constexpr const char* kAllowSharing = "NCCL_MULTI_RANK_GPU_ENABLE";
constexpr int kSharesFrom = 23000;
constexpr double kMoment_s = 1e-3;

template <typename Value>
int place_of(const std::vector<Value>& values, const Value& value) {
  return static_cast<int>(std::find(values.begin(), values.end(), value) - values.begin());
}

}  // namespace

Gpus::Gpus(const World& world, const Options& options, const Tuning& tuning, Fabric& fabric, ProcessSets& sets)
    : world_(world),
      options_(options),
      tuning_(tuning),
      fabric_(fabric),
      sets_(sets),
      watch_(*this),
      backlog_({options.stall_warning_time_s, options.stall_shutdown_time_s}) {}

// The driver waits for the GPU when memory is given back. Where that would be for ever, since what an operation waits
// for never ends, the memory stays.
Gpus::~Gpus() {
  if (has_given_up_ && tensors_ && !tensors_->is_soon_idle()) tensors_.release();
}

GpuPtr Gpus::own_gpu() {
  const std::lock_guard lock(mutex_);
  return gpu_;
}

GpuPtr Gpus::use(int ordinal) {
  const std::lock_guard lock(mutex_);
  if (!gpu_) gpu_ = Gpu::open(ordinal);
  if (gpu_->ordinal() != ordinal)
    throw invalid("an array lies on GPU " + std::to_string(ordinal) + ", but this rank works on GPU " +
                  std::to_string(gpu_->ordinal()) +
                  ": ringtrain uses one GPU for each rank. Copy the array there, or " + "make GPU " +
                  std::to_string(ordinal) + " the current one before the first operation");
  return gpu_;
}

std::shared_ptr<NcclMemory> Gpus::nccl_memory() {
  const std::lock_guard lock(mutex_);
  if (!memory_) memory_ = NcclMemory::of(NcclLibrary::open(world_.nccl), gpu_);
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
  const Placement placement = world_.place(sets_.membership().ranks(process_set));
  const GpuChoice choice = choose_gpu_way(placement, facts_, options_);
  std::string& trouble = troubles_[process_set];
  if (choice.way == GpuWay::none) {
    trouble = choice.reason;
    return trouble;
  }
  if (!choice.reason.empty()) warn_of_staging(choice.reason, placement);
  const auto current = make_current();
  if (choice.way == GpuWay::nccl) make_nccl(process_set, placement);
  if (choice.way == GpuWay::hierarchical) make_hierarchy(process_set, placement);
  if (choice.way == GpuWay::staged) make_staged(process_set, placement);
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
  for (const Bytes& bytes : fabric_.channel().gather(own.take())) {
    Reader reader(bytes);
    GpuFacts::read_from(reader).write_to(all);
  }
  const Bytes told = fabric_.channel().broadcast(all.take());
  Reader reader(told);
  for (int rank = 0; rank < world_.size(); ++rank) facts_.push_back(GpuFacts::read_from(reader));
  if (const GpuPtr gpu = own_gpu())
    tensors_ = std::make_unique<GpuTensors>(gpu, fabric_.arena().get(), sets_, backlog_, watch_);
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

// Two ranks share a GPU while another one of their node is idle.
void Gpus::warn_of_sharing() const {
  std::map<std::pair<int, std::string>, int> first_on;
  std::map<int, std::set<std::string>> used_on;
  for (int rank = 0; rank < world_.size(); ++rank)
    used_on[world_.nodes[static_cast<size_t>(rank)]].insert(facts_[static_cast<size_t>(rank)].uuid);
  for (int rank = 0; rank < world_.size(); ++rank) {
    const GpuFacts& facts = facts_[static_cast<size_t>(rank)];
    const int node = world_.nodes[static_cast<size_t>(rank)];
    if (facts.uuid.empty()) continue;
    const auto [first, is_first] = first_on.emplace(std::make_pair(node, facts.uuid), rank);
    if (is_first || used_on[node].size() >= static_cast<size_t>(facts.devices)) continue;
    return warn("ranks " + std::to_string(first->second) + " and " + std::to_string(rank) + " share " + facts.uuid +
                ", although they see " + std::to_string(facts.devices) +
                " GPUs: make that of local_rank() the current one before the first array is made on a GPU");
  }
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

// ------------------------------------------------------------------------------------------------------------- Groups

void Gpus::make_nccl(int process_set, const Placement& placement) {
  Seat seat;
  if (placement.own >= 0) seat = {0, placement.own, static_cast<int>(placement.ranks.size())};
  std::unique_ptr<NcclGroup> nccl = connect(process_set, seat);
  NcclGroup* own = nccl.get();
  if (own) {
    if (process_set == 0) of_world_ = communicators_[0].front();
    auto rest = std::make_unique<StagedGroup>(sets_.shared_group(process_set), tensors_->relay(), false);
    tensors_->set_group(process_set, std::make_unique<EitherGroup>(std::move(nccl), std::move(rest)));
  }
  const bool all_know_memory = all_agree(!own || own->packed().prepare());
  if (!own) return;
  if (!all_know_memory) own->packed().drop();
  find_packing(*own, *tensors_->pool(), watch_);
}

void Gpus::make_hierarchy(int process_set, const Placement& placement) {
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
  parts.flat = std::make_unique<StagedGroup>(sets_.shared_group(process_set), tensors_->relay(), false);
  auto rest = std::make_unique<StagedGroup>(sets_.shared_group(process_set), tensors_->relay(), false);
  auto hierarchy = std::make_unique<GpuHierarchy>(std::move(parts));
  tensors_->set_group(process_set, std::make_unique<EitherGroup>(std::move(hierarchy), std::move(rest)));
}

std::unique_ptr<Group> Gpus::make_cross(int process_set, const Placement& placement, const Seat& seat) {
  if (options_.gpu_cross_algorithm == "nccl") return connect(process_set, seat);
  if (seat.color == NcclComm::kNoColor) return nullptr;
  std::vector<int> ranks;
  for (const int node : placement.distinct_nodes())
    ranks.push_back(placement.ranks[static_cast<size_t>(placement.on_node(node)[static_cast<size_t>(seat.color)])]);
  const int tag = kFirstGroupTag + process_set % kGroupTags;
  const Peers peers(*fabric_.mpi(), ranks, seat.place, tag, watch_);
  auto staged = std::make_unique<StagedGroup>(make_network_group(options_.cross_algorithm, peers, tuning_),
                                              tensors_->relay(), false);
  if (options_.gpu_cross_algorithm == "mpi") return staged;
  if (fabric_.mpi()->denies_cuda() && placement.own == 0)
    warn("gpu_cross_algorithm is cuda_aware_mpi, but this MPI says that it takes no addresses of GPUs: it may crash");
  return std::make_unique<CudaMpiGroup>(peers, tensors_->gpu(), std::move(staged), watch_);
}

// On one node the parts lie where all of its ranks can read them, if all have room there.
void Gpus::make_staged(int process_set, const Placement& placement) {
  const bool is_member = placement.own >= 0;
  const bool use_arena = all_agree(!is_member || tensors_->relay().prepare());
  if (!is_member) return;
  auto staged = std::make_unique<StagedGroup>(sets_.shared_group(process_set), tensors_->relay(), use_arena);
  tensors_->set_group(process_set, std::move(staged));
}

bool Gpus::all_agree(bool is_well) {
  Words words = {is_well ? ~uint64_t{0} : 0};
  fabric_.channel().and_bits(words);
  return words.front() != 0;
}

bool Gpus::is_known_to_nccl(const void* memory, size_t bytes) {
  std::shared_ptr<NcclMemory> own;
  {
    const std::lock_guard lock(mutex_);
    own = memory_;
  }
  return own && own->holds(memory, bytes);
}

std::unique_ptr<NcclGroup> Gpus::connect(int process_set, const Seat& seat) {
  const bool is_member = seat.color != NcclComm::kNoColor;
  std::unique_ptr<NcclComm> comm;
  if (of_world_) {
    finish_work();  // NCCL wants a communicator without work under way
    comm = of_world_->split(seat.color, seat.place, seat.place, seat.size, watch_);
  } else {
    const NcclId id = agree_on_id(seat);
    if (is_member) comm = NcclComm::make(*nccl_, tensors_->gpu(), id, seat.place, seat.size, watch_);
  }
  if (!comm) return nullptr;
  auto& own = communicators_[process_set].emplace_back(std::move(comm));
  return std::make_unique<NcclGroup>(own, tensors_->pool(), nccl_memory(), watch_);
}

// The first rank of each color makes one, and all ranks of the color get it.
NcclId Gpus::agree_on_id(const Seat& seat) {
  struct Offer {
    int color;
    NcclId id;
  };
  Offer own = {seat.color, {}};
  const bool is_first = seat.color != NcclComm::kNoColor && seat.place == 0;
  if (is_first) nccl_->check(nccl_->GetUniqueId(&own.id), "ncclGetUniqueId");
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

// ---------------------------------------------------------------------------------------------------------- the end

void Gpus::finish_work() {
  if (tensors_) tensors_->gpu()->wait(*tensors_->gpu()->record(tensors_->gpu()->stream()), watch_);
}

void Gpus::close(int process_set) {
  const auto current = make_current();
  if (troubles_.erase(process_set)) finish_work();
  if (tensors_) tensors_->drop_group(process_set);
  for (const auto& comm : communicators_[process_set]) comm->close(watch_);
  communicators_.erase(process_set);
}

void Gpus::look() {
  constexpr double kPause_s = 0.01;
  if (backlog_.is_empty() || now_s() < next_look_s_) return;
  next_look_s_ = now_s() + kPause_s;
  for (const auto& [process_set, comms] : communicators_)
    for (const auto& comm : comms) comm->require_well();
  const auto current = make_current();
  backlog_.look();
}

void Gpus::Watchful::check(double waited_s) {
  try {
    gpus_.fabric_.watch().check(waited_s);
  } catch (const Error& error) {
    gpus_.give_up(error);
    throw;
  }
}

void Gpus::give_up(const Error& reason) {
  if (!tensors_) return;
  const auto current = make_current();
  has_given_up_ = true;
  backlog_.give_up(reason);
  std::vector<NcclComm*> all;
  for (const auto& [process_set, comms] : communicators_)
    for (const auto& comm : comms) all.push_back(comm.get());
  NcclComm::abort(all);
}

void Gpus::leave() {
  if (!tensors_) return;
  for (; !backlog_.is_empty(); Waiter::nap(kMoment_s)) {
    look();
    fabric_.watch().look();
  }
  of_world_.reset();
  while (!communicators_.empty()) close(communicators_.begin()->first);
}

}  // namespace ringtrain
