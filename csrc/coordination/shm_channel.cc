#include "coordination/shm_channel.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {

// A board is written again two exchanges later. By then everybody has announced the one between, so has read this one.
template <typename Write, typename Read>
void ShmChannel::exchange(Write write, Read read) {
  const uint32_t number = ++exchanges_;
  const int parity = static_cast<int>(number % 2);
  write(node_.board(rank(), parity));
  node_.posted(rank()).publish(number);
  for (int i = 1; i < size(); ++i) {
    const int member = (rank() + i) % size();
    waiter_.wait(node_.posted(member), number, &watch_);
  }
  for (int member = 0; member < size(); ++member) read(member, node_.board(member, parity));
}

void ShmChannel::and_bits(Words& words) {
  ++round_;
  const size_t bytes = words.size() * sizeof(uint64_t);
  exchange([&](char* board) { std::memcpy(board, words.data(), bytes); },
           [&](int, const char* board) {
             for (size_t i = 0; i < words.size(); ++i) {
               uint64_t theirs;
               std::memcpy(&theirs, board + i * sizeof(theirs), sizeof(theirs));
               words[i] &= theirs;
             }
           });
}

// Each board carries the length of the whole message and the next part of it; all go on until the longest is through.
std::vector<Bytes> ShmChannel::gather(const Bytes& mine) {
  const size_t part = node_.board_bytes() - sizeof(uint64_t);
  std::vector<Bytes> blobs(static_cast<size_t>(size()));
  size_t longest = mine.size();
  for (size_t begin = 0; begin == 0 || begin < longest; begin += part) {
    exchange(
        [&](char* board) {
          const uint64_t total = mine.size();
          std::memcpy(board, &total, sizeof(total));
          if (begin < total)
            std::memcpy(board + sizeof(total), mine.data() + begin, std::min(part, mine.size() - begin));
        },
        [&](int member, const char* board) {
          uint64_t total;
          std::memcpy(&total, board, sizeof(total));
          longest = std::max<size_t>(longest, total);
          if (begin >= total) return;
          const char* first = board + sizeof(total);
          blobs[member].insert(blobs[member].end(), first, first + std::min<size_t>(part, total - begin));
        });
  }
  return blobs;
}

Bytes ShmChannel::broadcast(const Bytes& mine) { return gather(rank() == 0 ? mine : Bytes())[0]; }

void ShmChannel::call() {
  if (!node_.want_round(round_ + 1)) return;
  for (int member = 0; member < size(); ++member)
    if (member != rank()) node_.bell(member).ring();
}

}  // namespace ringtrain
