// Calls the core as threads of XLA and MXNet do that outlive its static objects: after these were destroyed.
//
// This library is loaded before the core, so its function for the end of the process runs after those of the core.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

namespace {

void* core = nullptr;

template <typename Function>
Function* function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(core, name));
}

uintptr_t constant(const char* name) { return *static_cast<uintptr_t*>(dlsym(core, name)); }

using Begin = void (*)(void* run_context, void* on_complete, void* param);
using Delete = void (*)(void* param);

// As csrc/mxnet/operation.h has them.
struct OnComplete {
  void (*call)(void* engine, void* param, const void* error);
  void *engine, *param;
};
struct Managed {
  void* data;
  int32_t device_type, device_id, dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
  void* context;
  void (*deleter)(Managed*);
};

// The operation of MXNet that was pushed; its engine begins it late.
struct {
  Begin begin;
  Delete destroy;
  void* param;
} pushed;

void complete(void*, void*, const void* error) {
  std::printf("completed: %s\n", error ? static_cast<const std::runtime_error*>(error)->what() : "well");
  std::fflush(stdout);
}

void begin_pushed() {
  OnComplete on_complete{&complete, nullptr, nullptr};
  pushed.begin(nullptr, &on_complete, pushed.param);
  pushed.destroy(pushed.param);
}

void ask() {
  float number = 1;
  int size = 0, length = 0;
  char text[1024] = "";
  const uintptr_t world = constant("MPIABI_COMM_WORLD");
  function<int(uintptr_t, int*)>("MPIABI_Comm_size")(world, &size);
  const int code = function<int(const void*, void*, int, uintptr_t, uintptr_t, uintptr_t)>("MPIABI_Allreduce")(
      &number, &number, 1, constant("MPIABI_FLOAT"), constant("MPIABI_SUM"), world);
  function<int(int, char*, int*)>("MPIABI_Error_string")(code, text, &length);
  std::printf("size %d: %s\n", size, text);
  std::fflush(stdout);
}

void ask_late() {
  if (core) std::thread(ask).join();
  if (pushed.begin) std::thread(begin_pushed).join();
}

[[maybe_unused]] const int registered = std::atexit(ask_late);

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void ask_at_the_end(const char* path) { core = dlopen(path, RTLD_NOW | RTLD_NOLOAD); }

// Functions of libmxnet.so that the core calls.
EXPORTED int MXEnginePushAsyncND(Begin begin, void* param, Delete destroy) {
  pushed = {begin, destroy, param};
  return 0;
}
EXPORTED int MXShallowCopyNDArray(void* array, void** copy) {
  *copy = array;
  return 0;
}
EXPORTED int MXNDArrayFree(void*) { return 0; }
EXPORTED int MXNDArrayToDLPack(void* array, Managed** managed) {
  static int64_t shape = 1;
  static Managed memory{array, 1, 0, 1, 2, 32, 1, &shape, nullptr, 0, nullptr, [](Managed*) {}};
  *managed = &memory;
  return 0;
}
EXPORTED const char* MXGetLastError() { return ""; }
