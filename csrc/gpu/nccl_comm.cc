#include "gpu/nccl_comm.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "base/signals.h"

namespace ringtrain {
namespace {

constexpr int kSuccess = 0, kInProgress = 7;
// How long NCCL gets to end what is under way.
constexpr double kLongestAbort_s = 5;

// Each on a thread of its own. Those that do not return in time stay behind.
void call_all(const NcclCaller& caller, const std::vector<NcclHandle>& handles,
              void (*call)(const NcclLibrary&, NcclHandle)) {
  const auto left = std::make_shared<std::atomic<size_t>>(handles.size());
  for (const NcclHandle handle : handles) {
    start_thread([left, &library = caller.library(), gpu = caller.gpu(), handle, call] {
      const Gpu::Current current(*gpu);
      call(library, handle);
      --*left;
    }).detach();
  }
  Waiter::comes_true([&] { return *left == 0; }, kLongestAbort_s);
}

}  // namespace

// -------------------------------------------------------------------------------------------------------------- calls

void NcclCaller::run(const char* name, NcclHandle comm, std::function<int()> call) {
  comm_ = comm;
  // NCCL says what is wrong to the thread that has made the call.
  const auto answer = [&library = library_, gpu = gpu_, call = std::move(call)] {
    const Gpu::Current current(*gpu);
    const int code = call();
    return code == kSuccess ? std::string() : library.text(code);
  };
  const std::string trouble = thread_.run(answer, watch_);
  if (!trouble.empty()) throw failure(std::string(name) + ": " + trouble + ". NCCL_DEBUG=INFO says more");
}

// ------------------------------------------------------------------------------------------------------- communicator

NcclId NcclComm::new_id(NcclCaller& caller) {
  const auto id = std::make_shared<NcclId>();
  caller.run("ncclGetUniqueId", nullptr, [&library = caller.library(), id] { return library.GetUniqueId(id.get()); });
  return *id;
}

std::unique_ptr<NcclComm> NcclComm::make(std::shared_ptr<NcclCaller> caller, const NcclId& id, int rank, int size) {
  const auto handle = std::make_shared<NcclHandle>();
  caller->run("ncclCommInitRankConfig", nullptr, [&library = caller->library(), id, rank, size, handle] {
    NcclConfig config;
    return library.CommInitRankConfig(handle.get(), size, id, rank, &config);
  });
  return std::unique_ptr<NcclComm>(new NcclComm(std::move(caller), *handle, rank, size));
}

std::unique_ptr<NcclComm> NcclComm::split(int color, int key, int rank, int size) const {
  const auto handle = std::make_shared<NcclHandle>();
  caller_->run("ncclCommSplit", handle_, [&library = library(), parent = handle_, color, key, handle] {
    return library.CommSplit(parent, color, key, handle.get(), nullptr);
  });
  if (!*handle) return nullptr;
  return std::unique_ptr<NcclComm>(new NcclComm(caller_, *handle, rank, size));
}

NcclComm::~NcclComm() { abort({this}); }

std::optional<void*> NcclComm::register_buffer(void* memory, size_t bytes) {
  const auto registration = std::make_shared<std::optional<void*>>();
  caller_->run("ncclCommRegister", handle_, [&library = library(), handle = handle_, memory, bytes, registration] {
    void* known = nullptr;
    if (library.CommRegister(handle, memory, bytes, &known) == kSuccess) *registration = known;
    return kSuccess;
  });
  return *registration;
}

void NcclComm::deregister(void* registration) {
  if (!registration || !handle_) return;
  caller_->run("ncclCommDeregister", handle_, [&library = library(), handle = handle_, registration] {
    library.CommDeregister(handle, registration);
    return kSuccess;
  });
}

void NcclComm::require_well() const {
  int code = kSuccess;
  const int asked = library().CommGetAsyncError(handle_, &code);
  if (asked != kSuccess) code = asked;
  if (code == kSuccess || code == kInProgress) return;
  throw Error(ErrorKind::peer_lost, "NCCL lost another rank, or the way to it: " + library().text(code, handle_));
}

// Whatever becomes of it, nobody else may end it then. NCCL's result does not matter.
void NcclComm::close() {
  caller_->run("ncclCommDestroy", nullptr, [&library = library(), handle = std::exchange(handle_, nullptr)] {
    library.CommDestroy(handle);
    return kSuccess;
  });
}

// ncclCommAbort frees memory that an abandoned call may still use: where NCCL can, that call is ended first.
void NcclComm::abort(const std::vector<NcclComm*>& comms) {
  const NcclCaller* caller = nullptr;
  std::vector<NcclHandle> handles;
  for (NcclComm* comm : comms) {
    if (!comm->handle_) continue;
    caller = comm->caller_.get();
    handles.push_back(std::exchange(comm->handle_, nullptr));
  }
  if (!caller) return;
  const NcclHandle in_use = caller->busy_with();
  if (caller->library().CommRevoke && std::find(handles.begin(), handles.end(), in_use) != handles.end()) {
    call_all(*caller, {in_use}, [](const NcclLibrary& library, NcclHandle handle) { library.CommRevoke(handle, 0); });
    Waiter::comes_true([&] { return !caller->busy_with(); }, kLongestAbort_s);
  }
  call_all(*caller, handles, [](const NcclLibrary& library, NcclHandle handle) { library.CommAbort(handle); });
}

}  // namespace ringtrain
