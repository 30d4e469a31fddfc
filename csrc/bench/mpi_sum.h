// Our kernels as functions for MPI_Op_create, so that MPI can sum what it has no sum for: 16-bit floats.
#pragma once

#include "base/dtype.h"

namespace ringtrain {

// MPI_User_function: what MPI calls, from whatever thread makes progress, with the address of its datatype at the end.
using MpiUserFunction = void (*)(void* source, void* source_and_destination, int* count, void* datatype);

// Only for float16 and bfloat16; null for all others, which MPI sums itself.
MpiUserFunction mpi_sum(DType dtype);

}  // namespace ringtrain
