// The control of the fake driver by tests, through ctypes: see test/harness/gpu_double.py.
#include <cstring>

#include "call.h"
#include "context.h"
#include "device.h"
#include "event.h"
#include "memory.h"

using namespace gpu_double;

namespace {

size_t count_contexts() {
  size_t active = 0;
  for (CUdevice device = 0; device < device_count(); ++device) active += primary_context(device).is_active() ? 1 : 0;
  return active;
}

size_t count_device_bytes() {
  size_t bytes = 0;
  for (CUdevice device = 0; device < device_count(); ++device) bytes += memory().used_bytes(device);
  return bytes;
}

struct Count {
  const char* of;
  size_t (*ask)();
};

constexpr Count kCounts[] = {
    {"contexts", count_contexts},
    {"streams", count_streams},
    {"events", count_events},
    {"allocations", [] { return memory().count_device_blocks(); }},
    {"device bytes", count_device_bytes},
    {"pinned bytes", [] { return memory().pinned_bytes(); }},
    {"most pinned bytes", [] { return memory().most_pinned_bytes(); }},
};

}  // namespace

extern "C" {

// -1 for what is not counted. Streams and events are those that were created and not destroyed; device bytes are whole
// pages; most pinned bytes were pinned at one time.
long long gpu_double_count(const char* of) {
  for (const Count& count : kCounts)
    if (std::strcmp(count.of, of) == 0) return static_cast<long long>(count.ask());
  return -1;
}

// The double makes no graphs: a stream that is capturing refuses all work, and unsafe calls meanwhile are refused.
CUresult gpu_double_mark_capturing(CUstream stream, int is_capturing) {
  return Call("gpu_double_mark_capturing", stream, is_capturing).run([&] {
    stream_of(current_context(), stream)->is_capturing = is_capturing != 0;
  });
}

void gpu_double_set_delay_us(long delay_us) { set_delay_us(delay_us); }

void gpu_double_set_log(const char* folder) { Call::log_to(folder); }

// Instead of RINGTRAIN_GPU_DOUBLE_FAIL; calls are counted from now on.
void gpu_double_set_failures(const char* plan) { Call::plan_failures(plan); }

// Where the host finds device memory, even if it is guarded; null for what is none.
void* gpu_double_host_view(CUdeviceptr address, size_t bytes) { return memory().view(address, bytes); }
}
