#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "base/wait.h"
#include "gpu/cuda.h"
#include "runtime/engine.h"
#include "xla/completer.h"
#include "xla/handlers.h"
#include "xla/operations.h"

namespace ringtrain::xla::on_gpu {
namespace {

// How long one thing is waited for before it is looked at again. The engine ends what stalls.
constexpr double kLong_s = 0.2;

// Where the program runs.
struct Place {
  GpuPtr gpu;
  CudaStream stream;
};

// `word`: an array of the call's that is not empty.
Place place_of(CudaStream stream, const void* word) {
  const int ordinal = CudaDriver::get().device_of(reinterpret_cast<CudaAddress>(word));
  return {require_engine()->gpu(ordinal), stream};
}

// Throws not_initialized when the engine has ended meanwhile.
void wait_for_gpu(const GpuEvent& event) {
  while (!Waiter::comes_true([&] { return event.has_come(); }, kLong_s)) require_engine();
}

// The values of a small array, for which the host waits.
std::shared_ptr<char> on_host(const Array& array, const Place& place) {
  const size_t bytes = array.spec.bytes();
  std::shared_ptr<char> here = place.gpu->pinned(bytes);
  wait_for_gpu(*place.gpu->copy_for_user(here.get(), array.data, bytes, place.stream));
  return here;
}

// By process set and name, which are in flight once: the tickets of what programs have started and not finished.
class Unfinished {
 public:
  // One that is there already is of a program that XLA has given up.
  void put(std::string key, uint32_t ticket) {
    const Lock lock(mutex_);
    tickets_[std::move(key)] = ticket;
  }
  uint32_t take(const std::string& key) {
    const Lock lock(mutex_);
    const auto found = tickets_.find(key);
    if (found == tickets_.end()) throw failure("XLA has finished an operation that was never started");
    const uint32_t ticket = found->second;
    tickets_.erase(found);
    return ticket;
  }

 private:
  Mutex mutex_;
  std::map<std::string, uint32_t> tickets_ GUARDED_BY(mutex_);
};

// Never destroyed: threads of XLA may be at work when the process ends.
Unfinished& unfinished() {
  static Unfinished& all = *new Unfinished;
  return all;
}

// How often programs have come to what has a name.
class Executions {
 public:
  // Counts one more. Returns whether that is the first, second, fourth, eighth and so on.
  bool count(const std::string& name) {
    const Lock lock(mutex_);
    const uint64_t number = ++counts_[name];
    return (number & (number - 1)) == 0;
  }

 private:
  Mutex mutex_;
  std::map<std::string, uint64_t> counts_ GUARDED_BY(mutex_);
};

// Never destroyed, as above.
Executions& executions() {
  static Executions& all = *new Executions;
  return all;
}

std::string key_of(const Call& call, const std::string& name) {
  return std::to_string(call.integer("process_set")) + " " + name;
}

// The names of what is finished: each behind its length and a colon.
std::vector<std::string> names_of(const Call& call) {
  const std::string all = call.text("names");
  std::vector<std::string> names;
  for (size_t begin = 0; begin < all.size();) {
    const size_t colon = all.find(':', begin);
    const size_t length = std::stoul(all.substr(begin, colon - begin));
    names.push_back(all.substr(colon + 1, length));
    begin = colon + 1 + length;
  }
  return names;
}

void copy_through(const Call& call, int64_t results, const Place& place) {
  for_each_moved(call, results, [&](void* to, const void* from, size_t bytes) {
    place.gpu->copy_for_user(to, from, bytes, place.stream);
  });
}

// Once it is done: has the stream wait for it, and puts its result, if it has one of its own, where XLA needs it.
void put_in_stream(const Started& started, const Place& place, void* to, size_t bytes) {
  if (started.error) throw Error(*started.error);
  const Result& result = started.handle->result();
  if (result.done) result.done->let_wait(place.stream);
  if (to == nullptr) return;
  const OwnedTensor& tensor = result_of(started, bytes);
  if (bytes > 0) tensor.block->is_used_until(place.gpu->copy_for_user(to, tensor.block->data(), bytes, place.stream));
}

void finish_in_stream(const Call& call, const Place& place) {
  const OpKind kind = kind_of(call);
  const bool has_own_results = !is_in_place(kind) && kind != OpKind::barrier;
  std::vector<Started> all;
  std::vector<uint32_t> numbers;
  for (const std::string& name : names_of(call)) {
    numbers.push_back(unfinished().take(key_of(call, name)));
    all.push_back(tickets().await(numbers.back()));
  }
  for (const Started& started : all)
    while (started.handle && !wait_for(*started.handle, kLong_s)) continue;
  const auto error = error_of([&] {
    for (size_t i = 0; i < all.size(); ++i) {
      const auto result = static_cast<int64_t>(i);
      void* const to = has_own_results ? call.result_address(result) : nullptr;
      put_in_stream(all[i], place, to, has_own_results ? call.result(result).spec.bytes() : 0);
    }
    if (is_in_place(kind)) require_in_place(call);
    if (kind == OpKind::barrier) copy_through(call, call.results(), place);
  });
  if (error) wait_until_memory_is_free();
  for (const uint32_t number : numbers) tickets().forget(number);
  if (error) throw Error(*error);
}

// As handle(), with the stream of the program.
template <typename Execute>
Failure* handle_in_stream(CallFrame* frame, Execute execute) {
  return handle(frame, [&](const Call& call) {
    Failure* failure = nullptr;
    const CudaStream stream = call.stream(failure);
    return failure ? failure : execute(call, stream);
  });
}

}  // namespace

Failure* start(CallFrame* frame) {
  return handle_in_stream(frame, [](const Call& call, CudaStream stream) -> Failure* {
    Started started;
    started.error = error_of([&] {
      const Place place = place_of(stream, call.result_address(call.results() - 1));
      // A barrier has no arrays that the engine would wait for.
      if (kind_of(call) == OpKind::barrier) wait_for_gpu(*place.gpu->record_of_user(stream));
      const std::shared_ptr<char> weight = is_weighted(call) ? on_host(call.argument(1), place) : nullptr;
      started.handle = submit(call, weight.get(), place.gpu->ordinal(), stream);
    });
    unfinished().put(key_of(call, call.text("name")), tickets().add(std::move(started)));
    return nullptr;
  });
}

Failure* finish(CallFrame* frame) {
  return handle_in_stream(frame, [](const Call& call, CudaStream stream) -> Failure* {
    finish_in_stream(call, place_of(stream, call.argument_address(call.arguments() - 1)));
    return nullptr;
  });
}

Failure* require_finite(CallFrame* frame) {
  return handle_in_stream(frame, [](const Call& call, CudaStream stream) -> Failure* {
    const Array flags = call.argument(1);
    const Place place = place_of(stream, flags.data);
    const std::shared_ptr<char> here = on_host(flags, place);
    Failure* failure = failure_of_flags(call, reinterpret_cast<const int32_t*>(here.get()), flags.spec.count());
    if (failure == nullptr) copy_through(call, 1, place);
    return failure;
  });
}

Failure* report_differences(CallFrame* frame) {
  return handle_in_stream(frame, [](const Call& call, CudaStream stream) -> Failure* {
    const Array flags = call.argument(1);
    const Place place = place_of(stream, flags.data);
    if (executions().count(call.text("before"))) {
      const std::shared_ptr<char> here = on_host(flags, place);
      xla::report_differences(call, reinterpret_cast<const int32_t*>(here.get()), flags.spec.count());
    }
    copy_through(call, 1, place);
    return nullptr;
  });
}

}  // namespace ringtrain::xla::on_gpu
