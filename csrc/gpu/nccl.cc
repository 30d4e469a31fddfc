#include "gpu/nccl.h"

#include <mutex>

#include "base/error.h"

namespace ringtrain {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kInProgress = 7;
// 2.18 has ncclCommSplit, but may hang where several communicators are ended at once.
constexpr int kOldest = 21900;
// Of the copy that the loader finds nobody knows.
constexpr int kAnyCuda = 0;

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
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

int NcclLibrary::checked_version() const {
  int version = 0;
  GetVersion(&version);
  if (version < kOldest)
    throw failure("NCCL " + version_text(version) + " (" + path_ + ") is too old: ringtrain needs " +
                  version_text(kOldest) + " or newer");
  return version;
}

std::string NcclLibrary::text(int code, NcclHandle comm) const {
  std::string reason = GetLastError(comm);
  if (code == kInProgress) reason = "ringtrain needs communicators that block: is NCCL_COMM_BLOCKING=0 set?";
  return GetErrorString(code) + (reason.empty() ? "" : " (" + reason + ")");
}

int NcclLibrary::type_of(DType dtype) {
  constexpr int kNone = -1;
  // bool, uint8, int8, uint16, int16, uint32, int32, uint64, int64, float16, bfloat16, float32, float64
  constexpr int kTypes[kDTypes] = {1, 1, 0, kNone, kNone, 3, 2, 5, 4, 6, 9, 7, 8};
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

}  // namespace ringtrain
