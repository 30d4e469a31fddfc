#include "gpu/cuda.h"

#include <cstdio>
#include <memory>
#include <mutex>

#include "base/dynlib.h"

namespace ringtrain {
namespace {

constexpr int kSuccess = 0, kNoDevice = 100;
// The first with all functions that are called.
constexpr int kOldest = 11040;

}  // namespace

const CudaDriver& CudaDriver::get() {
  static std::mutex mutex;
  static CudaDriver* driver = nullptr;  // for ever: arrays may outlive everything else
  const std::lock_guard lock(mutex);
  if (!driver) driver = new CudaDriver();
  return *driver;
}

CudaDriver::CudaDriver() {
  const DynamicLibrary library = [] {
    try {
      return DynamicLibrary("libcuda.so.1");
    } catch (const Error& error) {
      throw failure(std::string("there is no CUDA driver: ") + error.what() +
                    ". Look at nvidia-smi; a container wants --gpus all");
    }
  }();
  library.find(DriverGetVersion, "cuDriverGetVersion");
  DriverGetVersion(&version_);
  if (version_ < kOldest)
    throw failure("the CUDA driver speaks CUDA " + version_text(version_) + ", which is too old: ringtrain wants " +
                  version_text(kOldest) + " or newer. Update the driver");
  library.find(Init, "cuInit");
  library.find(DeviceGetCount, "cuDeviceGetCount");
  library.find(DeviceGet, "cuDeviceGet");
  library.find(DeviceGetUuid, "cuDeviceGetUuid_v2");
  library.find(DeviceGetPCIBusId, "cuDeviceGetPCIBusId");
  library.find(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  library.find(DevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState");
  library.find(CtxPushCurrent, "cuCtxPushCurrent_v2");
  library.find(CtxPopCurrent, "cuCtxPopCurrent_v2");
  library.find(CtxGetCurrent, "cuCtxGetCurrent");
  library.find(CtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange");
  library.find(StreamCreateWithPriority, "cuStreamCreateWithPriority");
  library.find(StreamDestroy, "cuStreamDestroy_v2");
  library.find(StreamWaitEvent, "cuStreamWaitEvent");
  library.find(StreamIsCapturing, "cuStreamIsCapturing");
  library.find(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  library.find(EventCreate, "cuEventCreate");
  library.find(EventDestroy, "cuEventDestroy_v2");
  library.find(EventRecord, "cuEventRecord");
  library.find(EventQuery, "cuEventQuery");
  library.find(MemAlloc, "cuMemAlloc_v2");
  library.find(MemFree, "cuMemFree_v2");
  library.find(MemHostAlloc, "cuMemHostAlloc");
  library.find(MemFreeHost, "cuMemFreeHost");
  library.find(MemHostRegister, "cuMemHostRegister_v2");
  library.find(MemHostUnregister, "cuMemHostUnregister");
  library.find(MemcpyAsync, "cuMemcpyAsync");
  library.find(MemsetD8Async, "cuMemsetD8Async");
  library.find(PointerGetAttribute, "cuPointerGetAttribute");
  library.find(GetErrorString, "cuGetErrorString");
  const int code = Init(0);
  if (code != kNoDevice && code != kSuccess)
    throw failure("the CUDA driver cannot be used: cuInit: " + text(code) + ". Look at nvidia-smi");
}

std::string CudaDriver::version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string CudaDriver::text(int code) const {
  const char* text = nullptr;
  GetErrorString(code, &text);
  return (text ? std::string(text) : "unknown error") + " (CUDA error " + std::to_string(code) + ")";
}

void CudaDriver::check(int code, const char* call) const {
  if (code != kSuccess) throw failure(std::string(call) + ": " + text(code));
}

int CudaDriver::devices() const {
  int count = 0;
  return DeviceGetCount(&count) == kSuccess ? count : 0;
}

int CudaDriver::device(int ordinal) const {
  int device = 0;
  check(DeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

std::string CudaDriver::uuid(int ordinal) const {
  constexpr int kBytes = 16;
  char bytes[kBytes] = {}, digits[3];
  check(DeviceGetUuid(bytes, device(ordinal)), "cuDeviceGetUuid");
  std::string text = "GPU";
  for (int i = 0; i < kBytes; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += "-";
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(bytes[i]));
    text += digits;
  }
  return text;
}

std::string CudaDriver::bus_id(int ordinal) const {
  char text[64] = "";
  check(DeviceGetPCIBusId(text, sizeof text, device(ordinal)), "cuDeviceGetPCIBusId");
  return text;
}

int CudaDriver::device_of(CudaAddress address) const {
  constexpr int kDeviceOrdinal = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
  int ordinal = 0;
  if (PointerGetAttribute(&ordinal, kDeviceOrdinal, address) != kSuccess)
    throw invalid("an array's memory is not on a GPU: was it freed?");
  return ordinal;
}

bool CudaDriver::has_context(int ordinal) const {
  unsigned flags = 0;
  int is_active = 0;
  check(DevicePrimaryCtxGetState(device(ordinal), &flags, &is_active), "cuDevicePrimaryCtxGetState");
  return is_active != 0;
}

}  // namespace ringtrain
