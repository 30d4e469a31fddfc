// Starting and ending the Engine, submitting, waiting, and results.
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>

#include "base/clock.h"
#include "base/wait.h"
#include "collectives/choose.h"
#include "kernels/reduce.h"
#include "python/bind.h"
#include "runtime/engine.h"
#include "runtime/submission_builder.h"

namespace ringtrain {
namespace {

template <typename Value>
Value field(const nb::object& object, const char* name) {
  return nb::cast<Value>(object.attr(name));
}

MpiDescription to_mpi(const nb::object& library) {
  MpiDescription description;
  description.library = field<std::string>(library, "library");
  description.handle_bytes = field<int>(library, "handle_bytes");
  description.communicator = field<uint64_t>(library, "communicator");
  description.handles = field<std::map<std::string, uint64_t>>(library, "handles");
  description.constants = field<std::map<std::string, int64_t>>(library, "constants");
  return description;
}

SocketDescription to_sockets(const nb::object& sockets) {
  SocketDescription description;
  description.listeners = field<std::vector<int>>(sockets, "listeners");
  for (const auto& of_rank : field<std::vector<std::vector<std::pair<std::string, int>>>>(sockets, "addresses")) {
    auto& addresses = description.addresses.emplace_back();
    for (const auto& [host, port] : of_rank) addresses.push_back({host, port});
  }
  const auto secret = field<nb::bytes>(sockets, "secret");
  description.secret.assign(secret.c_str(), secret.size());
  description.token = field<std::string>(sockets, "token");
  description.streams = field<int>(sockets, "streams");
  description.timeout_s = field<double>(sockets, "timeout_s");
  description.is_sealed = field<bool>(sockets, "is_sealed");
  return description;
}

World to_world(int rank, const std::vector<std::pair<std::string, int64_t>>& names, const std::vector<int>& nodes,
               int cores, const std::string& token, const nb::object& network, int gpu,
               const std::vector<NcclCandidate>& nccl, bool looks_for_sharing) {
  World world;
  world.gpu = gpu;
  world.nccl = nccl;
  world.looks_for_sharing = looks_for_sharing;
  world.rank = rank;
  for (size_t i = 0; i < names.size(); ++i)
    world.names.push_back({static_cast<int>(i), names[i].first, names[i].second});
  world.nodes = nodes;
  world.cores = cores;
  world.token = token;
  if (network.is_none()) return world;
  if (nb::hasattr(network, "listeners"))
    world.network = to_sockets(network);
  else
    world.network = to_mpi(network);
  return world;
}

void init(int rank, const std::vector<std::pair<std::string, int64_t>>& names, const std::vector<int>& nodes, int cores,
          const std::string& token, const nb::object& network, const std::map<std::string, std::string>& texts,
          const std::vector<std::string>& set_by_user, int gpu, const std::vector<NcclCandidate>& nccl,
          bool looks_for_sharing) {
  World world = to_world(rank, names, nodes, cores, token, network, gpu, nccl, looks_for_sharing);
  Options options;
  for (const auto& [name, text] : texts) options.set(name, text);
  options.set_by_user = {set_by_user.begin(), set_by_user.end()};
  choose_simd(options.simd);
  ReleasedGil release;
  start_engine(std::move(world), std::move(options));
}

// (operation, from bytes, algorithm, options) of a job of so many ranks, by the node of each.
std::vector<std::tuple<std::string, size_t, std::string, std::string>> algorithms(
    const std::vector<int>& nodes, const std::map<std::string, std::string>& texts) {
  Options options;
  for (const auto& [name, text] : texts) options.set(name, text);
  Placement placement;
  placement.nodes = nodes;
  for (size_t rank = 0; rank < nodes.size(); ++rank) placement.ranks.push_back(static_cast<int>(rank));
  placement.set_link_rates(given_link_rates(options, placement.distinct_nodes().size()));
  std::vector<std::tuple<std::string, size_t, std::string, std::string>> rows;
  for (AlgorithmChoice& choice : choices_for(placement, options, tuning_of(options)))
    rows.emplace_back(std::move(choice.operation), choice.from_bytes, std::move(choice.algorithm),
                      std::move(choice.options));
  return rows;
}

// (algorithm, seconds, connections of a rank) of an allreduce among ranks that each have a link of their own. MPI's
// own algorithm has no known time.
std::tuple<std::string, double, size_t> predict_allreduce(const std::string& algorithm, size_t ranks, size_t bytes,
                                                          double hop_s, double bytes_per_s, size_t element_bytes,
                                                          double ring_from_kb) {
  constexpr size_t kHalfBytes = 2;
  Options options;
  options.ring_from_kb = ring_from_kb;
  const Tuning tuning = tuning_of(options);
  const Link link = {hop_s, bytes_per_s};
  const Reduction sum = {element_bytes == kHalfBytes ? DType::float16 : DType::float32};
  const Chooser chooser({algorithm, DType::float32, link}, ranks, tuning);
  const Way way = chooser.for_allreduce(sum, bytes / size_of(sum.dtype));
  const bool is_known = way != Way::library;
  const double seconds = is_known ? allreduce_s(way, {ranks, bytes, is_half(sum.dtype)}, link) : std::nan("");
  return {name_of(way), seconds, connections(way, ranks)};
}

void give_up(const std::string& reason, double timeout_s) {
  if (const std::shared_ptr<Engine> engine = current_or_leaving_engine()) engine->report_failure(reason, timeout_s);
}

Operation make_operation(OpKind kind, std::string name, int process_set, ReduceOp op, int root, double prescale,
                         double postscale, std::vector<int64_t> numbers, const std::string& codes, double threshold) {
  Operation operation;
  operation.kind = kind;
  operation.name = std::move(name);
  operation.process_set = process_set;
  operation.op = op;
  operation.root = root;
  operation.factors = {prescale, postscale};
  operation.numbers = std::move(numbers);
  if (!codes.empty()) operation.quantizer = make_quantizer(codes, threshold);
  return operation;
}

SharedHandle submit(const Operation& operation, const nb::list& inputs, const nb::list& outputs,
                    std::vector<int64_t> splits, int priority, bool is_awaited, const Site& site, bool waits_for_name,
                    std::string title, std::optional<double> weight) {
  SubmissionBuilder builder(Request{operation, priority, site.text});
  for (const nb::handle tuple : inputs) builder.add_input(to_view(nb::cast<nb::tuple>(tuple)));
  for (const nb::handle tuple : outputs) builder.add_output(to_view(nb::cast<nb::tuple>(tuple)));
  builder.set_splits(std::move(splits));
  if (waits_for_name) builder.let_wait_for_name();
  if (!title.empty()) builder.set_title(std::move(title));
  if (weight) builder.set_weight(*weight);
  const CudaStream stream = builder.stream();
  return {builder.submit(caller_that(is_awaited)), stream};
}

constexpr double kLeave_s = 1;
constexpr double kNever = std::numeric_limits<double>::infinity();

// Threads in wait_for() that do not hold the GIL.
std::atomic<int> waiting_threads{0};

struct WaitingThread {
  WaitingThread() { ++waiting_threads; }
  ~WaitingThread() { --waiting_threads; }
};

// Waits until threads that waited for a Handle have returned to Python, with the error that it has ended with: one that
// comes too late for that is parked for ever, with all that it keeps. A forked child has no Engine and no such threads.
bool shut_down(const std::string& by, double limit_s) {
  const bool has_engine = current_engine() != nullptr;
  const bool was_well = shut_down_engine(by);
  const double end = now_s() + limit_s;
  while (has_engine && waiting_threads > 0 && now_s() < end) Waiter::nap(1e-3);
  return was_well;
}

// Whether Python has something to do about a signal: an exception of a handler is kept for after the wait.
bool is_interrupted() {
  const TakenGil gil;
  return has_signal_raised();
}

// Memory that the ranks of the node share; None without any.
nb::object empty_bytes(size_t bytes) {
  const std::shared_ptr<Arena> arena = require_engine()->arena();
  if (!arena) return nb::none();
  std::shared_ptr<char> memory;
  {
    ReleasedGil release;  // the system clears the pages
    memory = arena->allocate(bytes);
  }
  return array_of_bytes(std::move(memory), bytes);
}

}  // namespace

// The engine of the Handle may have ended; then the Handle has, too.
bool wait_for(Handle& handle, double timeout_s, double give_up_s) {
  bool is_done = handle.is_done();
  if (!is_done) {
    const WaitingThread counted;
    const std::shared_ptr<Engine> engine = current_engine();
    const ReleasedGil release;
    is_done = engine ? engine->wait(handle, timeout_s, &is_interrupted, give_up_s) : handle.wait(timeout_s);
  }
  if (PyErr_Occurred()) throw nb::python_error();
  if (is_done) handle.result();  // throws if it failed
  return is_done;
}

// The completion of one submission, and the memory of its results.

namespace {

// A result on a GPU, in memory that the core uses again when this is gone.
struct GpuMemory {
  GpuBlockPtr block;
  size_t bytes;
  GpuEventPtr done;

