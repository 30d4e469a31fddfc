// One allreduce of a ShmGroup: the three-stage pipeline described in shm_group.h, from the first chunk to the last.
#pragma once

#include <vector>

#include "collectives/layout.h"
#include "collectives/shm/shm_group.h"

namespace ringtrain {

class ShmAllreduce {
 public:
  ShmAllreduce(ShmGroup& group, const Reduction& reduction, const Layout& layout);
  void run();

 private:
  using Control = ShmGroup::Control;

  // The elements of chunk k that `owner` sums.
  struct Slice {
    size_t begin;
    size_t count;
  };
  Slice slice(size_t k, int owner) const;
  uint32_t number(size_t k) const { return first_ + static_cast<uint32_t>(k); }

  bool can_put() const;
  bool can_sum() const;
  bool can_get() const;
  void put();
  void sum();
  void get();
  void wait_for_what_is_next();

  ShmGroup& group_;
  const Reduction& reduction_;
  const Layout& layout_;
  const size_t element_;  // bytes
  const int rank_, size_;
  const size_t chunk_;   // elements of one chunk: a mailbox for every rank
  const size_t chunks_;  // how many there are
  const uint32_t first_;

  size_t put_ = 0, summed_ = 0, got_ = 0;  // chunks that this rank has completed each stage for

  std::vector<Layout::Cursor> put_cursors_, get_cursors_;  // one per owner of a slice
  Layout::Cursor sum_cursor_;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
};

}  // namespace ringtrain
