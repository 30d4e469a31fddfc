// The exported calls of the driver: the library itself, GPUs and contexts.
#include <cstdio>
#include <cstring>

#include "call.h"
#include "context.h"
#include "device.h"
#include "event.h"
#include "memory.h"
#include "settings.h"

using namespace gpu_double;

extern "C" {

CUresult cuInit(unsigned flags) {
  return Call("cuInit", flags).run([&] {
    require(flags == 0);
    initialize();
  });
}

CUresult cuDriverGetVersion(int* version) {
  return Call("cuDriverGetVersion").run([&] {
    require(version != nullptr);
    *version = settings().driver_version;
  });
}

CUresult cuDeviceGetCount(int* count) {
  return Call("cuDeviceGetCount").run([&] {
    require_initialized();
    require(count != nullptr);
    *count = device_count();
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return Call("cuDeviceGet", ordinal).run([&] {
    require_initialized();
    require(device != nullptr);
    require_device(ordinal);
    *device = ordinal;
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return Call("cuDeviceGetName", device).run([&] {
    require_initialized();
    require(name != nullptr && length > 0);
    require_device(device);
    std::snprintf(name, static_cast<size_t>(length), "Double of a GPU");
  });
}

CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  return Call("cuDeviceGetPCIBusId", device).run([&] {
    require_initialized();
    require(text != nullptr && length > 0);
    require_device(device);
    std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", whole_number_of(device));
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return Call("cuDeviceGetUuid_v2", device).run([&] {
    require_initialized();
    require(uuid != nullptr);
    require_device(device);
    *uuid = uuid_of(device);
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return Call("cuDevicePrimaryCtxRetain", device).run([&] {
    require_initialized();
    require(context != nullptr);
    Context& primary = primary_context(device);
    primary.retain();
    *context = &primary;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return Call("cuDevicePrimaryCtxRelease_v2", device).run([&] {
    require_initialized();
    Context& primary = primary_context(device);
    if (!primary.release()) return;
    forget_streams_of(primary);
    forget_events_of(primary);
    memory().free_all_of(device);
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  return Call("cuDevicePrimaryCtxGetState", device).run([&] {
    require_initialized();
    require(flags != nullptr && is_active != nullptr);
    *flags = 0;
    *is_active = primary_context(device).is_active() ? 1 : 0;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return Call("cuCtxGetCurrent").run([&] {
    require_initialized();
    require(context != nullptr);
    *context = current_context_or_none();
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  return Call("cuCtxPushCurrent_v2", context).run([&] {
    require_initialized();
    push_current(context_of(context));
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  return Call("cuCtxPopCurrent_v2").run([&] {
    require_initialized();
    Context& popped = pop_current();
    if (context != nullptr) *context = &popped;
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return Call("cuCtxSetCurrent", context).run([&] {
    require_initialized();
    set_current(context == nullptr ? nullptr : &context_of(context));
  });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return Call("cuCtxGetStreamPriorityRange").run([&] {
    current_context();
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
  });
}
}