  // The copy is put into the stream; who comes after it there has the values.
  void copy_to(uintptr_t address, uintptr_t stream) const {
    auto* user = reinterpret_cast<CudaStream>(stream);
    done->let_wait(user);
    block->is_used_until(done->gpu().copy_for_user(reinterpret_cast<void*>(address), block->data(), bytes, user));
  }
};

nb::object memory_of(const OwnedTensor& tensor, const GpuEventPtr& done) {
  const size_t bytes = tensor.spec.bytes();
  if (tensor.block) return nb::cast(GpuMemory{tensor.block, bytes, done});
  return array_of_bytes(tensor.memory, bytes);
}

// In host memory the bytes are a NumPy array that keeps the memory alive. With dtype and shape, of which
// the caller makes a typed array.
nb::list tensors_of(const SharedHandle& shared) {
  nb::list tensors;
  const Result& result = shared.handle->result();
  for (const OwnedTensor& tensor : result.tensors)
    tensors.append(
        nb::make_tuple(memory_of(tensor, result.done), static_cast<int>(tensor.spec.dtype), tensor.spec.shape));
  return tensors;
}

void on_done(const SharedHandle& shared, uintptr_t function, uintptr_t argument) {
  shared.handle->on_done(
      [call = reinterpret_cast<void (*)(void*)>(function), argument] { call(reinterpret_cast<void*>(argument)); });
}

// The default stream of the thread that names it, in libraries that have one for each thread.
const CudaStream kStreamOfThread = reinterpret_cast<CudaStream>(2);

}  // namespace

bool SharedHandle::follow(CudaStream follower) const {
  const Result& result = handle->result();
  if (result.done) result.done->let_wait(follower);
  return follower == stream && follower != kStreamOfThread;
}

void bind_handle(nb::module_& module) {
  nb::class_<GpuMemory>(module, "GpuMemory", "A result on a GPU.")
      .def_prop_ro("device", [](const GpuMemory& memory) { return memory.done->gpu().ordinal(); })
      .def("copy_to", &GpuMemory::copy_to, nb::arg("address"), nb::arg("stream"),
           "Put a copy of all its bytes to an address on the GPU into a stream, after the result is there.");
  nb::class_<SharedHandle>(module, "Handle", "Completion of one submitted operation.")
      .def("is_done", [](const SharedHandle& shared) { return shared.handle->is_done(); })
      .def(
          "is_over", [](const SharedHandle& shared) { return shared.handle->is_over(); },
          "Whether it is done, and the GPU has done it, too.")
      .def(
          "is_memory_free", [](const SharedHandle& shared) { return shared.handle->is_memory_free(); },
          "Whether nobody reads or writes its arrays any more, be it done or failed.")
      .def("give_up", [](const SharedHandle& shared) { shared.handle->give_up(); })
      .def("on_done", &on_done, nb::arg("function"), nb::arg("argument"), nb::call_guard<ReleasedGil>(),
           "Calls a C function, void (*)(void*), by its address when it is done: once, and at once if it is already. "
           "Not while the GIL is held. It may submit, but not wait.")
      .def_prop_ro("stream", [](const SharedHandle& shared) { return reinterpret_cast<uintptr_t>(shared.stream); })
      .def(
          "follow",
          [](const SharedHandle& shared, uintptr_t stream) {
            return shared.follow(reinterpret_cast<CudaStream>(stream));
          },
          nb::arg("stream"),
          "Makes a stream of the GPU wait for the result. Whether the operation was submitted in that stream: then "
          "what uses memory of it that is freed now comes after the operation.")
      .def("tensors", &tensors_of, "Results that the operation allocated: (bytes, dtype, shape) each.")
      .def("received_splits", [](const SharedHandle& shared) { return shared.handle->result().received_splits; })
      .def("number", [](const SharedHandle& shared) { return shared.handle->result().number; });
}

void bind_engine(nb::module_& module) {
  nb::class_<Site>(module, "Site", "A place in the user's code, such as \"train.py:31\".")
      .def(nb::new_([](std::string text) { return Site{std::make_shared<const std::string>(std::move(text))}; }),
           nb::arg("text"));
  module.def("init", &init, nb::arg("rank"), nb::arg("names"), nb::arg("nodes"), nb::arg("cores"), nb::arg("token"),
             nb::arg("network").none(), nb::arg("options"), nb::arg("set_by_user"), nb::arg("gpu") = -1,
             nb::arg("nccl") = std::vector<NcclCandidate>(), nb::arg("looks_for_sharing") = true,
             "Starts the engine; all ranks together.");
  module.def("algorithms", &algorithms, nb::arg("nodes"), nb::arg("options"),
             "(operation, from bytes, algorithm, options that change it) of a job, by the node of each rank.");
  module.def("predict_allreduce", &predict_allreduce, nb::arg("algorithm"), nb::arg("ranks"), nb::arg("bytes"),
             nb::arg("hop_s"), nb::arg("bytes_per_s"), nb::arg("element_bytes") = sizeof(float),
             nb::arg("ring_from_kb") = 0,
             "(algorithm, seconds, connections of a rank) of an allreduce among ranks with a link each, by what these "
             "choose by. `algorithm` is as the option allreduce_algorithm; floats have 2 or 4 bytes.");
  module.def(
      "shutdown", [](const std::string& by) { return shut_down(by, kLeave_s); }, nb::arg("by"),
      nb::call_guard<ReleasedGil>(),
      "Leaves the job and ends the engine, if there is one. Returns whether all was well until then. Errors of later "
      "calls name what it was ended by.");
  module.def("give_up", &give_up, nb::arg("reason"), nb::arg("timeout_s"), nb::call_guard<ReleasedGil>(),
             "Tells all others that this rank has failed, and why. Returns when they know, or the time is over.");
  module.def(
      "report_loss",
      [](const std::string& text) {
        if (const auto engine = current_engine()) engine->report_loss(text);
      },
      nb::arg("text"), nb::call_guard<ReleasedGil>(),
      "Another rank is gone, as somebody knows better than the network: what waits for it fails with PeerLostError.");
  module.def("is_initialized", [] { return current_engine() != nullptr; });
  module.def(
      "node_count", [](const std::vector<int>& ranks) { return require_engine()->node_count(ranks); }, nb::arg("ranks"),
      "On how many nodes these ranks are.");
  module.def(
      "require_initialized", [] { require_engine(); },
      "Raises NotInitializedError before init(), after shutdown() and in a forked child.");
  module.def("require_not_forked", &require_not_forked, "Raises RingtrainError in a process forked from a rank.");
  nb::class_<Operation>(module, "Operation", "The part of an operation that ranks agree on.")
      .def(nb::new_(&make_operation), nb::arg("kind"), nb::arg("name"), nb::arg("process_set") = 0,
           nb::arg("op") = ReduceOp::sum, nb::arg("root") = 0, nb::arg("prescale") = 1.0, nb::arg("postscale") = 1.0,
           nb::arg("numbers") = std::vector<int64_t>(), nb::arg("codes") = "", nb::arg("threshold") = 0.0);
  module.def(
      "submit", &submit, nb::arg("operation"), nb::arg("inputs"), nb::arg("outputs"),
      nb::arg("splits") = std::vector<int64_t>(), nb::arg("priority") = 0, nb::arg("is_awaited") = false,
      nb::arg("site") = Site(), nb::arg("waits_for_name") = false, nb::arg("title") = "",
      nb::arg("weight").none() = nb::none(),
      "Hands an operation to the engine. The memory must stay until the Handle is done. A name that is in flight "
      "is an error, unless the operation waits for it: then it is begun when the one before has ended. title: what "
      "messages call it instead of kind and name; empty: nothing else. weight: of this rank, in an average.");
  module.def("empty_bytes", &empty_bytes, nb::arg("bytes"),
             "An array of bytes in memory that the ranks of the node share, or None where there is no such memory.");
  module.def(
      "wait",
      [](const SharedHandle& shared, double timeout_s, double give_up_s) {
        const std::shared_ptr<Handle> handle = shared.handle;
        return wait_for(*handle, timeout_s, give_up_s);
      },
      nb::arg("handle"), nb::arg("timeout_s"), nb::arg("give_up_s") = kNever,
      "Whether the Handle is done, after at most so many seconds. Raises the error with which its operation ended, if "
      "it did, and what a signal handler raises. If an operation makes no progress and give_up_s are over, all fail "
      "with StalledError.");
  module.def(
      "say_blocked",
      [](const std::vector<SharedHandle>& awaited) {
        std::vector<std::shared_ptr<Handle>> handles;
        for (const SharedHandle& shared : awaited) handles.push_back(shared.handle);
        if (const auto engine = current_engine()) engine->say_blocked(std::move(handles));
      },
      nb::arg("awaited"),
      "For what each thread of this rank waits that could submit something; nothing if one of them does not wait.");
}

}  // namespace ringtrain
