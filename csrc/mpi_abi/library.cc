#include "mpi_abi/library.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "runtime/submission_builder.h"

#define EXPORTED __attribute__((visibility("default")))

// ------------------------------------------------------------------------------------------ what XLA does not call

namespace {

[[noreturn]] void refuse(const char* text) {
  std::fprintf(stderr, "ringtrain: %s\n", text);
  std::abort();
}

}  // namespace

extern "C" {
#define CONSTANT(name, value)          \
  EXPORTED extern const intptr_t name; \
  const intptr_t name = value;
#define FUNCTION(name)                                                                               \
  EXPORTED void name() {                                                                             \
    refuse("a program calls " #name ", but ringtrain only carries XLA's collectives: it is no MPI"); \
  }
#define HANDLE(name) CONSTANT(name, __COUNTER__ + 1)
#include "mpi_abi/names.h"
}

namespace ringtrain::mpi_abi {
namespace {

bool is_never_interrupted() { return false; }

std::atomic<bool> is_loaded_{false};

// ----------------------------------------------------------------------------------------------------- communicators

// A message of a rank to itself, until both of its ends are known.
struct OwnMessage {
  const void* sent;
  void* received;
  size_t bytes;
};

struct Comm {
  const std::weak_ptr<Engine> engine;
  const std::string title;
  const int set;                 // the process set
  const std::vector<int> ranks;  // of the world, in the order of the communicator
  const int rank;                // this one's place in it
  // Why it cannot be used: XLA does not look at what MPI_Comm_split returns.
  const std::optional<Error> trouble = std::nullopt;

  Mutex mutex = {};
  // Hashes of the last operations, the same on all ranks unless these disagree.
  std::deque<uint64_t> history GUARDED_BY(mutex) = {};
  std::deque<OwnMessage> own_messages GUARDED_BY(mutex) = {};

  size_t size() const { return ranks.size(); }
};

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr size_t kMost = 16;
  std::string text;
  for (size_t i = 0; i < std::min(kMost, ranks.size()); ++i) text += (i ? "," : "") + std::to_string(ranks[i]);
  return text + (ranks.size() > kMost ? ",..." : "");
}

// The job that this process has joined.
struct Job {
  Job(const std::shared_ptr<Engine>& engine, int rank, std::vector<int> ranks)
      : world{engine, "all ranks", 0, std::move(ranks), rank} {}

  Comm world;
  Mutex mutex = {};
  int splits GUARDED_BY(mutex) = 0;
  std::map<std::vector<int>, int> sets GUARDED_BY(mutex) = {};  // process sets by their ranks
};

Mutex job_mutex;
// Never destroyed: XLA's communicators outlive the engine, and its threads the static objects of this library.
std::shared_ptr<Job>& job_ GUARDED_BY(job_mutex) = *new std::shared_ptr<Job>;

std::shared_ptr<Job> job() {
  const Lock lock(job_mutex);
  if (!job_)
    refuse(
        "XLA makes its devices with \"mpi\" collectives, but this process has not joined the job: call "
        "ringtrain.jax.distributed.init() in the place of jax.distributed.initialize()");
  return job_;
}

Comm& comm_of(uintptr_t handle) {
  return handle == static_cast<uintptr_t>(MPIABI_COMM_WORLD) ? job()->world : *reinterpret_cast<Comm*>(handle);
}

void require_usable(const Comm& comm) {
  if (comm.trouble) throw Error(*comm.trouble);
  if (comm.engine.lock() != require_engine())
    throw Error(ErrorKind::not_initialized,
                "this mesh was made before shutdown() and init(): JAX cannot join a job twice in one process");
}

// -------------------------------------------------------------------------------------------------------- operations

struct Elements {
  DType dtype;
  int64_t per_element;  // numbers of this dtype
  bool is_complex;
};

Elements elements_of(uintptr_t type) {
  const struct {
    intptr_t handle;
    Elements elements;
  } kTypes[] = {
      {MPIABI_BYTE, {DType::uint8, 1, false}},
      {MPIABI_INT8_T, {DType::int8, 1, false}},
      {MPIABI_UINT8_T, {DType::uint8, 1, false}},
      {MPIABI_INT16_T, {DType::int16, 1, false}},
      {MPIABI_UINT16_T, {DType::uint16, 1, false}},
      {MPIABI_INT32_T, {DType::int32, 1, false}},
      {MPIABI_UINT32_T, {DType::uint32, 1, false}},
      {MPIABI_INT64_T, {DType::int64, 1, false}},
      {MPIABI_UINT64_T, {DType::uint64, 1, false}},
      {MPIABI_FLOAT, {DType::float32, 1, false}},
      {MPIABI_DOUBLE, {DType::float64, 1, false}},
      {MPIABI_C_BOOL, {DType::boolean, 1, false}},
      {MPIABI_C_COMPLEX, {DType::float32, 2, true}},
      {MPIABI_C_FLOAT_COMPLEX, {DType::float32, 2, true}},
      {MPIABI_C_DOUBLE_COMPLEX, {DType::float64, 2, true}},
  };
  for (const auto& known : kTypes)
    if (static_cast<uintptr_t>(known.handle) == type) return known.elements;
  throw invalid("XLA sends elements of a type that ringtrain does not know");
}

ReduceOp reduction_of(uintptr_t op, const Elements& elements) {
  const auto is = [&](intptr_t handle) { return static_cast<uintptr_t>(handle) == op; };
  if (is(MPIABI_SUM)) return ReduceOp::sum;
  if (elements.is_complex) throw invalid("complex numbers can be summed, but not multiplied or compared");
  if (is(MPIABI_PROD)) return ReduceOp::product;
  if (is(MPIABI_MIN)) return ReduceOp::min;
  if (is(MPIABI_MAX)) return ReduceOp::max;
  throw invalid("XLA asks for a reduction that ringtrain does not know");
}

TensorSpec spec_of(const Elements& elements, int64_t count) {
  if (count < 0)
    throw invalid("XLA sends more than 2147483647 elements at once, which its calls cannot count: use smaller arrays");
  return {elements.dtype, {count * elements.per_element}};
}

TensorView view_of(const void* address, TensorSpec spec) { return {const_cast<void*>(address), std::move(spec)}; }

Request request_of(OpKind kind, int set, std::string name) {
  Request request{{}, 0, nullptr};
  request.operation.kind = kind;
  request.operation.process_set = set;
  request.operation.name = std::move(name);
  return request;
}

uint64_t hash_of(uint64_t seed, uint64_t value) { return (seed ^ value) * 0x9E3779B97F4A7C15u; }

// Waits for it, and until nobody works with its memory any more: XLA uses it again.
const Result& result_of(Handle& handle) {
  constexpr double kLook_s = 60, kUntilFree_s = 2;
  while (!handle.is_done()) {
    const std::shared_ptr<Engine> engine = current_engine();
    engine ? engine->wait(handle, kLook_s, &is_never_interrupted) : handle.wait(kLook_s);
  }
  Waiter::comes_true([&] { return handle.is_memory_free(); }, kUntilFree_s);
  return handle.result();
}

// An operation of all ranks of the communicator, into memory that XLA gives.
//
// XLA's calls have no names. A name of the communicator alone would show at once that the ranks' programs differ, but
// operations of one name and several shapes are negotiated anew each time. So the name says what the operations before
// this one were: the ranks agree about that unless one of these has failed on all of them, and a repeated step has the
// same names.
void carry_out(Comm& comm, OpKind kind, ReduceOp op, const void* in, const TensorSpec& input, void* out,
               const TensorSpec& output) {
  constexpr size_t kRemembered = 4;
  require_usable(comm);
  if (comm.size() == 1) {
    if (out != in) std::memmove(out, in, input.bytes());
    return;
  }
  std::shared_ptr<Handle> handle;
  {
    const Lock lock(comm.mutex);
    uint64_t before = 0;
    for (const uint64_t one : comm.history) before = hash_of(before, one);
    char suffix[16];
    std::snprintf(suffix, sizeof(suffix), " #%04x", static_cast<unsigned>(before >> 48));
    Request request = request_of(kind, comm.set, comm.title + suffix);
    request.operation.op = op;
    SubmissionBuilder builder(std::move(request));
    builder.add_input(view_of(in, input));
    builder.add_output(view_of(out, output));
    builder.let_wait_for_name();
    handle = builder.submit(Engine::Caller::waits);
    const uint64_t what = hash_of(static_cast<uint64_t>(kind), static_cast<uint64_t>(op));
    comm.history.push_back(
        hash_of(hash_of(what, static_cast<uint64_t>(input.dtype)), static_cast<uint64_t>(input.count())));
    if (comm.history.size() > kRemembered) comm.history.pop_front();
  }
  try {
    result_of(*handle);
  } catch (const Error&) {
    const Lock lock(comm.mutex);
    comm.history.clear();
    throw;
  }
}

// A send or a receive, for MPI_Wait.
struct Message {
  std::shared_ptr<Handle> handle;  // null: to this rank itself
};

Message own_message(Comm& comm, const void* sent, void* received, size_t bytes) {
  const Lock lock(comm.mutex);
  const auto is_other_end = [&](const OwnMessage& one) { return (one.sent == nullptr) == (sent != nullptr); };
  const auto other = std::find_if(comm.own_messages.begin(), comm.own_messages.end(), is_other_end);
  if (other == comm.own_messages.end()) {
    comm.own_messages.push_back({sent, received, bytes});
    return {};
  }
  if (sent == nullptr) sent = other->sent;
  if (received == nullptr) received = other->received;
  const bool fits = other->bytes == bytes;
  comm.own_messages.erase(other);
  if (!fits) throw invalid("XLA sends this rank another number of bytes than it receives from it");
  std::memmove(received, sent, bytes);
  return {};
}

// One of `sent` and `received` is null.
Message begin_message(Comm& comm, int peer, const void* sent, void* received, const TensorSpec& spec) {
  require_usable(comm);
  const size_t bytes = spec.bytes();
  if (peer < 0 || static_cast<size_t>(peer) >= comm.size()) throw invalid("XLA sends to a rank that does not exist");
  if (peer == comm.rank) return own_message(comm, sent, received, bytes);
  int source = comm.ranks[static_cast<size_t>(comm.rank)], destination = comm.ranks[static_cast<size_t>(peer)];
  if (received) std::swap(source, destination);
  const std::string name = comm.title + " " + std::to_string(source) + "->" + std::to_string(destination);
  Request request = request_of(OpKind::transfer, comm.set, "");
  request.title = std::make_shared<const std::string>("transfer \"" + name + "\"");
  request.operation.numbers = {source, destination, 0};
  SubmissionBuilder builder(std::move(request));
  const TensorView view = view_of(received ? received : sent, {DType::uint8, {static_cast<int64_t>(bytes)}});
  builder.add_input(view);
  if (received) builder.add_output(view);
  return {builder.submit(Engine::Caller::goes_on)};
}

void finish(const Message& message) {
  if (message.handle) result_of(*message.handle);
}

// ------------------------------------------------------------------------------------------------- new communicators

// The process set of these ranks in this order, which only they ask for.
int set_of(Job& job, const std::vector<int>& ranks) {
  if (ranks == job.world.ranks) return 0;
  {
    const Lock lock(job.mutex);
    const auto it = job.sets.find(ranks);
    if (it != job.sets.end()) return it->second;
  }
  Request request = request_of(OpKind::open_process_set, 0, "<open_process_set " + ranks_text(ranks) + ">");
  request.operation.numbers.assign(ranks.begin(), ranks.end());
  const auto handle = SubmissionBuilder(std::move(request)).submit(Engine::Caller::waits);
  const int set = static_cast<int>(result_of(*handle).number);
  const Lock lock(job.mutex);
  return job.sets[ranks] = set;
}

// Returns color and key of each rank, as given to MPI_Comm_split.
std::vector<int32_t> all_choices(Job& job, int number, int color, int key) {
  const std::vector<int32_t> own = {color, key};
  std::vector<int32_t> all(2 * job.world.size());
  if (job.world.size() == 1) return own;
  Request request = request_of(OpKind::allgather, 0, "mesh " + std::to_string(number));
  static const auto kSite = std::make_shared<const std::string>(
      "the first use of a mesh of devices, for which ringtrain needs all ranks, and XLA calls those alone that have a "
      "device in it: make the mesh of devices of all ranks, with one more axis if some of them compute together");
  request.site = kSite;
  SubmissionBuilder builder(std::move(request));
  builder.add_input(view_of(own.data(), {DType::int32, {1, 2}}));
  builder.add_output(view_of(all.data(), {DType::int32, {static_cast<int64_t>(job.world.size()), 2}}));
  builder.let_wait_for_name();
  result_of(*builder.submit(Engine::Caller::waits));
  return all;
}

std::unique_ptr<Comm> split(Job& job, int color, int key) {
  const auto next = [&] {
    const Lock lock(job.mutex);
    return ++job.splits;
  };
  const int number = next();
  const int own = job.world.rank;
  std::vector<int> ranks = {own};
  int set = 0;
  const auto trouble = error_of([&] {
    const std::vector<int32_t> all = all_choices(job, number, color, key);
    std::vector<std::pair<int, int>> members;  // key, rank
    for (size_t r = 0; r < job.world.size(); ++r)
      if (all[2 * r] == color) members.emplace_back(all[2 * r + 1], static_cast<int>(r));
    std::sort(members.begin(), members.end());
    ranks.clear();
    for (size_t i = 0; i < members.size(); ++i) {
      ranks.push_back(members[i].second);
      if (members[i].first == static_cast<int>(i)) continue;
      throw failure(
          "XLA's collectives over ringtrain need one device in each process and each mesh used first by all ranks in "
          "one order, but rank " +
          std::to_string(ranks.back()) + " brings device number " + std::to_string(members[i].first) +
          " of the mesh where number " + std::to_string(i) +
          " is expected. Unset JAX_NUM_CPU_DEVICES and xla_force_host_platform_device_count.");
    }
    if (ranks.size() > 1) set = set_of(job, ranks);
  });
  const auto place = std::find(ranks.begin(), ranks.end(), own) - ranks.begin();
  const std::string title = "mesh " + std::to_string(number) + " of ranks " + ranks_text(ranks);
  return std::unique_ptr<Comm>(new Comm{job.world.engine, title, set, ranks, static_cast<int>(place), trouble});
}

// XLA asks for the text of an error on the thread that has met it, before it calls anything else.
thread_local std::string last_error;

template <typename Work>
int code_of(Work work) {
  const auto error = error_of(work);
  if (!error) return static_cast<int>(MPIABI_SUCCESS);
  last_error = std::string("ringtrain.") + name_of(error->kind()) + ": " + error->what();
  return 1;
}

}  // namespace

bool is_loaded() { return is_loaded_; }

void attach(int rank, int size) {
  std::vector<int> ranks;
  for (int i = 0; i < size; ++i) ranks.push_back(i);
  const Lock lock(job_mutex);
  job_ = std::make_shared<Job>(require_engine(), rank, std::move(ranks));
}

bool has_meshes() {
  const Lock lock(job_mutex);
  if (!job_) return false;
  const Lock of_job(job_->mutex);
  return job_->splits > 0;
}

}  // namespace ringtrain::mpi_abi

