// The one Engine of this process.
#include <pthread.h>

#include "base/fork.h"
#include "kernels/reduce.h"
#include "python/bind.h"
#include "python/engine.h"

namespace ringtrain {
namespace {

// Guarded by the GIL. Shared while a call that has released the GIL uses it.
std::shared_ptr<Engine> engine;
// Of a process that had an Engine then.
bool is_forked_child = false;

void disown_in_child() {
  if (!engine) return;
  engine.reset();
  is_forked_child = true;
}

}  // namespace

std::shared_ptr<Engine> running_engine() { return engine; }

std::shared_ptr<Engine> require_engine() {
  if (engine) return engine;
  throw Error(ErrorKind::not_initialized,
              is_forked_child
                  ? "this process was forked from a rank of ringtrain and is no rank itself; let the parent "
                    "process call ringtrain"
                  : "ringtrain is not initialised: call init() first");
}

namespace {

void require_initialized() {
  if (!engine) require_engine();
}

// What Python tells of a tensor: (address, dtype, shape), and of one on a GPU also (..., device, stream).
struct View {
  void* address;
  TensorSpec spec;
  int device = kHost;
  CudaStream stream = nullptr;

  static constexpr int kHost = -1;

  // Of every gradient in every step: without the references that nanobind would count.
  explicit View(const nb::tuple& tuple) {
    constexpr Py_ssize_t kInHostMemory = 3, kOnGpu = 5;
    const Py_ssize_t fields = PyTuple_GET_SIZE(tuple.ptr());
    if (fields != kInHostMemory && fields != kOnGpu) throw invalid("a view has 3 or 5 fields");
    address = reinterpret_cast<void*>(number(tuple, 0));
    spec.dtype = static_cast<DType>(number(tuple, 1));
    spec.shape = nb::cast<Shape>(nb::handle(PyTuple_GET_ITEM(tuple.ptr(), 2)));
    if (address == nullptr && spec.count() > 0)
      throw invalid(
          "the elements of this array are in no memory of its own (its address is 0): send the array that it "
          "wraps, or a copy in plain memory");
    if (fields != kOnGpu) return;
    device = static_cast<int>(number(tuple, 3));
    stream = reinterpret_cast<CudaStream>(number(tuple, 4));
  }

