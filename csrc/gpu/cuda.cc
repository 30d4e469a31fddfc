#include "gpu/cuda.h"

#include <cstdio>
#include <mutex>

#include "base/error.h"

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

DynamicLibrary CudaDriver::open() try { return DynamicLibrary("libcuda.so.1"); } catch (const Error& error) {
  throw failure(std::string("there is no CUDA driver: ") + error.what() +
                ". Look at nvidia-smi; a container needs --gpus all");
}

int CudaDriver::checked_version() const {
  int version = 0;
  DriverGetVersion(&version);
  if (version < kOldest)
    throw failure("the CUDA driver speaks CUDA " + version_text(version) + ", which is too old: ringtrain needs " +
                  version_text(kOldest) + " or newer. Update the driver");
  return version;
}

CudaDriver::CudaDriver() {
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
