#include "collective.h"

#include <algorithm>
#include <cstring>

namespace gpu_double {
namespace {

class Rounds {
 public:
  Rounds(Communicator& communicator, const Collective& collective) : us_(communicator), what_(collective) {}

  bool agree() {
    const int half = us_.half();
    RankSlot* const ranks = (*us_.segment)->ranks;
    ranks[us_.rank].descriptors[half] = descriptor();
    us_.next_round();
    for (int rank = 0; rank < us_.size; ++rank)
      if (!(ranks[rank].descriptors[half] == descriptor())) return false;
    return true;
  }

  void run() {
    switch (what_.kind) {
      case Kind::allreduce:
      case Kind::reduce:
        return reduce_part(0, what_.receive);
      case Kind::reduce_scatter:
        for (int owner = 0; owner < us_.size; ++owner)
          reduce_part(static_cast<size_t>(owner) * bytes(), owner == us_.rank ? what_.receive : nullptr);
        return;
      case Kind::allgather:
        return gather();
      case Kind::broadcast:
        return broadcast();
    }
  }

 private:
  Descriptor descriptor() const {
    const uint32_t op = what_.is_scaled ? nccl::kFirstOwnOp : static_cast<uint32_t>(what_.reduction);
    return {static_cast<uint32_t>(what_.kind), static_cast<uint32_t>(what_.type), op, static_cast<uint32_t>(what_.root),
            what_.count};
  }

  size_t bytes() const { return what_.count * size_of(what_.type); }

  // Writes its share of each chunk with `give`, and reads what all wrote with `take`.
  template <typename Give, typename Take>
  void each_chunk(Give give, Take take) {
    RankSlot* const ranks = (*us_.segment)->ranks;
    for (size_t begin = 0; begin < bytes(); begin += kChunkBytes) {
      const size_t length = std::min(kChunkBytes, bytes() - begin);
      const int half = us_.half();
      give(begin, length, ranks[us_.rank].chunks[half]);
      us_.next_round();
      const char* chunks[kMostRanks];
      for (int rank = 0; rank < us_.size; ++rank) chunks[rank] = ranks[rank].chunks[half];
      take(begin, length, chunks);
    }
  }

  // `count` values that are `offset` bytes behind the beginning; `receive` is null on ranks that do not want them.
  void reduce_part(size_t offset, char* receive) {
    const size_t width = size_of(what_.type);
    each_chunk(
        [&](size_t begin, size_t length, char* slot) {
          const char* const from = what_.send + offset + begin;
          if (what_.is_scaled)
            scale(what_.type, what_.scalar.data(), from, length / width, slot);
          else
            std::memcpy(slot, from, length);
        },
        [&](size_t begin, size_t length, const char* const* chunks) {
          if (receive != nullptr)
            reduce(what_.type, what_.reduction, chunks, us_.size, length / width, receive + begin);
        });
  }

  void gather() {
    each_chunk([&](size_t begin, size_t length, char* slot) { std::memcpy(slot, what_.send + begin, length); },
               [&](size_t begin, size_t length, const char* const* chunks) {
                 for (int rank = 0; rank < us_.size; ++rank)
                   std::memcpy(what_.receive + static_cast<size_t>(rank) * bytes() + begin, chunks[rank], length);
               });
  }

  void broadcast() {
    each_chunk(
        [&](size_t begin, size_t length, char* slot) {
          if (us_.rank == what_.root) std::memcpy(slot, what_.send + begin, length);
        },
        [&](size_t begin, size_t length, const char* const* chunks) {
          std::memcpy(what_.receive + begin, chunks[what_.root], length);
        });
  }

  Communicator& us_;
  const Collective& what_;
};

}  // namespace

void carry_out(Communicator& communicator, const Collective& collective) {
  Rounds rounds(communicator, collective);
  if (rounds.agree())
    rounds.run();
  else
    communicator.fail_everywhere(nccl::kInvalidUsage);
}

}  // namespace gpu_double
