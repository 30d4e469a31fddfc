#include "coordination/ready.h"

#include <algorithm>
#include <limits>

namespace ringtrain {

void Ready::add(int slot, Pending pending) {
  const auto place = static_cast<size_t>(slot);
  if (place >= pending_.size()) {
    pending_.resize(place + 1);
    bits_.resize(words_for(place + 1));
  }
  pending_[place] = std::move(pending);
  set_bit(bits_, place);
}

Pending Ready::take(int slot) {
  const auto place = static_cast<size_t>(slot);
  clear_bit(bits_, place);
  return std::exchange(pending_[place], {});
}

void Ready::add_bits_to(Words& words) const {
  for (size_t i = 0; i < std::min(bits_.size(), words.size()); ++i) words[i] |= bits_[i];
}

std::optional<int> Ready::only_one() const {
  std::optional<int> slot;
  size_t count = 0;
  for_each_bit(bits_, [&](int one) {
    slot = one;
    ++count;
  });
  return count == 1 ? slot : std::nullopt;
}

double Ready::oldest() const {
  double oldest = std::numeric_limits<double>::infinity();
  for_each_bit(bits_, [&](int slot) { oldest = std::min(oldest, pending_[slot].since); });
  return oldest;
}

}  // namespace ringtrain
