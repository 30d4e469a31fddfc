#include "coordination/ready.h"

#include <algorithm>
#include <limits>

namespace ringtrain {
namespace {

constexpr int kBits = 64;

template <typename Visit>
void for_each_bit(const Words& words, Visit visit) {
  for (size_t i = 0; i < words.size(); ++i)
    for (uint64_t rest = words[i]; rest != 0; rest &= rest - 1)
      visit(static_cast<int>(i) * kBits + __builtin_ctzll(rest));
}

}  // namespace

void Ready::add(int slot, Pending pending) {
  const auto place = static_cast<size_t>(slot);
  if (place >= pending_.size()) {
    pending_.resize(place + 1);
    bits_.resize(place / kBits + 1);
  }
  pending_[place] = std::move(pending);
  bits_[place / kBits] |= uint64_t{1} << (place % kBits);
}

Pending Ready::take(int slot) {
  const auto place = static_cast<size_t>(slot);
  bits_[place / kBits] &= ~(uint64_t{1} << (place % kBits));
  return std::exchange(pending_[place], {});
}

void Ready::set_bits(Words& words, size_t first_word) const {
  for (size_t i = 0; i < bits_.size() && first_word + i < words.size(); ++i) words[first_word + i] |= bits_[i];
}

double Ready::oldest() const {
  double oldest = std::numeric_limits<double>::infinity();
  for_each_bit(bits_, [&](int slot) { oldest = std::min(oldest, pending_[slot].since); });
  return oldest;
}

std::vector<int> Ready::older_than(double time) const {
  std::vector<int> slots;
  for_each_bit(bits_, [&](int slot) {
    if (pending_[slot].since < time) slots.push_back(slot);
  });
  return slots;
}

}  // namespace ringtrain
