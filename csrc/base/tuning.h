// What may change while the job runs, and only by what all ranks agree on.
#pragma once

#include <cstddef>

namespace ringtrain {

struct Tuning {
  size_t fusion_threshold_bytes = 0;
  size_t mailbox_bytes = 0;        // of one shared-memory mailbox that are used
  size_t ring_chunk_bytes = 0;     // of one message of the ring
  size_t network_small_bytes = 0;  // up to here reductions between nodes take the road for small ones

  bool operator==(const Tuning& other) const {
    return fusion_threshold_bytes == other.fusion_threshold_bytes && mailbox_bytes == other.mailbox_bytes &&
           ring_chunk_bytes == other.ring_chunk_bytes && network_small_bytes == other.network_small_bytes;
  }
};

}  // namespace ringtrain
