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

// Calls visit(T{}), where T is the type of an integer dtype. Returns false, and calls nothing, for other dtypes.
template <class Visit>
inline bool with_integer(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::uint8:
      return visit(uint8_t{}), true;
    case DType::int8:
      return visit(int8_t{}), true;
    case DType::uint16:
      return visit(uint16_t{}), true;
    case DType::int16:
      return visit(int16_t{}), true;
    case DType::uint32:
      return visit(uint32_t{}), true;
    case DType::int32:
      return visit(int32_t{}), true;
    case DType::uint64:
      return visit(uint64_t{}), true;
    case DType::int64:
      return visit(int64_t{}), true;
    default:
      return false;
  }
}

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
