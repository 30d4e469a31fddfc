#include "xla/exchange.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "runtime/engine.h"
#include "runtime/submission_builder.h"
#include "xla/completer.h"

namespace ringtrain::xla {
namespace {

constexpr int64_t kNowhere = -1;

// The same text in each execution of a program, which has it at the same place as a rule.
std::shared_ptr<const std::string> kept(std::string_view text) {
  constexpr size_t kMost = 256;
  thread_local std::unordered_map<const char*, std::shared_ptr<const std::string>> texts;
  std::shared_ptr<const std::string>& found = texts[text.data()];
  if (found && *found == text) return found;
  auto fresh = std::make_shared<const std::string>(text);
  found = fresh;
  if (texts.size() > kMost) texts.clear();
  return fresh;
}

}  // namespace

struct Exchange::Ends {
  int64_t dest, process_set, recvtag, sendtag, sent, source;
  std::shared_ptr<const std::string> site;

  explicit Ends(const Call& call) {
    call.read_integers({{"dest", &dest},
                        {"process_set", &process_set},
                        {"recvtag", &recvtag},
                        {"sendtag", &sendtag},
                        {"sent", &sent},
                        {"source", &source}});
    site = kept(call.view("site"));
  }
  int64_t received(const Call& call) const { return source == kNowhere ? 0 : call.results() - 1; }
};

void Exchange::begin(const Call& call) {
  const Ends ends(call);
  if (begin_directly(call, ends)) return;
  const int own = require_engine()->rank();
  const auto submit = [&](Array array, bool sends) {
    Request request;
    request.site = ends.site;
    request.operation.kind = OpKind::transfer;
    request.operation.process_set = static_cast<int32_t>(ends.process_set);
    if (sends)
      request.operation.numbers = {own, ends.dest, ends.sendtag};
    else
      request.operation.numbers = {ends.source, own, ends.recvtag};
    SubmissionBuilder builder(std::move(request));
    const TensorView view{array.data, std::move(array.spec), TensorView::kHost, nullptr};
    builder.add_input(view);
    if (!sends) builder.add_output(view);
    submitted_.push_back(builder.submit(Engine::Caller::waits));
  };
  for (int64_t i = 0; i < ends.received(call); ++i) submit(call.result(i), false);
  for (int64_t i = 0; i < ends.sent; ++i) submit(call.argument(i), true);
}

bool Exchange::begin_directly(const Call& call, const Ends& ends) {
  const int64_t received = ends.received(call);
  if (static_cast<size_t>(received + ends.sent) > direct_.size()) return false;
  const auto add = [&](const Call::Raw& array, bool sends) {
    DirectEnd& end = direct_[direct_count_];
    end.sends = sends;
    end.process_set = static_cast<int32_t>(ends.process_set);
    end.tag = sends ? ends.sendtag : ends.recvtag;
    end.peer = static_cast<int>(sends ? ends.dest : ends.source);
    end.memory = static_cast<char*>(array.data);
    end.dtype = array.dtype;
    end.site = ends.site;
    const auto all = static_cast<size_t>(array.dimensions) + (array.is_complex ? 1 : 0);
    if (all > DirectEnd::kMostDimensions) return false;
    end.dimensions = static_cast<uint16_t>(all);
    std::copy_n(array.shape, array.dimensions, end.shape.begin());
    if (array.is_complex) end.shape[all - 1] = 2;
    ++direct_count_;
    return true;
  };
  bool can_begin = true;
  for (int64_t i = 0; i < received; ++i) can_begin = can_begin && add(call.raw_result(i), false);
  for (int64_t i = 0; i < ends.sent; ++i) can_begin = can_begin && add(call.raw_argument(i), true);
  if (can_begin && require_engine()->begin(direct_ends())) return true;
  direct_count_ = 0;
  return false;
}

bool Exchange::is_done() const {
  const auto is_done = [](const auto& handle) { return handle->is_done(); };
  return std::all_of(submitted_.begin(), submitted_.end(), is_done) &&
         std::all_of(direct_.begin(), direct_.begin() + direct_count_, [](const DirectEnd& end) {
           const DirectEnd::State state = end.state.load(std::memory_order_acquire);
           return state == DirectEnd::State::done || (state == DirectEnd::State::handed_over && end.handle->is_done());
         });
}

bool Exchange::wait(double timeout_s) {
  if (is_done()) return true;
  if (direct_count_ > 0) {
    if (const std::shared_ptr<Engine> engine = current_engine()) engine->carry(direct_ends());
    if (is_done()) return true;
  }
  const double deadline = now_s() + timeout_s;
  for (const std::shared_ptr<Handle>& handle : handles())
    if (!wait_for(*handle, std::max(deadline - now_s(), 0.0))) return false;
  return is_done();
}

void Exchange::require() const {
  for (const std::shared_ptr<Handle>& handle : handles()) handle->result();
}

void Exchange::leave_to_engine() {
  if (const std::shared_ptr<Engine> engine = current_engine()) engine->hand_over(direct_ends());
}

bool Exchange::is_memory_free() const {
  const std::vector<std::shared_ptr<Handle>> all = handles();
  return is_done() && std::all_of(all.begin(), all.end(), [](const auto& one) { return one->is_memory_free(); });
}

std::vector<std::shared_ptr<Handle>> Exchange::handles() const {
  std::vector<std::shared_ptr<Handle>> handles = submitted_;
  for (size_t i = 0; i < direct_count_; ++i)
    if (direct_[i].state.load(std::memory_order_acquire) == DirectEnd::State::handed_over)
      handles.push_back(direct_[i].handle);
  return handles;
}

}  // namespace ringtrain::xla
