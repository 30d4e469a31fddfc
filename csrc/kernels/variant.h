// The same loops, compiled once for each instruction set. reduce.cc chooses among them at run time.
#pragma once

#include "kernels/reduce.h"

// Before a loop: none of its rounds needs what another one stores.
#if defined(__clang__)
#define RINGTRAIN_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define RINGTRAIN_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace ringtrain {

struct Arrays {
  void* const* destinations;
  int destination_count;
  const void* const* sources;
  int source_count;
  size_t count;  // elements of each
};

// As in reduce.h, except that integers come out unscaled.
struct Variant {
  const char* name;
  void (*reduce)(const Reduction& reduction, const Arrays& arrays);
  void (*widen)(DType dtype, float* destination, const void* source, size_t count);
  void (*narrow)(DType dtype, double factor, void* destination, const float* source, size_t count);
};

extern const Variant kScalarVariant;
#if defined(__x86_64__)
extern const Variant kAvx2Variant;
extern const Variant kAvx512Variant;
#elif defined(__aarch64__)
extern const Variant kNeonVariant;
#endif

}  // namespace ringtrain
