// Operations that XLA asks of the engine, on any device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/submission_builder.h"
#include "xla/call.h"

namespace ringtrain::xla {

inline OpKind kind_of(const Call& call) { return static_cast<OpKind>(call.integer("kind")); }
inline bool is_in_place(OpKind kind) {
  return kind == OpKind::allreduce || kind == OpKind::broadcast || kind == OpKind::transfer;
}

// Whether the second argument is the weight of this rank, one float.
inline bool is_weighted(const Call& call) { return call.integer("is_weighted") != 0; }

// Hands the operation to the engine. `weight`: where that argument is in host memory. `device` and `stream`: of a
// program for a GPU, as in a TensorView.
std::shared_ptr<Handle> submit(const Call& call, const void* weight, int device = TensorView::kHost,
                               CudaStream stream = nullptr);

// Of the results in place, which must be where the engine has written them. XLA may have copied what it was given.
void require_in_place(const Call& call);

// Null if the flags, one for each name, are all 0. The flags are in host memory.
Failure* failure_of_flags(const Call& call, const int32_t* flags, int64_t count);

// Warns once, on that rank of the world, that the ranks differ in what is flagged: with the words of the call before
// and after the names. The flags, one for each name, are in host memory.
void report_differences(const std::vector<int32_t>& flags, const std::vector<std::string>& names,
                        const std::string& before, const std::string& after, int64_t rank);
void report_differences(const Call& call, const int32_t* flags, int64_t count);

}  // namespace ringtrain::xla
