// Messages from one rank to another, in order for each pair and tag: what a TreeChannel is made of.
#pragma once

#include <cstddef>

namespace ringtrain {

enum class Tag : int { call = 1, bits, gather, broadcast };

class Wire {
 public:
  virtual ~Wire() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Does not wait for the receiver; copies the data.
  virtual void send(int to, Tag tag, const void* data, size_t bytes) = 0;
  // Waits. The number of bytes is known to both sides.
  virtual void receive(int from, Tag tag, void* data, size_t bytes) = 0;
  virtual void receive_from_any(Tag tag, void* data, size_t bytes) = 0;
  // Whether a message from anybody is there.
  virtual bool has_arrived(Tag tag) = 0;
  // Waits for a message, but not longer than this; whether one is there.
  virtual bool arrives_within(int from, Tag tag, double seconds) = 0;
};

}  // namespace ringtrain
