#include "network/network.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/wait.h"

namespace ringtrain {
namespace {

// Of a thread, since several of them may each be in the middle of an operation.
thread_local std::shared_ptr<const void> lent;

}  // namespace

NetworkRequest& NetworkRequest::operator=(NetworkRequest&& other) noexcept {
  std::swap(network_, other.network_);
  std::swap(handle_, other.handle_);
  std::swap(can_be_cancelled_, other.can_be_cancelled_);
  std::swap(memory_, other.memory_);
  return *this;
}

NetworkRequest::~NetworkRequest() {
  if (network_) network_->abandon(std::move(*this));
}

Network::Lending::Lending(Network* network, std::shared_ptr<const void> memory)
    : network_(network), before_(std::move(memory)) {
  if (network_) std::swap(lent, before_);
}

Network::Lending::~Lending() {
  if (network_) std::swap(lent, before_);
}

NetworkRequest Network::begun(uint64_t handle, Kind kind) {
  NetworkRequest request;
  request.network_ = this;
  request.handle_ = handle;
  request.can_be_cancelled_ = kind == Kind::message;
  request.memory_ = lent;
  return request;
}

void Network::keep_lent() { keep_for_ever(lent); }

void Network::keep(const NetworkRequest& request) const {
  if (!lets_go_at_once()) keep_for_ever(request.memory_);
}

// The thread that looks first takes what has come for others, too: their descriptor is not readable when they sleep.
void Network::sleep(double pause_s, double longest_s, Watch* watch) {
  constexpr double kMoment_s = 0.02;
  if (let_senders_go()) return;
  if (descriptor() < 0) {
    const Aside aside(watch);
    return Waiter::nap(pause_s);
  }
  thread_local const Descriptor event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  sleepers_.push_back(event.number());
  {
    const Aside aside(watch);
    const timespec moment = {0, static_cast<long>(std::clamp(longest_s, 0.0, kMoment_s) * 1e9)};
    std::array<pollfd, 2> waiting = {pollfd{descriptor(), POLLIN, 0}, pollfd{event.number(), POLLIN, 0}};
    ppoll(waiting.data(), waiting.size(), &moment, nullptr);
  }
  const auto own = std::find(sleepers_.begin(), sleepers_.end(), event.number());
  if (own != sleepers_.end()) {
    sleepers_.erase(own);
  } else {
    eventfd_t count;
    eventfd_read(event.number(), &count);
  }
}

void Network::wake_sleepers() {
  for (const int event : sleepers_) eventfd_write(event, 1);
  sleepers_.clear();
}

bool Network::test(NetworkRequest& request) {
  if (!abandoned_.empty()) forget_ended();
  if (request.has_ended()) return true;
  bool has_ended = false;
  const int code = look(request.handle_, has_ended);
  if (code != 0) keep(request);
  if (code != 0 || has_ended) request.end();
  require_success(code);
  return has_ended;
}

// Cancelled requests usually end at once. The others end when their ranks go on, or never.
void Network::abandon(NetworkRequest request) noexcept {
  if (request.can_be_cancelled_) cancel(request.handle_);
  abandoned_.push_back(std::move(request));
  forget_ended();
}

// The memory they own is freed after them, since it may free more.
void Network::forget_ended() noexcept {
  std::vector<std::shared_ptr<const void>> memory;
  for (NetworkRequest& request : abandoned_) {
    bool has_ended = false;
    const int code = look(request.handle_, has_ended);
    if (code != 0) keep(request);
    if (code == 0 && !has_ended) continue;
    memory.push_back(request.memory_);
    request.end();
  }
  abandoned_.erase(std::remove_if(abandoned_.begin(), abandoned_.end(),
                                  [](const NetworkRequest& request) { return request.has_ended(); }),
                   abandoned_.end());
}

int Network::sender(const std::vector<int>& ranks, int tag) {
  for (const int rank : ranks)
    if (has_arrived(rank, tag)) return rank;
  throw failure("a message of any rank has arrived, but of none of them");
}

Network::~Network() { keep_for_ever(std::move(abandoned_)); }

}  // namespace ringtrain
