// What may change while the job runs, and only by what all ranks agree on.
#pragma once

#include <cstddef>

namespace ringtrain {

struct Tuning {
  size_t fusion_threshold_bytes = 0;
  size_t mailbox_bytes = 0;     // of one shared-memory mailbox that are used
  size_t ring_chunk_bytes = 0;  // of one message of the ring
  size_t ring_from_bytes = 0;   // from here on reductions between nodes take the ring

  bool operator==(const Tuning& other) const {
    return fusion_threshold_bytes == other.fusion_threshold_bytes && mailbox_bytes == other.mailbox_bytes &&
           ring_chunk_bytes == other.ring_chunk_bytes && ring_from_bytes == other.ring_from_bytes;
  }
};

}  // namespace ringtrain
