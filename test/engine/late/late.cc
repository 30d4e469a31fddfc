// Calls the core as a thread of XLA does that outlives its static objects: after these were destroyed.
//
// This library is loaded before the core, so its function for the end of the process runs after those of the core.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

void* core = nullptr;

template <typename Function>
Function* function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(core, name));
}

uintptr_t constant(const char* name) { return *static_cast<uintptr_t*>(dlsym(core, name)); }

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
}

[[maybe_unused]] const int registered = std::atexit(ask_late);

}  // namespace

extern "C" __attribute__((visibility("default"))) void ask_at_the_end(const char* path) {
  core = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
}
