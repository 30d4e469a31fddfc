// The words of NCCL's interface, as far as the double has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpu_double {

using ncclResult_t = int;
using ncclComm_t = void*;
using ncclDataType_t = int;
using ncclRedOp_t = int;
using cudaStream_t = void*;

struct ncclUniqueId {
  char internal[128];
};

// As far as the double reads it; what follows is of no interest here.
struct ncclConfig_t {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

namespace nccl {
constexpr int kUnhandledCudaError = 1, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5;
constexpr unsigned kConfigMagic = 0xcafebeef;
constexpr int kNoColor = -1;
constexpr int kFirstOwnOp = 5;  // below are sum, product, max, min and average
}  // namespace nccl

}  // namespace gpu_double