// ------------------------------------------------------------------------------------------------- what XLA calls

namespace abi = ringtrain::mpi_abi;
using Handle = uintptr_t;

extern "C" {

// MPItrampoline calls this when it has found all names.
EXPORTED void mpiwrapper_export_fortran_constants_() { abi::is_loaded_ = true; }

EXPORTED int MPIABI_Get_library_version(char* text, int* length) {
  *length = std::snprintf(text, 64, "ringtrain, for XLA's collectives");
  return 0;
}

EXPORTED int MPIABI_Init_thread(int*, char***, int, int* provided) {
  abi::job();
  *provided = static_cast<int>(MPIABI_THREAD_MULTIPLE);
  return 0;
}

EXPORTED int MPIABI_Finalize() { return 0; }

// Any thread may call: XLA does from threads of its own, and refuses those that are not this one.
EXPORTED int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return 0;
}

EXPORTED int MPIABI_Comm_rank(Handle comm, int* rank) {
  *rank = abi::comm_of(comm).rank;
  return 0;
}

EXPORTED int MPIABI_Comm_size(Handle comm, int* size) {
  *size = static_cast<int>(abi::comm_of(comm).size());
  return 0;
}

EXPORTED int MPIABI_Comm_split(Handle, int color, int key, Handle* made) {
  const std::shared_ptr<abi::Job> job = abi::job();
  *made = reinterpret_cast<Handle>(abi::split(*job, color, key).release());
  return 0;
}

