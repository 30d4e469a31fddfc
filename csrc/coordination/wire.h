// Messages from one rank to another, in order for each pair and tag: what Channels are made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/error.h"

namespace ringtrain {

// Thrown when a message is none that ranks of this version send.
inline Error invalid_from(int rank, const std::string& what) {
  return failure("rank " + std::to_string(rank) + " has sent " + what +
                 ". The ranks are out of step: do all of them run the same version of ringtrain?");
}

enum class Tag : int { call, bits, gather, broadcast };

class Wire {
 public:
  virtual ~Wire() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Which rank of the world that is, for messages.
  virtual int rank_of_world(int rank) const { return rank; }

  // Does not wait for the receiver; copies the data.
  virtual void send(int to, Tag tag, const void* data, size_t bytes) = 0;
  // Waits. The number of bytes is known to both sides; with Tag::bits a message may be shorter.
  virtual void receive(int from, Tag tag, void* data, size_t bytes) = 0;
  // Whether a message from anybody is there, and taking it.
  virtual bool has_arrived(Tag tag) = 0;
  virtual void receive_from_any(Tag tag, void* data, size_t bytes) = 0;
  // Waits for a message, but not longer than this; whether one is there.
  virtual bool arrives_within(int from, Tag tag, double seconds) = 0;

  // The same for a size that only the sender knows: it goes ahead, in a message of its own.
  void send(int to, Tag tag, const Bytes& bytes) {
    const uint64_t size = bytes.size();
    send(to, tag, &size, sizeof(size));
    if (size > 0) send(to, tag, bytes.data(), size);
  }
  Bytes receive(int from, Tag tag) {
    constexpr uint64_t kMostBytes = 1 << 30;
    uint64_t size = 0;
    receive(from, tag, &size, sizeof(size));
    if (size > kMostBytes) throw invalid_from(rank_of_world(from), "the length " + std::to_string(size));
    Bytes bytes(size);
    if (size > 0) receive(from, tag, bytes.data(), size);
    return bytes;
  }
};

}  // namespace ringtrain
