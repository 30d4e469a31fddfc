// The exported calls of NCCL: the library itself, communicators, and buffers that they know.
#include <chrono>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "handles.h"
#include "memory.h"
#include "nccl_library.h"
#include "settings.h"

using namespace gpu_double;

namespace gpu_double {
namespace {

Handles<Communicator>& communicators() {
  static auto* const all = new Handles<Communicator>(0x530000000000);
  return *all;
}

}  // namespace

ncclComm_t open_communicator(std::shared_ptr<Communicator> communicator) {
  return communicators().add(std::move(communicator));
}

std::shared_ptr<Communicator> communicator_of(ncclComm_t handle) {
  std::shared_ptr<Communicator> found = communicators().find(handle);
  require(found != nullptr, "no communicator");
  return found;
}

std::shared_ptr<Communicator> close_communicator(ncclComm_t handle) {
  std::shared_ptr<Communicator> closed = communicators().remove(handle);
  require(closed != nullptr, "no communicator");
  return closed;
}

size_t count_communicators() { return communicators().count(); }

}  // namespace gpu_double

namespace {

void require_blocking(const ncclConfig_t* config) {
  if (config == nullptr) return;
  require(config->magic == nccl::kConfigMagic, "the configuration was not initialized");
  if (config->blocking == 0) throw Refusal{nccl::kInvalidUsage, "the double has blocking communicators only"};
}

// NCCL itself would take GPU 0 where no context is current, which is never what was meant.
Context& required_context() {
  return with_driver([]() -> Context& { return current_context(); });
}

// The allocations of ncclMemAlloc.
struct Allocations {
  std::mutex mutex;
  std::set<void*> alive;
};

Allocations& allocations() {
  static auto* const one = new Allocations;
  return *one;
}

constexpr const char* kSentences[] = {
    "no error",         "unhandled cuda error", "unhandled system error", "internal error",
    "invalid argument", "invalid usage",        "remote process exited",  "operation in progress",
};

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  return Call("ncclGetVersion").run([&] {
    require(version != nullptr, "version is null");
    *version = settings().nccl_version;
  });
}

const char* ncclGetErrorString(ncclResult_t code) {
  constexpr int kKnown = sizeof(kSentences) / sizeof(kSentences[0]);
  return code >= 0 && code < kKnown ? kSentences[code] : "unknown result code";
}

// Valid until this thread asks again.
const char* ncclGetLastError(ncclComm_t) {
  thread_local std::string sentence;
  sentence = Call::last_sentence();
  return sentence.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return Call("ncclGetUniqueId").run([&] {
    require(id != nullptr, "id is null");
    std::memset(id, 0, sizeof(*id));
    const Place place = new_place();
    std::memcpy(id->internal, &place, sizeof(place));
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return Call("ncclCommInitRankConfig", size, rank).run([&] {
    require(made != nullptr, "comm is null");
    require(size >= 1 && size <= kMostRanks, "the double has 1 to " + std::to_string(kMostRanks) + " ranks");
    require(rank >= 0 && rank < size, "rank " + std::to_string(rank) + " of " + std::to_string(size));
    Place place;
    std::memcpy(&place, id.internal, sizeof(place));
    require(place.pid > 0, "no unique id");
    require_blocking(config);
    *made = nullptr;
    Context& context = required_context();
    *made = open_communicator(std::make_shared<Communicator>(context, place, rank, size, patience_of_join()));
  });
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  return Call("ncclCommSplit", handle, color, key).run([&] {
    require(made != nullptr, "newcomm is null");
    require_blocking(config);
    *made = nullptr;
    const std::shared_ptr<Communicator> child = communicator_of(handle)->split(color, key);
    if (child != nullptr) *made = open_communicator(child);
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  return Call("ncclCommDestroy", handle).run([&] {
    std::this_thread::sleep_for(std::chrono::microseconds(settings().destroy_us));
    if (handle != nullptr) close_communicator(handle)->finish();
  });
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  return Call("ncclCommAbort", handle).run([&] {
    if (handle != nullptr) close_communicator(handle)->abort();
  });
}

ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  return Call("ncclCommRevoke", handle, flags).run([&] {
    require(flags == 0, "there are no flags");
    communicator_of(handle)->revoke();
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  return Call("ncclCommGetAsyncError", handle).run([&] {
    require(error != nullptr, "asyncError is null");
    *error = communicator_of(handle)->error();
  });
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return Call("ncclMemAlloc", bytes).run([&] {
    require(pointer != nullptr, "ptr is null");
    Context& context = required_context();
    *pointer = reinterpret_cast<void*>(with_driver([&] { return memory().allocate(context.device, bytes); }));
    const std::lock_guard<std::mutex> lock(allocations().mutex);
    allocations().alive.insert(*pointer);
  });
}

ncclResult_t ncclMemFree(void* pointer) {
  return Call("ncclMemFree", pointer).run([&] {
    required_context();
    if (pointer == nullptr) return;
    {
      const std::lock_guard<std::mutex> lock(allocations().mutex);
      require(allocations().alive.erase(pointer) == 1, "not from ncclMemAlloc");
    }
    with_driver([&] {
      Block block;
      if (memory().find(reinterpret_cast<uintptr_t>(pointer), block)) primary_context(block.device).synchronize();
      memory().free(reinterpret_cast<uintptr_t>(pointer));
    });
  });
}

ncclResult_t ncclCommRegister(ncclComm_t handle, void* buffer, size_t bytes, void** registration) {
  return Call("ncclCommRegister", handle, bytes).run([&] {
    const std::shared_ptr<Communicator> communicator = communicator_of(handle);
    require(registration != nullptr, "handle is null");
    require(memory().view(reinterpret_cast<uintptr_t>(buffer), bytes) != nullptr, "the buffer is no GPU memory");
    *registration = communicator->add_registration();
  });
}

ncclResult_t ncclCommDeregister(ncclComm_t handle, void* registration) {
  return Call("ncclCommDeregister", handle).run([&] { communicator_of(handle)->remove_registration(registration); });
}

// The control of the fake NCCL by tests: see test/harness/gpu_double.py.

// -1 for what is not counted.
long long gpu_double_nccl_count(const char* of) {
  const std::string what = of;
  if (what == "communicators") return static_cast<long long>(count_communicators());
  if (what == "registrations") {
    size_t all = 0;
    communicators().each([&](const Communicator& one) { all += one.count_registrations(); });
    return static_cast<long long>(all);
  }
  if (what != "nccl allocations") return -1;
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  return static_cast<long long>(allocations().alive.size());
}
}
