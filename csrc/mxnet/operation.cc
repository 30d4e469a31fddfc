#include "mxnet/operation.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "base/thread_annotations.h"
#include "runtime/submission_builder.h"

namespace ringtrain {
namespace {

// Operations of one name go to the engine in the order in which they were pushed. MXNet's workers run what is ready in
// any order, and ranks that took two operations of one name for each other would sum what does not belong together.
class Lines {
 public:
  // Stays where it is until it was called or has left.
  struct Waiting {
    std::function<void()> begin;  // may destroy this object
    bool is_ready = false;
  };

  // Any thread, as all else. Keys are copies: a callback may destroy the original.
  void join(const Key& key, Waiting* waiting);
  // It is called once all before it in its line were called or have left: here, or on another thread. No lock is held
  // then.
  void ready(Key key, Waiting* waiting);
  // Does nothing if it was called.
  void leave(Key key, const Waiting* waiting);

 private:
  struct Line {
    std::deque<Waiting*> waiting;
    bool is_served = false;  // by a thread that looks again when it has called one
  };

  void serve(const Key& key);
  std::function<void()> next(const Key& key);

  Mutex mutex_;
  std::map<Key, Line> lines_ GUARDED_BY(mutex_);
};

void Lines::join(const Key& key, Waiting* waiting) {
  const Lock lock(mutex_);
  lines_[key].waiting.push_back(waiting);
}

void Lines::ready(Key key, Waiting* waiting) {
  {
    const Lock lock(mutex_);
    waiting->is_ready = true;
    Line& line = lines_.at(key);
    if (std::exchange(line.is_served, true)) return;
  }
  serve(key);
}

void Lines::leave(Key key, const Waiting* waiting) {
  {
    const Lock lock(mutex_);
    const auto it = lines_.find(key);
    if (it == lines_.end()) return;
    Line& line = it->second;
    const auto place = std::find(line.waiting.begin(), line.waiting.end(), waiting);
    if (place == line.waiting.end()) return;
    line.waiting.erase(place);
    if (std::exchange(line.is_served, true)) return;
  }
  serve(key);
}

void Lines::serve(const Key& key) {
  while (const std::function<void()> begin = next(key)) begin();
}

// Null where there is nothing to call: then the line is left to the next operation.
std::function<void()> Lines::next(const Key& key) {
  const Lock lock(mutex_);
  const auto it = lines_.find(key);
  Line& line = it->second;
  if (line.waiting.empty()) {
    lines_.erase(it);
    return nullptr;
  }
  Waiting* first = line.waiting.front();
  if (!first->is_ready) {
    line.is_served = false;
    return nullptr;
  }
  line.waiting.pop_front();
  return std::move(first->begin);
}

MxnetLibrary mxnet;  // constant once it is used
std::atomic<int> pending{0};
// Never destroyed: MXNet's threads begin and delete operations until the process has ended.
Lines& lines = *new Lines;

Mutex mutex;
std::optional<Error>& last_failure GUARDED_BY(mutex) = *new std::optional<Error>;

bool ends_engine(ErrorKind kind) {
  return kind == ErrorKind::peer_lost || kind == ErrorKind::stalled || kind == ErrorKind::remote ||
         kind == ErrorKind::shut_down;
}

void note_failure(const Error& error) {
  if (!ends_engine(error.kind())) return;
  const Lock lock(mutex);
  if (!last_failure) last_failure = error;
}

DType dtype_of(const DlTensor& tensor) {
  constexpr uint8_t kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4;
  const int code_and_bits = tensor.code << 8 | tensor.bits;
  switch (code_and_bits) {
    case kInt << 8 | 8:
      return DType::int8;
    case kInt << 8 | 32:
      return DType::int32;
    case kInt << 8 | 64:
      return DType::int64;
    case kUint << 8 | 1:
      return DType::boolean;
    case kUint << 8 | 8:
      return DType::uint8;
    case kFloat << 8 | 16:
      return DType::float16;
    case kFloat << 8 | 32:
      return DType::float32;
    case kFloat << 8 | 64:
      return DType::float64;
    case kBfloat << 8 | 16:
      return DType::bfloat16;
    default:
      throw invalid("ringtrain cannot send this dtype of MXNet");
  }
}

// Lives until MXNet deletes it, which is after it was completed, or without it was ever begun where an array could not
// be computed.
class Job {
 public:
  Job(Request request, const std::vector<void*>& inputs, const std::vector<void*>& outputs,
      std::optional<double> weight)
      : key_(key_of(request.operation)), request_(std::move(request)), weight_(weight), input_count_(inputs.size()) {
    for (const auto* arrays : {&inputs, &outputs})
      for (void* array : *arrays) keep(array);
    waiting_.begin = [this] { submit(); };
    ++pending;
  }

  ~Job() {
    lines.leave(key_, &waiting_);
    for (DlManaged* managed : memory_) managed->deleter(managed);
    free_arrays();
    if (!is_completed_) --pending;
  }

  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  void join_line() { lines.join(key_, &waiting_); }

