// Shared by the exported calls of NCCL: its communicators by their handles, and refusals in NCCL's own codes.
#pragma once

#include <memory>

#include "call.h"
#include "communicator.h"

namespace gpu_double {

inline void require(bool is_valid, const std::string& sentence) {
  if (!is_valid) throw Refusal{nccl::kInvalidArgument, sentence};
}

// An error of the driver becomes NCCL's "unhandled CUDA error".
template <typename Body>
auto with_driver(Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const Refusal& refusal) {
    throw Refusal{nccl::kUnhandledCudaError,
                  "the driver answered " + std::to_string(refusal.code) + ": " + refusal.sentence};
  }
}

ncclComm_t open_communicator(std::shared_ptr<Communicator> communicator);
std::shared_ptr<Communicator> communicator_of(ncclComm_t handle);
// The handle is unknown from now on.
std::shared_ptr<Communicator> close_communicator(ncclComm_t handle);
size_t count_communicators();

}  // namespace gpu_double