EXPORTED int MPIABI_Comm_free(Handle* comm) {
  if (*comm != static_cast<Handle>(MPIABI_COMM_WORLD)) delete reinterpret_cast<abi::Comm*>(*comm);
  *comm = static_cast<Handle>(MPIABI_COMM_NULL);
  return 0;
}

EXPORTED int MPIABI_Error_string(int, char* text, int* length) {
  constexpr size_t kRoom = 1023;  // of MPI_MAX_ERROR_STRING
  const std::string& whole = abi::last_error;
  const std::string cut = whole.size() <= kRoom ? whole : whole.substr(0, kRoom - 4) + " ...";
  std::memcpy(text, cut.c_str(), cut.size() + 1);
  *length = static_cast<int>(cut.size());
  return 0;
}

EXPORTED int MPIABI_Allreduce(const void* in, void* out, int count, Handle type, Handle op, Handle comm) {
  return abi::code_of([&] {
    const abi::Elements elements = abi::elements_of(type);
    const ringtrain::TensorSpec spec = abi::spec_of(elements, count);
    abi::carry_out(abi::comm_of(comm), ringtrain::OpKind::allreduce, abi::reduction_of(op, elements), in, spec, out,
                   spec);
  });
}

EXPORTED int MPIABI_Allgather(const void* in, int count, Handle type, void* out, int, Handle, Handle comm_handle) {
  return abi::code_of([&] {
    abi::Comm& comm = abi::comm_of(comm_handle);
    const abi::Elements elements = abi::elements_of(type);
    const ringtrain::TensorSpec own = abi::spec_of(elements, count);
    ringtrain::TensorSpec all = own;
    all.shape[0] *= static_cast<int64_t>(comm.size());
    abi::carry_out(comm, ringtrain::OpKind::allgather, ringtrain::ReduceOp::sum, in, own, out, all);
  });
}