  // On a worker of MXNet.
  void begin(const MxnetOnComplete& on_complete) {
    on_complete_ = on_complete;
    lines.ready(key_, &waiting_);
  }

 private:
  void keep(void* array) {
    void* copy = nullptr;
    if (mxnet.shallow_copy(array, &copy) != 0) {
      free_arrays();
      throw failure(mxnet.last_error());
    }
    arrays_.push_back(copy);
  }

  void free_arrays() {
    for (void* array : arrays_) mxnet.free_array(array);
    arrays_.clear();
  }

  void submit() {
    std::shared_ptr<Handle> handle;
    const std::optional<Error> error = error_of([&] { handle = submit_to_engine(); });
    if (error) return complete(error);
    // It may be done already, and this job be gone when this returns.
    handle->on_done([this, raw = handle.get()] { complete(error_of([&] { raw->result(); })); });
  }

  std::shared_ptr<Handle> submit_to_engine() {
    SubmissionBuilder builder(std::move(request_));
    const size_t count = arrays_.size() - input_count_;
    for (size_t i = 0; i < count; ++i) {
      if (input_count_ == 0) {
        builder.add_in_place(view_of_array(i));
        continue;
      }
      builder.add_input(view_of_array(i));
      builder.add_output(view_of_array(input_count_ + i));
    }
    if (weight_) builder.set_weight(*weight_);
    builder.let_wait_for_name();
    return builder.submit(Engine::Caller::goes_on);
  }

  // MXNDArrayGetData may push an operation and wait for it, which in an operation would be for ever.
  TensorView view_of_array(size_t place) {
    constexpr int32_t kCpu = 1, kCpuPinned = 3;
    DlManaged* managed = nullptr;
    if (mxnet.to_dlpack(arrays_[place], &managed) != 0) throw failure(mxnet.last_error());
    memory_.push_back(managed);
    const DlTensor& tensor = managed->tensor;
    if (tensor.device_type != kCpu && tensor.device_type != kCpuPinned)
      throw invalid("an operation of MXNet's engine takes arrays in the host's memory");
    TensorView view;
    view.address = static_cast<char*>(tensor.data) + tensor.byte_offset;
    view.spec = {dtype_of(tensor), Shape(tensor.shape, tensor.shape + tensor.dimensions)};
    return view;
  }

  // MXNet may delete this before it returns.
  void complete(const std::optional<Error>& error) {
    const MxnetOnComplete on_complete = on_complete_;
    is_completed_ = true;
    if (error) note_failure(*error);
    --pending;
    if (!error) return on_complete.call(on_complete.engine, on_complete.param, nullptr);
    // MXNet takes it for a dmlc::Error, which is a std::runtime_error and nothing more.
    const std::runtime_error text(std::string(name_of(error->kind())) + ": " + error->what());
    on_complete.call(on_complete.engine, on_complete.param, &text);
  }

  const Key key_;
  Request request_;
  const std::optional<double> weight_;
  const size_t input_count_;
  std::vector<void*> arrays_;  // the inputs, then the outputs
  std::vector<DlManaged*> memory_;
  Lines::Waiting waiting_;
  MxnetOnComplete on_complete_{};
  bool is_completed_ = false;
};

void begin(void*, void* on_complete, void* param) {
  static_cast<Job*>(param)->begin(*static_cast<const MxnetOnComplete*>(on_complete));
}

void destroy(void* param) { delete static_cast<Job*>(param); }

}  // namespace

void use_mxnet(const MxnetLibrary& library) { mxnet = library; }

// All kinds of contexts are in the host's memory, so the operation itself is always one of cpu(0).
void push_to_mxnet(Request request, const std::vector<void*>& inputs, std::vector<void*> outputs,
                   std::optional<double> weight) {
  struct Context {
    int32_t device_type = 1, device_id = 0;
  };
  static constexpr Context kCpu;
  // Beginning only submits, so the thread that computed the last array does it, and no worker is woken for it.
  static constexpr int kAsync = 4;
  const char* name = name_of(request.operation.kind);
  const int priority = request.priority;
  auto job = std::make_unique<Job>(std::move(request), inputs, outputs, weight);
  std::vector<void*> read = inputs;
  job->join_line();
  // It is MXNet's from here on, whatever becomes of the call.
  if (mxnet.push_async(&begin, job.release(), &destroy, &kCpu, read.data(), static_cast<int>(read.size()),
                       outputs.data(), static_cast<int>(outputs.size()), &kAsync, priority, name, false) != 0)
    throw failure(mxnet.last_error());
}

int pending_in_mxnet() { return pending; }

std::optional<Error> mxnet_failure() {
  const Lock lock(mutex);
  return last_failure;
}

void forget_mxnet_failure() {
  const Lock lock(mutex);
  last_failure.reset();
}

}  // namespace ringtrain
