// Operations of ringtrain as operations of MXNet's dependency engine.
//
// MXNet begins one when its arrays are computed, on a worker of its own, which only submits it and goes on: so workers
// never wait for other ranks, and the ranks' engines may run what is ready in any order. The thread that finishes the
// Handle tells MXNet, which then lets go of those who wait for the arrays.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "coordination/operation.h"

namespace ringtrain {

// As dlpack.h has them.
struct DlTensor {
  void* data;
  int32_t device_type, device_id, dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DlManaged {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};

// MXNet's engine::CallbackOnComplete. The argument of an operation is on the stack of MXNet's worker.
struct MxnetOnComplete {
  void (*call)(void* engine, void* param, const void* error);
  void* engine;
  void* param;
};

// The functions of MXNet 1.x that are called; libmxnet.so exports them. Nothing is compiled or linked against it: the
// code that loaded it passes their addresses.
struct MxnetLibrary {
  using Begin = void (*)(void* run_context, void* on_complete, void* param);
  using Delete = void (*)(void* param);

  int (*push_async)(Begin, void* param, Delete, const void* context, void** inputs, int input_count, void** outputs,
                    int output_count, const void* property, int priority, const char* name, bool wait) = nullptr;
  int (*shallow_copy)(void* array, void** copy) = nullptr;
  int (*free_array)(void* array) = nullptr;
  int (*to_dlpack)(void* array, DlManaged** managed) = nullptr;
  const char* (*last_error)() = nullptr;
};

// Before all else. The library stays loaded.
void use_mxnet(const MxnetLibrary& library);

// Any thread. `request` has a name and lacks the tensors: these are NDArrays in the host's memory, by their handles,
// which may be freed at once. Without `inputs` the outputs are worked on in place; else there are as many, and none is
// in both. Throws failure for what MXNet refuses; any other error is thrown where an output is read, in
// words that begin with the name of the exception. `weight`: of this rank, in an average.
void push_to_mxnet(Request request, const std::vector<void*>& inputs, std::vector<void*> outputs,
                   std::optional<double> weight);

// How many MXNet has not been told to be done.
int pending_in_mxnet();

// With what the operations ended that were pushed since the last call of forget_mxnet_failure(), if the engine ended
// with it.
std::optional<Error> mxnet_failure();
void forget_mxnet_failure();

}  // namespace ringtrain