 private:
  static uint64_t number(const nb::tuple& tuple, Py_ssize_t field) {
    const uint64_t value = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(tuple.ptr(), field));
    if (value == static_cast<uint64_t>(-1) && PyErr_Occurred()) throw nb::python_error();
    return value;
  }
};

// Notes where the tensor's stream is now. All tensors of an operation lie on the same device.
void order(Submission& submission, const View& view) {
  Operation& operation = submission.request.operation;
  operation.is_on_gpu = view.device != View::kHost;
  if (!operation.is_on_gpu) return;
  const GpuPtr gpu = engine->gpu(view.device);
  if (view.spec.count() > 0) gpu->require_owns(view.address);
  for (const auto& [stream, event] : submission.ready)
    if (stream == view.stream) return;
  submission.ready.emplace_back(view.stream, gpu->record_of_user(view.stream));
}

World to_world(int rank, const std::vector<std::pair<std::string, int64_t>>& names, const std::vector<int>& nodes,
               int cores, const std::string& token, const nb::object& mpi, int gpu,
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
  if (mpi.is_none()) return world;
  MpiDescription& description = world.mpi.emplace();
  description.library = nb::cast<std::string>(mpi.attr("library"));
  description.handle_bytes = nb::cast<int>(mpi.attr("handle_bytes"));
  description.communicator = nb::cast<uint64_t>(mpi.attr("communicator"));
  description.handles = nb::cast<std::map<std::string, uint64_t>>(mpi.attr("handles"));
  description.constants = nb::cast<std::map<std::string, int64_t>>(mpi.attr("constants"));
  return world;
}

void init(int rank, const std::vector<std::pair<std::string, int64_t>>& names, const std::vector<int>& nodes, int cores,
          const std::string& token, const nb::object& mpi, const std::map<std::string, std::string>& texts,
          const std::vector<std::string>& set_by_user, int gpu, const std::vector<NcclCandidate>& nccl,
          bool looks_for_sharing) {
  if (is_forked_child) throw failure("ringtrain was initialised before this process was forked; use spawn instead");
  World world = to_world(rank, names, nodes, cores, token, mpi, gpu, nccl, looks_for_sharing);
  Options options;
  for (const auto& [name, text] : texts) options.set(name, text);
  options.set_by_user = {set_by_user.begin(), set_by_user.end()};
  choose_simd(options.simd);
  std::shared_ptr<Engine> started;
  {
    nb::gil_scoped_release release;
    // In a forked child it is without its thread, and left alone.
    started = owned_here(new Engine(std::move(world), std::move(options)));
  }
  engine = std::move(started);
}

bool shutdown() {
  std::shared_ptr<Engine> leaving = std::move(engine);
  if (!leaving) return true;
  nb::gil_scoped_release release;
  leaving->shutdown();
  const bool is_well = !leaving->has_failed();
  leaving.reset();  // what it owns takes leave of MPI, which may take a moment
  return is_well;
}

void give_up(const std::string& reason, double timeout_s) {
  const std::shared_ptr<Engine> own = engine;
  if (!own) return;
  nb::gil_scoped_release release;
  own->give_up(reason, timeout_s);
}

// A place in the user's code from which operations are submitted, shared by their requests.
struct Site {
  std::shared_ptr<const std::string> text;
};

// What every operation has; it still lacks its tensors.
Submission new_submission(std::string name, ReduceOp op, double prescale, double postscale, int process_set,
                          int priority, const Site& site) {
  require_initialized();
  Submission submission;
  Operation& operation = submission.request.operation;
  operation.op = op;
  operation.process_set = process_set;
  operation.factors = {prescale, postscale};
  operation.name = std::move(name);
  submission.request.priority = priority;
  submission.request.site = site.text;
  return submission;
}

std::shared_ptr<Handle> hand_over(Submission submission, bool is_awaited) {
  return engine->submit(std::move(submission), is_awaited ? Engine::Caller::waits : Engine::Caller::goes_on);
}

std::shared_ptr<Handle> submit(OpKind kind, const nb::list& inputs, const nb::list& outputs, std::string name,
                               ReduceOp op, int root, double prescale, double postscale, int process_set, int priority,
                               std::vector<int64_t> splits, std::vector<int64_t> numbers, bool is_awaited,
                               const Site& site) {
  Submission submission = new_submission(std::move(name), op, prescale, postscale, process_set, priority, site);
  submission.splits = std::move(splits);
  Operation& operation = submission.request.operation;
  operation.kind = kind;
  operation.root = root;
  for (const nb::handle tuple : inputs) {
    View view(nb::cast<nb::tuple>(tuple));
    order(submission, view);
    submission.inputs.push_back(view.address);
    operation.tensors.push_back(std::move(view.spec));
  }
  for (const nb::handle tuple : outputs) submission.outputs.push_back(View(nb::cast<nb::tuple>(tuple)).address);
  operation.numbers = std::move(numbers);
  return hand_over(std::move(submission), is_awaited);
}

// Whether Python has something to do about a signal: an exception of a handler is kept for after the wait.
bool is_interrupted() {
  nb::gil_scoped_acquire gil;
  return PyErr_Occurred() || PyErr_CheckSignals() != 0;
}

// The engine of the Handle may have ended; then the Handle has, too.
bool wait(const std::shared_ptr<Handle>& handle, double timeout_s) {
  bool is_done = handle->is_done();
  if (!is_done) {
    const std::shared_ptr<Engine> own = engine;
    nb::gil_scoped_release release;
    is_done = own ? own->wait(*handle, timeout_s, &is_interrupted) : handle->wait(timeout_s);
  }
  if (PyErr_Occurred()) throw nb::python_error();
  if (is_done) handle->result();  // throws if it failed
  return is_done;
}

// The road of a gradient: one allreduce of one tensor in place, without lists and keywords.
std::shared_ptr<Handle> allreduce_in_place(const nb::tuple& tuple, std::string name, ReduceOp op, double prescale,
                                           double postscale, int process_set, int priority, bool is_awaited,
                                           const Site& site) {
  View view(tuple);
  Submission submission = new_submission(std::move(name), op, prescale, postscale, process_set, priority, site);
  order(submission, view);
  submission.request.operation.tensors.push_back(std::move(view.spec));
  submission.inputs.push_back(view.address);
  submission.outputs = submission.inputs;
  return hand_over(std::move(submission), is_awaited);
}

// Memory that the ranks of the node share; None without any.
nb::object empty_bytes(size_t bytes) {
  require_initialized();
  const std::shared_ptr<Arena> arena = engine->arena();
  if (!arena) return nb::none();
  std::shared_ptr<char> memory;
  {
    nb::gil_scoped_release release;  // the system clears the pages
    memory = arena->allocate(bytes);
  }
  return array_of_bytes(std::move(memory), bytes);
}

}  // namespace