// XLA's parts are all as long.
EXPORTED int MPIABI_Reduce_scatter(const void* in, void* out, const int* counts, Handle type, Handle op,
                                   Handle comm_handle) {
  return abi::code_of([&] {
    abi::Comm& comm = abi::comm_of(comm_handle);
    const abi::Elements elements = abi::elements_of(type);
    if (std::any_of(counts, counts + comm.size(), [&](int count) { return count != counts[0]; }))
      throw ringtrain::invalid("XLA scatters parts of several lengths");
    const ringtrain::TensorSpec own = abi::spec_of(elements, counts[0]);
    ringtrain::TensorSpec all = own;
    all.shape[0] *= static_cast<int64_t>(comm.size());
    abi::carry_out(comm, ringtrain::OpKind::reducescatter, abi::reduction_of(op, elements), in, all, out, own);
  });
}

EXPORTED int MPIABI_Isend(const void* data, int count, Handle type, int to, int, Handle comm, Handle* request) {
  *request = 0;
  return abi::code_of([&] {
    const ringtrain::TensorSpec spec = abi::spec_of(abi::elements_of(type), count);
    *request =
        reinterpret_cast<Handle>(new abi::Message(abi::begin_message(abi::comm_of(comm), to, data, nullptr, spec)));
  });
}

