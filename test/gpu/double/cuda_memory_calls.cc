// The exported calls of the driver: memory and copies.
#include <cstring>

#include "call.h"
#include "context.h"
#include "memory.h"

using namespace gpu_double;

namespace {

uintptr_t number_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// One end of a copy.
struct End {
  char* view;
  bool is_pageable;  // plain host memory: the host waits for a copy from it or to it
};

// Device memory, or pinned memory, which has the same address on the GPU.
End on_device(CUdeviceptr address, size_t bytes) {
  char* const view = memory().view(address, bytes);
  require(view != nullptr);
  return {view, false};
}

End on_host(const void* pointer, size_t bytes) {
  const uintptr_t address = number_of(pointer);
  require(address != 0 && !memory().touches_device_memory(address, bytes));
  char* const view = memory().view(address, bytes);
  return view != nullptr ? End{view, false} : End{reinterpret_cast<char*>(address), true};
}

End anywhere(CUdeviceptr address, size_t bytes) {
  char* const view = memory().view(address, bytes);
  return view != nullptr ? End{view, false} : on_host(reinterpret_cast<const void*>(address), bytes);
}

void copy(const End& to, const End& from, size_t bytes, CUstream stream) {
  const std::shared_ptr<Stream> copying = stream_of(current_context(), stream);
  const Point end = copying->context.enqueue(copying, [=] { std::memmove(to.view, from.view, bytes); });
  if (to.is_pageable || from.is_pageable) end.wait();
}

}  // namespace

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  return Call("cuMemAlloc_v2", bytes).run([&] {
    Context& context = current_context();
    context.require_safe();
    require(address != nullptr);
    *address = memory().allocate(context.device, bytes);
  });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return Call("cuMemFree_v2", reinterpret_cast<void*>(address)).run([&] {
    current_context();
    if (address == 0) return;
    Block block;
    require(memory().find(address, block));
    primary_context(block.device).synchronize();
    memory().free(address);
  });
}

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return Call("cuMemHostAlloc", bytes, flags).run([&] {
    const Context& context = current_context();
    context.require_safe();
    require(pointer != nullptr && flags < 8);
    *pointer = reinterpret_cast<void*>(memory().allocate_pinned(context.device, bytes));
  });
}

CUresult cuMemFreeHost(void* pointer) {
  return Call("cuMemFreeHost", pointer).run([&] {
    current_context().synchronize();
    if (pointer != nullptr) memory().free_pinned(number_of(pointer));
  });
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  return Call("cuMemHostRegister_v2", pointer, bytes, flags).run([&] {
    const Context& context = current_context();
    require(flags < 16);
    memory().register_host(context.device, number_of(pointer), bytes);
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return Call("cuMemHostUnregister", pointer).run([&] {
    current_context();
    memory().unregister_host(number_of(pointer));
  });
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return Call("cuMemcpyDtoHAsync_v2", bytes, stream).run([&] {
    current_context();
    if (bytes > 0) copy(on_host(to, bytes), on_device(from, bytes), bytes, stream);
  });
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return Call("cuMemcpyHtoDAsync_v2", bytes, stream).run([&] {
    current_context();
    if (bytes > 0) copy(on_device(to, bytes), on_host(from, bytes), bytes, stream);
  });
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return Call("cuMemcpyDtoDAsync_v2", bytes, stream).run([&] {
    current_context();
    if (bytes > 0) copy(on_device(to, bytes), on_device(from, bytes), bytes, stream);
  });
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return Call("cuMemcpyAsync", bytes, stream).run([&] {
    current_context();
    if (bytes > 0) copy(anywhere(to, bytes), anywhere(from, bytes), bytes, stream);
  });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  return Call("cuMemsetD8Async", bytes, stream).run([&] {
    Context& context = current_context();
    if (bytes == 0) return;
    const End end = on_device(to, bytes);
    const std::shared_ptr<Stream> setting = stream_of(context, stream);
    setting->context.enqueue(setting, [=] { std::memset(end.view, value, bytes); });
  });
}

// Only the ordinal of the GPU is asked for.
CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address) {
  return Call("cuPointerGetAttribute", attribute).run([&] {
    constexpr int kDeviceOrdinal = 9;
    require(data != nullptr && attribute == kDeviceOrdinal);
    Block block;
    require(memory().find(address, block));
    std::memcpy(data, &block.device, sizeof(int));
  });
}
}