void bind_engine(nb::module_& module) {
  pthread_atfork(nullptr, nullptr, &disown_in_child);
  nb::class_<Site>(module, "Site", "A place in the user's code, such as \"train.py:31\".")
      .def(nb::new_([](std::string text) { return Site{std::make_shared<const std::string>(std::move(text))}; }),
           nb::arg("text"));
  module.def("init", &init, nb::arg("rank"), nb::arg("names"), nb::arg("nodes"), nb::arg("cores"), nb::arg("token"),
             nb::arg("mpi").none(), nb::arg("options"), nb::arg("set_by_user"), nb::arg("gpu") = -1,
             nb::arg("nccl") = std::vector<NcclCandidate>(), nb::arg("looks_for_sharing") = true,
             "Starts the engine; all ranks together.");
  module.def("shutdown", &shutdown,
             "Leaves the job and ends the engine, if there is one. Whether all was well until then.");
  module.def("give_up", &give_up, nb::arg("reason"), nb::arg("timeout_s"),
             "Tells all others that this rank has failed, and why. Returns when they know, or the time is over.");
  module.def("is_initialized", [] { return engine != nullptr; });
  module.def("require_initialized", &require_initialized,
             "Raises NotInitializedError before init(), after shutdown() and in a forked child.");
  module.def("submit", &submit, nb::arg("kind"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("name"),
             nb::arg("op") = ReduceOp::sum, nb::arg("root") = 0, nb::arg("prescale") = 1.0, nb::arg("postscale") = 1.0,
             nb::arg("process_set") = 0, nb::arg("priority") = 0, nb::arg("splits") = std::vector<int64_t>(),
             nb::arg("numbers") = std::vector<int64_t>(), nb::arg("is_awaited") = false, nb::arg("site") = Site(),
             "Hands an operation to the engine. The memory must stay until the Handle is done.");
  module.def("empty_bytes", &empty_bytes, nb::arg("bytes"),
             "An array of bytes in memory that the ranks of the node share, or None where there is no such memory.");
  module.def(
      "wait", &wait, nb::arg("handle"), nb::arg("timeout_s"),
      "Whether the Handle is done, after at most so many seconds. Raises the error with which its operation ended, if "
      "it did, and what a signal handler raises.");
  module.def(
      "say_blocked",
      [](std::vector<std::shared_ptr<Handle>> awaited) {
        if (engine) engine->say_blocked(std::move(awaited));
      },
      nb::arg("awaited"),
      "For what each thread of this rank waits that could submit something; nothing if one of them does not wait.");
  module.def("allreduce_in_place", &allreduce_in_place, "As submit, for what gradients need, positional only.");
}

}  // namespace ringtrain
