#include "bench/mpi_sum.h"

#include "kernels/reduce.h"

namespace ringtrain {
namespace {

template <DType dtype>
void sum(void* source, void* source_and_destination, int* count, void*) {
  const void* sources[] = {source, source_and_destination};
  reduce({dtype, Reduce::sum}, &source_and_destination, 1, sources, 2, static_cast<size_t>(*count));
}

}  // namespace

MpiUserFunction mpi_sum(DType dtype) {
  if (dtype == DType::float16) return &sum<DType::float16>;
  if (dtype == DType::bfloat16) return &sum<DType::bfloat16>;
  return nullptr;
}

}  // namespace ringtrain
