// The CUDA driver, through the few functions that ringtrain calls. Nothing is compiled against a cuda.h: the driver is
// libcuda.so.1, opened when somebody asks for it first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringtrain {

// As the driver has them: opaque. A stream of the runtime API, CuPy or PyTorch is the same thing.
using CudaStream = void*;
using CudaEvent = void*;
using CudaContext = void*;
using CudaAddress = unsigned long long;

class CudaDriver {
 public:
  // Opens and initialises it at the first call. Throws failure, saying why there is none that can be used; again at
  // every call. Any thread.
  static const CudaDriver& get();

  int version() const { return version_; }  // of CUDA that it speaks: 12040 for 12.4
  static std::string version_text(int version);
  int devices() const;
  std::string uuid(int device) const;    // "GPU-..." as nvidia-smi shows it
  std::string bus_id(int device) const;  // "0000:1b:00.0"; slices of one GPU share it
  // On which one memory lies. Throws invalid if on none: it is the host's, or was freed.
  int device_of(CudaAddress address) const;
  // Whether this process has made the context of the device that all libraries share.
  bool has_context(int device) const;

  // Throws failure, naming the call, unless the code says that all is well.
  void check(int code, const char* call) const;
  std::string text(int code) const;
  static bool is_out_of_memory(int code) { return code == 2; }

  // clang-format off
  int (*Init)(unsigned);
  int (*DriverGetVersion)(int*);
  int (*DeviceGetCount)(int*);
  int (*DeviceGet)(int*, int);
  int (*DeviceGetUuid)(char*, int);
  int (*DeviceGetPCIBusId)(char*, int, int);
  int (*DevicePrimaryCtxRetain)(CudaContext*, int);
  int (*DevicePrimaryCtxGetState)(int, unsigned*, int*);
  int (*CtxPushCurrent)(CudaContext);
  int (*CtxPopCurrent)(CudaContext*);
  int (*CtxGetCurrent)(CudaContext*);
  int (*CtxGetStreamPriorityRange)(int*, int*);
  int (*StreamCreateWithPriority)(CudaStream*, unsigned, int);
  int (*StreamDestroy)(CudaStream);
  int (*StreamWaitEvent)(CudaStream, CudaEvent, unsigned);
  int (*StreamIsCapturing)(CudaStream, int*);
  int (*ThreadExchangeStreamCaptureMode)(int*);
  int (*EventCreate)(CudaEvent*, unsigned);
  int (*EventDestroy)(CudaEvent);
  int (*EventRecord)(CudaEvent, CudaStream);
  int (*EventQuery)(CudaEvent);
  int (*MemAlloc)(CudaAddress*, size_t);
  int (*MemFree)(CudaAddress);
  int (*MemHostAlloc)(void**, size_t, unsigned);
  int (*MemFreeHost)(void*);
  int (*MemHostRegister)(void*, size_t, unsigned);
  int (*MemHostUnregister)(void*);
  int (*MemcpyAsync)(CudaAddress, CudaAddress, size_t, CudaStream);
  int (*MemsetD8Async)(CudaAddress, unsigned char, size_t, CudaStream);
  int (*PointerGetAttribute)(void*, int, CudaAddress);
  int (*GetErrorString)(int, const char**);
  // clang-format on

 private:
  CudaDriver();
  int device(int ordinal) const;

  int version_ = 0;
};

}  // namespace ringtrain
