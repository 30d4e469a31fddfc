#include "kvstore/store/convert.h"

#include <string>

#include "base/error.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace ringtrain {

void convert(const void* from, DType from_dtype, void* to, DType to_dtype, size_t count) {
  if (from_dtype == to_dtype)
    copy(to, from, count * size_of(to_dtype));
  else if (is_half(from_dtype) && to_dtype == DType::float32)
    widen(from_dtype, static_cast<float*>(to), from, count);
  else if (from_dtype == DType::float32 && is_half(to_dtype))
    narrow(to_dtype, 1.0, to, static_cast<const float*>(from), count);
  else
    throw invalid(std::string("values of ") + name_of(from_dtype) + " cannot be " + name_of(to_dtype) + " here");
}

}  // namespace ringtrain
