// Rows of bits, as the ranks exchange them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringtrain {

using Words = std::vector<uint64_t>;
constexpr size_t kBitsPerWord = 64;

// How many words hold so many bits.
inline size_t words_for(size_t bits) { return (bits + kBitsPerWord - 1) / kBitsPerWord; }

inline void set_bit(Words& words, size_t bit) { words[bit / kBitsPerWord] |= uint64_t{1} << (bit % kBitsPerWord); }
inline void clear_bit(Words& words, size_t bit) { words[bit / kBitsPerWord] &= ~(uint64_t{1} << (bit % kBitsPerWord)); }

// Calls visit(bit) for each bit that is set, in order.
template <typename Visit>
void for_each_bit(const Words& words, Visit visit) {
  for (size_t i = 0; i < words.size(); ++i)
    for (uint64_t rest = words[i]; rest != 0; rest &= rest - 1)
      visit(static_cast<int>(i * kBitsPerWord) + __builtin_ctzll(rest));
}

}  // namespace ringtrain
