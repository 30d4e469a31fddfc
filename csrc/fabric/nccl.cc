#include "fabric/nccl.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "base/dynlib.h"
#include "fabric/run_apart.h"

namespace ringtrain {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kSuccess = 0, kInProgress = 7;
// The first with ncclCommSplit.
constexpr int kOldest = 21800;
// Of the copy that the loader finds nobody knows.
constexpr int kAnyCuda = 0;
// How long NCCL gets to end what is under way.
constexpr double kLongestAbort_s = 5;

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// A communicator, or why there is none.
struct Made {
  int code = 0;
  NcclHandle handle = nullptr;
  std::string trouble;
};

// The call runs on a thread of its own, on which errors must be asked for, too.
template <typename Make>
NcclHandle made_apart(const NcclLibrary& library, const GpuPtr& gpu, const char* name, Make make, Watch& watch) {
  const auto call = [&library, gpu, make] {
    const Gpu::Current current(*gpu);
    Made made;
    made.code = make(&made.handle);
    if (made.code != kSuccess) made.trouble = library.text(made.code);
    return made;
  };
  const Made made = run_apart(call, watch);
  if (made.code != kSuccess) throw failure(std::string(name) + ": " + made.trouble + ". NCCL_DEBUG=INFO says more");
  return made.handle;
}

// NCCL itself would find that out only when the ranks connect.
void require_driver_for(int cuda_major, const std::string& path) {
  if (cuda_major == kAnyCuda) return;
  const int spoken = CudaDriver::get().version();
  if (cuda_major <= spoken / 1000) return;
  throw failure(path + " was built for CUDA " + std::to_string(cuda_major) + ", but the driver speaks CUDA " +
                CudaDriver::version_text(spoken) + ": pip install nvidia-nccl-cu" + std::to_string(spoken / 1000) +
                " instead, or update the driver");
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------ library

const NcclLibrary& NcclLibrary::open(const std::vector<NcclCandidate>& candidates) {
  static std::mutex mutex;
  static NcclLibrary* library = nullptr;  // for ever, as the driver
  const std::lock_guard lock(mutex);
  if (library) return *library;
  std::vector<NcclCandidate> all;
  if (!DynamicLibrary::is_loaded(kName)) all = candidates;
  all.emplace_back(kName, kAnyCuda);
  std::string reasons;
  for (const auto& [path, cuda_major] : all) {
    try {
      require_driver_for(cuda_major, path);
      library = new NcclLibrary(path);
      return *library;
    } catch (const Error& error) {
      reasons += (reasons.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  throw failure(reasons);
}

NcclLibrary::NcclLibrary(const std::string& path) {
  const DynamicLibrary library(path);
  library.find(GetVersion, "ncclGetVersion");
  path_ = DynamicLibrary::path_of(GetVersion);
  GetVersion(&version_);
  if (version_ < kOldest)
    throw failure("NCCL " + version_text(version_) + " (" + path_ + ") is too old: ringtrain wants " +
                  version_text(kOldest) + " or newer");
  library.find(GetUniqueId, "ncclGetUniqueId");
  library.find(GetErrorString, "ncclGetErrorString");
  library.find(GetLastError, "ncclGetLastError");
  library.find(CommInitRankConfig, "ncclCommInitRankConfig");
  library.find(CommSplit, "ncclCommSplit");
  library.find(CommDestroy, "ncclCommDestroy");
  library.find(CommAbort, "ncclCommAbort");
  library.find(CommGetAsyncError, "ncclCommGetAsyncError");
  library.find(AllReduce, "ncclAllReduce");
  library.find(Reduce_, "ncclReduce");
  library.find(ReduceScatter, "ncclReduceScatter");
  library.find(AllGather, "ncclAllGather");
  library.find(Broadcast, "ncclBroadcast");
  library.find(Send, "ncclSend");
  library.find(Recv, "ncclRecv");
  library.find(GroupStart, "ncclGroupStart");
  library.find(GroupEnd, "ncclGroupEnd");
  library.find(RedOpCreatePreMulSum, "ncclRedOpCreatePreMulSum");
  library.find(RedOpDestroy, "ncclRedOpDestroy");
  library.find_optional(MemAlloc, "ncclMemAlloc");
  library.find_optional(MemFree, "ncclMemFree");
  library.find_optional(CommRegister, "ncclCommRegister");
  library.find_optional(CommDeregister, "ncclCommDeregister");
}

std::string NcclLibrary::text(int code, NcclHandle comm) const {
  std::string reason = GetLastError(comm);
  if (code == kInProgress) reason = "ringtrain wants communicators that block: is NCCL_COMM_BLOCKING=0 set?";
  return GetErrorString(code) + (reason.empty() ? "" : " (" + reason + ")");
}

void NcclLibrary::check(int code, const char* call) const {
  if (code != kSuccess) throw failure(std::string(call) + ": " + text(code));
}

int NcclLibrary::type_of(DType dtype) {
  constexpr int kNone = -1;
  // bool, uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64
  constexpr int kTypes[kDTypes] = {1, 1, 0, kNone, kNone, 2, 4, 6, 9, 7, 8};
  return kTypes[static_cast<size_t>(dtype)];
}

// Of bools, which are 0 or 1, "or" is the largest and "and" the smallest.
int NcclLibrary::operation_of(DType dtype, Reduce reduce) {
  constexpr int kSum = 0, kProduct = 1, kMax = 2, kMin = 3;
  const bool is_bool = dtype == DType::boolean;
  switch (reduce) {
    case Reduce::sum:
      return is_bool ? kMax : kSum;
    case Reduce::product:
      return is_bool ? kMin : kProduct;
    case Reduce::max:
      return kMax;
    default:
      return kMin;
  }
}

// ------------------------------------------------------------------------------------------------------- communicator

std::unique_ptr<NcclComm> NcclComm::make(const NcclLibrary& library, GpuPtr gpu, const NcclId& id, int rank, int size,
                                         Watch& watch) {
  const auto make = [&library, id, rank, size](NcclHandle* handle) {
    NcclConfig config;
    return library.CommInitRankConfig(handle, size, id, rank, &config);
  };
  NcclHandle handle = made_apart(library, gpu, "ncclCommInitRankConfig", make, watch);
  return std::unique_ptr<NcclComm>(new NcclComm(library, std::move(gpu), handle, rank, size));
}

std::unique_ptr<NcclComm> NcclComm::split(int color, int key, int rank, int size, Watch& watch) const {
  const auto make = [&library = library_, parent = handle_, color, key](NcclHandle* handle) {
    return library.CommSplit(parent, color, key, handle, nullptr);
  };
  NcclHandle handle = made_apart(library_, gpu_, "ncclCommSplit", make, watch);
  if (!handle) return nullptr;
  return std::unique_ptr<NcclComm>(new NcclComm(library_, gpu_, handle, rank, size));
}

NcclComm::~NcclComm() { abort({this}); }

void NcclComm::get_to_know(void* memory, size_t bytes) {
  void* registration = nullptr;
  library_.check(library_.CommRegister(handle_, memory, bytes, &registration), "ncclCommRegister");
  registrations_.push_back(registration);
}

void NcclComm::require_well() const {
  int code = kSuccess;
  const int asked = library_.CommGetAsyncError(handle_, &code);
  if (asked != kSuccess) code = asked;
  if (code == kSuccess || code == kInProgress) return;
  throw Error(ErrorKind::peer_lost, "NCCL lost another rank, or the way to it: " + library_.text(code, handle_));
}

// Whatever becomes of it, nobody else may end it then.
void NcclComm::close(Watch& watch) {
  for (void* registration : registrations_)
    if (registration) library_.CommDeregister(handle_, registration);
  registrations_.clear();
  const auto call = [&library = library_, gpu = gpu_, handle = std::exchange(handle_, nullptr)] {
    const Gpu::Current current(*gpu);
    return library.CommDestroy(handle);
  };
  run_apart(call, watch);
}

void NcclComm::abort(const std::vector<NcclComm*>& comms) {
  const auto left = std::make_shared<std::atomic<int>>(0);
  for (NcclComm* comm : comms) {
    if (!comm->handle_) continue;
    ++*left;
    std::thread([left, &library = comm->library_, gpu = comm->gpu_, handle = std::exchange(comm->handle_, nullptr)] {
      const Gpu::Current current(*gpu);
      library.CommAbort(handle);
      --*left;
    }).detach();
  }
  LimitWatch limit(kLongestAbort_s, "NCCL does not end what is under way");
  try {
    Waiter().poll([&] { return *left == 0; }, &limit);
  } catch (const Error&) {
    // The threads stay behind; nothing else can be done.
  }
}

}  // namespace ringtrain
