#include "communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "call.h"
#include "device.h"
#include "settings.h"

namespace gpu_double {
namespace {

bool ranks_may_share_gpus() {
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return settings().nccl_version >= 23000 && enabled != nullptr && std::strcmp(enabled, "1") == 0;
}

struct Member {
  int key, rank;

  bool operator<(const Member& other) const { return key != other.key ? key < other.key : rank < other.rank; }
};

// Those of one color, in the order of their new ranks.
std::vector<Member> members(const Segment& segment, int size, int half, int color) {
  std::vector<Member> found;
  for (int rank = 0; rank < size; ++rank) {
    const SplitWish& wish = segment->ranks[rank].wishes[half];
    if (wish.color == color) found.push_back({wish.key, rank});
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

Patience patience_of_join() {
  const auto begin = std::chrono::steady_clock::now();
  return [begin] {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (settings().join_timeout_s > 0 && waited.count() > settings().join_timeout_s)
      throw Refusal{nccl::kSystemError, "not all ranks have come in time"};
  };
}

Communicator::Communicator(Context& of, const Place& place, int its_rank, int its_size, const Patience& patience)
    : context(of),
      rank(its_rank),
      size(its_size),
      segment(std::make_shared<Segment>(place, its_rank, its_size, whole_uuid_of(of.device), patience)) {
  refuse_shared_gpus();
}

void Communicator::refuse_shared_gpus() const {
  if (ranks_may_share_gpus()) return;
  const RankSlot* const ranks = (*segment)->ranks;
  for (int first = 0; first < size; ++first)
    for (int second = first + 1; second < size; ++second)
      if (std::memcmp(&ranks[first].uuid, &ranks[second].uuid, sizeof(CUuuid)) == 0)
        throw Refusal{nccl::kInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(first) + " and rank " +
                                               std::to_string(second) + " both on one CUDA device"};
}

std::shared_ptr<Communicator> Communicator::split(int color, int key) {
  if (color < nccl::kNoColor) throw Refusal{nccl::kInvalidArgument, "invalid color " + std::to_string(color)};
  const std::lock_guard<std::mutex> lock(splitting_);
  const Patience in_time = patience_of_join();
  const Patience patience = [&] {
    in_time();
    if (is_aborted_) throw Refusal{nccl::kInternalError, "the communicator was aborted while it was split"};
  };
  const uint32_t round = splits_++;
  const int half = static_cast<int>(round & 1);
  const Place own = new_place();
  (*segment)->ranks[rank].wishes[half] = {color, key, own};
  try {
    meet((*segment)->arrived_on_hosts, round, size, patience);
  } catch (const Refusal&) {
    release(own);
    throw;
  }
  const std::vector<Member> group = members(*segment, size, half, color);
  const bool is_first = !group.empty() && group.front().rank == rank;
  if (color == nccl::kNoColor || !is_first) release(own);
  if (color == nccl::kNoColor) return nullptr;
  const Place place = (*segment)->ranks[group.front().rank].wishes[half].place;
  const auto me = std::find_if(group.begin(), group.end(), [&](const Member& one) { return one.rank == rank; });
  return std::make_shared<Communicator>(context, place, static_cast<int>(me - group.begin()),
                                        static_cast<int>(group.size()), patience);
}

void Communicator::launch(const std::vector<std::shared_ptr<Stream>>& streams,
                          std::function<void(Communicator&)> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Point> first{last_};
  for (size_t other = 1; other < streams.size(); ++other) first.push_back({streams[other], streams[other]->tail()});
  last_ = context.enqueue(streams[0], [self = shared_from_this(), first, work = std::move(work)] {
    for (const Point& point : first) point.wait();
    self->run(work);
  });
  for (size_t other = 1; other < streams.size(); ++other)
    context.enqueue(streams[other], [end = last_] { end.wait(); });
}

void Communicator::run(const std::function<void(Communicator&)>& work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_aborted_) return;
    ++running_;
  }
  try {
    work(*this);
  } catch (const Aborted&) {
    // The stream goes on with what is behind it.
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  --running_;
  has_stopped_.notify_all();
}

void Communicator::finish() {
  Point last;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last = last_;
  }
  last.wait();
}

void Communicator::shake_hands() {
  const std::lock_guard<std::mutex> lock(shaking_);
  is_shaking_ = true;
  try {
    meet((*segment)->arrived_in_calls, handshakes_++, size, [this] {
      if (is_aborted_) throw Refusal{nccl::kInternalError, "the communicator was revoked during the call"};
    });
    is_shaking_ = false;
  } catch (const Refusal&) {
    is_shaking_ = false;
    throw;
  }
}

void Communicator::abort() {
  if (is_shaking_) {
    std::fputs("ncclCommAbort frees what a call in another thread still uses\n", stderr);
    std::abort();
  }
  revoke();
  context.synchronize();
}

void Communicator::revoke() {
  std::unique_lock<std::mutex> lock(mutex_);
  is_aborted_ = true;
  for (Word* word : {&(*segment)->arrived_on_streams, &(*segment)->arrived_on_hosts, &(*segment)->arrived_in_calls,
                     &(*segment)->ranks[rank].bell})
    wake_all(*word);
  has_stopped_.wait(lock, [&] { return running_ == 0; });
}

void Communicator::fail_everywhere(int code) {
  uint32_t none = 0;
  (*segment)->error.compare_exchange_strong(none, static_cast<uint32_t>(code));
}

int Communicator::error() const { return static_cast<int>((*segment)->error.load()); }

void Communicator::next_round() {
  meet((*segment)->arrived_on_streams, round_, size, [this] { require_not_aborted(); });
  ++round_;
}

void Communicator::require_not_aborted() const {
  if (is_aborted_) throw Aborted();
}

ncclRedOp_t Communicator::add_op(Type type, const Scalar& scalar) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ops_[next_op_] = {type, scalar};
  return next_op_++;
}

bool Communicator::find_op(ncclRedOp_t op, Type& type, Scalar& scalar) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = ops_.find(op);
  if (found == ops_.end()) return false;
  type = found->second.type;
  scalar = found->second.scalar;
  return true;
}

void Communicator::remove_op(ncclRedOp_t op) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ops_.erase(op) == 0) throw Refusal{nccl::kInvalidArgument, "no such operation was made"};
}

void* Communicator::add_registration() {
  const std::lock_guard<std::mutex> lock(mutex_);
  next_registration_ += 64;
  void* const handle = reinterpret_cast<void*>(next_registration_);
  registrations_.insert(handle);
  return handle;
}

void Communicator::remove_registration(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (registrations_.erase(handle) == 0) throw Refusal{nccl::kInvalidUsage, "no such buffer is registered"};
}

size_t Communicator::count_registrations() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return registrations_.size();
}

}  // namespace gpu_double
