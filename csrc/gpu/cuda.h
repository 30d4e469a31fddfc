// The CUDA driver, through the few functions that ringtrain calls. Nothing is compiled against a cuda.h: the driver is
// libcuda.so.1, opened when somebody asks for it first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dynlib.h"

namespace ringtrain {

// As the driver has them: opaque. A stream of the runtime API, CuPy or PyTorch is the same thing.
using CudaStream = void*;
using CudaEvent = void*;
using CudaContext = void*;
using CudaAddress = unsigned long long;

class CudaDriver {
  // The functions below are looked up in it, in this order.
  const DynamicLibrary library_ = open();
  int (*const DriverGetVersion)(int*) = library_.find("cuDriverGetVersion");
  const int version_ = checked_version();

 public:
  // Opens and initialises it at the first call. Throws failure, saying why there is none that can be used; again at
  // every call. Any thread.
  static const CudaDriver& get();

  int version() const { return version_; }  // of CUDA that it speaks: 12040 for 12.4
  static std::string version_text(int version);
  int devices() const;
  std::string uuid(int device) const;    // "GPU-..." as nvidia-smi shows it
  std::string bus_id(int device) const;  // "0000:1b:00.0"; slices of one GPU share it
  // The GPU of this memory. Throws invalid for memory of the host, or memory that was freed.
  int device_of(CudaAddress address) const;
  // Whether this process has made the context of the device that all libraries share.
  bool has_context(int device) const;

  // Throws failure, naming the call, unless the code says that all is well.
  void check(int code, const char* call) const;
  std::string text(int code) const;
  static bool is_out_of_memory(int code) { return code == 2; }

  // clang-format off
  int (*Init)(unsigned) = library_.find("cuInit");
  int (*DeviceGetCount)(int*) = library_.find("cuDeviceGetCount");
  int (*DeviceGet)(int*, int) = library_.find("cuDeviceGet");
  int (*DeviceGetUuid)(char*, int) = library_.find("cuDeviceGetUuid_v2");
  int (*DeviceGetPCIBusId)(char*, int, int) = library_.find("cuDeviceGetPCIBusId");
  int (*DevicePrimaryCtxRetain)(CudaContext*, int) = library_.find("cuDevicePrimaryCtxRetain");
  int (*DevicePrimaryCtxGetState)(int, unsigned*, int*) = library_.find("cuDevicePrimaryCtxGetState");
  int (*CtxPushCurrent)(CudaContext) = library_.find("cuCtxPushCurrent_v2");
  int (*CtxPopCurrent)(CudaContext*) = library_.find("cuCtxPopCurrent_v2");
  int (*CtxGetCurrent)(CudaContext*) = library_.find("cuCtxGetCurrent");
  int (*CtxGetStreamPriorityRange)(int*, int*) = library_.find("cuCtxGetStreamPriorityRange");
  int (*StreamCreateWithPriority)(CudaStream*, unsigned, int) = library_.find("cuStreamCreateWithPriority");
  int (*StreamDestroy)(CudaStream) = library_.find("cuStreamDestroy_v2");
  int (*StreamWaitEvent)(CudaStream, CudaEvent, unsigned) = library_.find("cuStreamWaitEvent");
  int (*StreamIsCapturing)(CudaStream, int*) = library_.find("cuStreamIsCapturing");
  int (*ThreadExchangeStreamCaptureMode)(int*) = library_.find("cuThreadExchangeStreamCaptureMode");
  int (*EventCreate)(CudaEvent*, unsigned) = library_.find("cuEventCreate");
  int (*EventDestroy)(CudaEvent) = library_.find("cuEventDestroy_v2");
  int (*EventRecord)(CudaEvent, CudaStream) = library_.find("cuEventRecord");
  int (*EventQuery)(CudaEvent) = library_.find("cuEventQuery");
  int (*MemAlloc)(CudaAddress*, size_t) = library_.find("cuMemAlloc_v2");
  int (*MemFree)(CudaAddress) = library_.find("cuMemFree_v2");
  int (*MemHostAlloc)(void**, size_t, unsigned) = library_.find("cuMemHostAlloc");
  int (*MemFreeHost)(void*) = library_.find("cuMemFreeHost");
  int (*MemHostRegister)(void*, size_t, unsigned) = library_.find("cuMemHostRegister_v2");
  int (*MemHostUnregister)(void*) = library_.find("cuMemHostUnregister");
  int (*MemcpyAsync)(CudaAddress, CudaAddress, size_t, CudaStream) = library_.find("cuMemcpyAsync");
  int (*MemsetD8Async)(CudaAddress, unsigned char, size_t, CudaStream) = library_.find("cuMemsetD8Async");
  int (*PointerGetAttribute)(void*, int, CudaAddress) = library_.find("cuPointerGetAttribute");
  int (*GetErrorString)(int, const char**) = library_.find("cuGetErrorString");
  // clang-format on

 private:
  CudaDriver();
  static DynamicLibrary open();
  int checked_version() const;
  int device(int ordinal) const;
};

}  // namespace ringtrain
