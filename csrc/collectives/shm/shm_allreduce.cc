#include "collectives/shm/shm_allreduce.h"

#include <algorithm>

#include "kernels/copy.h"

namespace ringtrain {

ShmAllreduce::ShmAllreduce(ShmGroup& group, const Reduction& reduction, const Layout& layout)
    : group_(group),
      reduction_(reduction),
      layout_(layout),
      element_(size_of(reduction.dtype)),
      rank_(group.rank()),
      size_(group.size()),
      chunk_(static_cast<size_t>(size_) *
             (std::min(group.memory_.geometry.mailbox_bytes, group.tuning_.mailbox_bytes) / element_)),
      chunks_((layout.total() + chunk_ - 1) / chunk_),
      first_(group.next_chunk_),
      put_cursors_(static_cast<size_t>(size_)),
      get_cursors_(static_cast<size_t>(size_)),
      sources_(static_cast<size_t>(size_)) {}

ShmAllreduce::Slice ShmAllreduce::slice(size_t k, int owner) const {
  const size_t line = 64 / element_;
  const size_t length = std::min(chunk_, layout_.total() - k * chunk_);
  const size_t ranks = static_cast<size_t>(size_), place = static_cast<size_t>(owner);
  const size_t usual = ((length + ranks - 1) / ranks + line - 1) / line * line;
  const size_t begin = std::min(length, place * usual), end = std::min(length, (place + 1) * usual);
  return {k * chunk_ + begin, end - begin};
}

void ShmAllreduce::run() {
  while (got_ < chunks_) {
    if (can_get())
      get();
    else if (can_sum())
      sum();
    else if (can_put())
      put();
    else
      wait_for_what_is_next();
  }
  group_.next_chunk_ = number(chunks_);
}

// What this rank has got was in its mailboxes, which nobody else reads any more once all owners have summed it. Only
// what an operation before this one has left in a lane may still be read by others.
bool ShmAllreduce::can_put() const {
  const size_t depth = static_cast<size_t>(group_.memory_.geometry.depth);
  const bool is_free = put_ >= depth || group_.who_has_not(&Control::got, group_.got_before(number(put_))) < 0;
  return put_ < chunks_ && put_ < got_ + depth && is_free;
}

bool ShmAllreduce::can_sum() const {
  return summed_ < put_ && group_.who_has_not(&Control::put, number(summed_) + 1) < 0;
}

bool ShmAllreduce::can_get() const {
  return got_ < summed_ && group_.who_has_not(&Control::summed, number(got_) + 1) < 0;
}

void ShmAllreduce::put() {
  for (int i = 1; i < size_; ++i) {
    const int owner = (rank_ + i) % size_;
    const Slice part = slice(put_, owner);
    char* mailbox = group_.mailbox(rank_, owner, number(put_));
    layout_.for_each(put_cursors_[owner], part.begin, part.count,
                     [&](const char* source, char*, size_t offset, size_t count) {
                       copy(mailbox + offset * element_, source, count * element_);
                     });
  }
  group_.control(rank_).put.publish(number(put_) + 1);
  ++put_;
}

void ShmAllreduce::sum() {
  const Slice part = slice(summed_, rank_);
  layout_.for_each(sum_cursor_, part.begin, part.count,
                   [&](const char* source, char* destination, size_t offset, size_t count) {
                     destinations_.assign(1, destination);
                     for (int peer = 0; peer < size_; ++peer) {
                       if (peer == rank_) continue;
                       char* mailbox = group_.mailbox(peer, rank_, number(summed_)) + offset * element_;
                       sources_[peer] = mailbox;
                       destinations_.push_back(mailbox);
                     }
                     sources_[rank_] = source;
                     reduce(reduction_, destinations_.data(), size_, sources_.data(), size_, count);
                   });
  group_.control(rank_).summed.publish(number(summed_) + 1);
  ++summed_;
}

void ShmAllreduce::get() {
  for (int i = 1; i < size_; ++i) {
    const int owner = (rank_ + i) % size_;
    const Slice part = slice(got_, owner);
    const char* mailbox = group_.mailbox(rank_, owner, number(got_));
    layout_.for_each(get_cursors_[owner], part.begin, part.count,
                     [&](const char*, char* destination, size_t offset, size_t count) {
                       copy(destination, mailbox + offset * element_, count * element_);
                     });
  }
  group_.control(rank_).got.publish(number(got_) + 1);
  ++got_;
}

// Only for one of those who are missing: what it brings may let another stage go on.
void ShmAllreduce::wait_for_what_is_next() {
  Flag Control::* stage = got_ < summed_ ? &Control::summed : summed_ < put_ ? &Control::put : &Control::got;
  const uint32_t count = got_ < summed_   ? number(got_) + 1
                         : summed_ < put_ ? number(summed_) + 1
                                          : group_.got_before(number(put_));
  const int peer = group_.who_has_not(stage, count);
  if (peer >= 0) group_.wait_for(group_.control(peer).*stage, count);
}

}  // namespace ringtrain
