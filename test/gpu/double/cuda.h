// The words of the driver's interface, as far as the double has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpu_double {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = void*;
using CUstream = void*;
using CUevent = void*;
using CUhostFn = void (*)(void*);

struct CUuuid {
  unsigned char bytes[16];
};

namespace result {
constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100, kInvalidDevice = 101,
              kInvalidContext = 201, kInvalidHandle = 400, kNotReady = 600, kContextIsDestroyed = 709,
              kHostMemoryAlreadyRegistered = 712, kHostMemoryNotRegistered = 713, kNotPermitted = 800,
              kStreamCaptureUnsupported = 900, kStreamCaptureImplicit = 906;
}  // namespace result

constexpr unsigned kStreamNonBlocking = 1;
constexpr int kLeastPriority = 0, kGreatestPriority = -5;

}  // namespace gpu_double