EXPORTED int MPIABI_Irecv(void* data, int count, Handle type, int from, int, Handle comm, Handle* request) {
  *request = 0;
  return abi::code_of([&] {
    const ringtrain::TensorSpec spec = abi::spec_of(abi::elements_of(type), count);
    *request =
        reinterpret_cast<Handle>(new abi::Message(abi::begin_message(abi::comm_of(comm), from, nullptr, data, spec)));
  });
}

EXPORTED int MPIABI_Wait(Handle* request, void*) {
  const std::unique_ptr<abi::Message> message(reinterpret_cast<abi::Message*>(*request));
  *request = 0;
  return message ? abi::code_of([&] { abi::finish(*message); }) : 0;
}

EXPORTED int MPIABI_Sendrecv(const void* out, int out_count, Handle out_type, int to, int, void* in, int in_count,
                             Handle in_type, int from, int, Handle comm_handle, void*) {
  return abi::code_of([&] {
    abi::Comm& comm = abi::comm_of(comm_handle);
    const ringtrain::TensorSpec received = abi::spec_of(abi::elements_of(in_type), in_count);
    const ringtrain::TensorSpec sent = abi::spec_of(abi::elements_of(out_type), out_count);
    const abi::Message one = abi::begin_message(comm, from, nullptr, in, received);
    const abi::Message other = abi::begin_message(comm, to, out, nullptr, sent);
    // Both, also if the first has failed: XLA uses the memory of both again.
    const auto error = ringtrain::error_of([&] { abi::finish(other); });
    abi::finish(one);
    if (error) throw ringtrain::Error(*error);
  });
}
}
