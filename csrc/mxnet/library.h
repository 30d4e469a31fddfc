// The functions of MXNet 1.x that are called; libmxnet.so exports them. Nothing is compiled or linked against it: the
// code that loaded it passes their addresses.
#pragma once

#include <cstdint>

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

}  // namespace ringtrain
