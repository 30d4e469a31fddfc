#include "network/endpoint.h"

#include <algorithm>
#include <cmath>

#include "base/clock.h"
#include "base/error.h"

namespace ringtrain {

void Endpoint::post(int to, int tag, const void* data, size_t bytes) {
  const char* begin = static_cast<const char*>(data);
  const auto message = std::make_shared<Bytes>(begin, begin + bytes);
  const Network::Lending lending(network_, message);
  posted_.push_back(network_->isend(message->data(), bytes, ranks_[to], tag_ + tag));
  posted_.remove_if([&](NetworkRequest& request) { return test(request); });
}

std::shared_ptr<const Bytes> Endpoint::take(int from, int tag, size_t most_bytes, double longest_s) {
  const auto message = std::make_shared<Bytes>(most_bytes);
  const Network::Lending lending(network_, message);
  NetworkRequest request = network_->irecv(message->data(), most_bytes, ranks_[from], tag_ + tag);
  return comes_true([&] { return test(request); }, longest_s) ? message : nullptr;
}

int Endpoint::sender(int tag) {
  const int rank = network_->sender(ranks_, tag_ + tag);
  return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
}

bool Endpoint::arrives_within(int from, int tag, double longest_s) {
  return comes_true([&] { return network_->has_arrived(ranks_[from], tag_ + tag); }, longest_s);
}

template <typename Ready>
bool Endpoint::comes_true(Ready ready, double longest_s) {
  bool is_ready = false;
  const double end = std::isinf(longest_s) ? longest_s : now_s() + longest_s;
  wait_until([&] { return (is_ready = ready()) || (!std::isinf(end) && now_s() > end); }, longest_s);
  return is_ready;
}

void Endpoint::drain(double longest_s) noexcept {
  const auto is_over = [&](NetworkRequest& request) {
    try {
      return test(request);
    } catch (const std::exception&) {
      return true;
    }
  };
  Waiter::comes_true([&] { return (posted_.remove_if(is_over), posted_.empty()); }, longest_s);
}

}  // namespace ringtrain
