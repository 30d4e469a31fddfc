// The exported calls of the driver: sentences of results.
#include "cuda.h"

using namespace gpu_double;

namespace {

struct Result {
  CUresult code;
  const char* sentence;
};

constexpr Result kResults[] = {
    {0, "no error"},
    {1, "invalid argument"},
    {2, "out of memory"},
    {3, "initialization error"},
    {100, "no CUDA-capable device is detected"},
    {101, "invalid device ordinal"},
    {201, "invalid device context"},
    {400, "invalid resource handle"},
    {500, "named symbol not found"},
    {600, "device not ready"},
    {700, "an illegal memory access was encountered"},
    {709, "context is destroyed"},
    {712, "part or all of the requested memory range is already mapped"},
    {713, "pointer does not correspond to a registered memory region"},
    {719, "unspecified launch failure"},
    {800, "operation not permitted"},
    {801, "operation not supported"},
    {803, "system has unsupported display driver / cuda driver combination"},
    {900, "operation not permitted when stream is capturing"},
    {906, "operation would make the legacy stream depend on a capturing stream"},
    {999, "unknown error"},
};

const Result* find(CUresult code) {
  for (const Result& one : kResults)
    if (one.code == code) return &one;
  return nullptr;
}

}  // namespace

extern "C" {

CUresult cuGetErrorString(CUresult code, const char** sentence) {
  const Result* const found = find(code);
  *sentence = found == nullptr ? nullptr : found->sentence;
  return found == nullptr ? result::kInvalidValue : 0;
}
}
