// Blocks that go through the same steps over the network, each one step behind the block before it.
//
// A step of a block is `width` messages each way. All that blocks do at one time, each in another step, is a wave: no
// message of a wave needs another of the same wave, only some of the wave before. So while one block waits for its
// neighbour, the link is busy with others; a block that has taken its last step can be used while those behind it are
// still on the wire; and one that comes late holds up only what comes after it.
//
//   wave 0   wave 1   wave 2   wave 3
//   0.0      0.1 1.0  0.2 1.1 2.0  ...       block.step
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/group.h"
#include "collectives/network/flow.h"

namespace ringtrain {

// Slices laid end to end; counts[r] elements for rank r.
struct Block {
  const char* source;
  char* destination;
  Counts counts;
};

// Arrays cut into blocks, blocks into a slice for each rank, slices into chunks: a chunk is what one message carries.
class Blocks {
 public:
  // Sources and destinations have elements of so many bytes.
  struct Elements {
    size_t source_bytes, destination_bytes;
  };
  Blocks(std::vector<Block> blocks, const Elements& elements, size_t chunk_elements)
      : blocks_(std::move(blocks)), elements_(elements), chunk_elements_(chunk_elements) {
    size_t longest = 0;
    for (const Block& block : blocks_) {
      offsets_.push_back(offsets_of(block.counts));
      longest = std::max(longest, *std::max_element(block.counts.begin(), block.counts.end()));
    }
    chunks_per_slice_ = (longest + chunk_elements - 1) / chunk_elements;
  }

  size_t size() const { return blocks_.size(); }
  size_t chunk_elements() const { return chunk_elements_; }
  // Of the longest slice of all; the last chunks of the others are short or empty.
  size_t chunks_per_slice() const { return chunks_per_slice_; }

  struct Chunk {
    const char* source;
    char* destination;
    size_t count;  // elements
  };
  Chunk chunk(size_t block, int slice, size_t index) const {
    const Block& it = blocks_[block];
    const size_t length = it.counts[slice];
    const size_t begin = std::min(length, index * chunk_elements_);
    const size_t offset = offsets_[block][slice] + begin;
    return {it.source + offset * elements_.source_bytes, it.destination + offset * elements_.destination_bytes,
            std::min(chunk_elements_, length - begin)};
  }

 private:
  const std::vector<Block> blocks_;
  const Elements elements_;
  const size_t chunk_elements_;
  std::vector<Counts> offsets_;  // of the slices of each block
  size_t chunks_per_slice_ = 0;
};

// What of an allreduce is to be done.
enum class Part { reduce_scatter, allgather, both };

class Pipeline : public Messages {
 public:
  // The next block may start. All ranks name the same blocks, but need not release them at the same time.
  void release() { ++released_; }
  void release_all() { released_ = blocks_; }
  // How many messages it takes until `block` has taken its last step.
  size_t messages_until(size_t block) const { return place(block, last_step_) + width_; }

  size_t count() const final { return turns_.size() * width_; }
  bool may_send(size_t i, size_t arrived) const final {
    const Place it = place_of(i);
    return it.block < released_ && (it.step == first_step_ || needs_arrived(it) < arrived);
  }
  bool may_receive(size_t i, size_t sent) const final {
    const Place it = place_of(i);
    return it.block < released_ && is_free(it, sent);
  }

 protected:
  struct Place {
    size_t block, step, index;  // index: among the messages of the step
  };

  // Steps first_step .. end_step - 1.
  Pipeline(size_t blocks, size_t first_step, size_t end_step, size_t width);

  Place place_of(size_t message) const {
    const Turn& turn = turns_[message / width_];
    return {turn.block, turn.step, message % width_};
  }
  // The first message of a step.
  size_t place(size_t block, size_t step) const {
    return places_[block * (last_step_ + 1 - first_step_) + step - first_step_] * width_;
  }
  size_t first_step() const { return first_step_; }

 private:
  // The last message that must have arrived before this one of a later step than the first can be sent.
  virtual size_t needs_arrived(const Place& place) const = 0;
  // Whether what comes in may be written to its place when so many messages have been sent.
  virtual bool is_free(const Place& place, size_t sent) const = 0;

  struct Turn {
    size_t block, step;
  };
  const size_t blocks_, first_step_, last_step_, width_;
  std::vector<Turn> turns_;
  std::vector<size_t> places_;  // in turns_, of each step of each block
  size_t released_ = 0;
};

// A Pipeline on its way.
class Stream {
 public:
  // `peers` outlives this.
  Stream(Endpoint& peers, std::unique_ptr<Pipeline> pipeline)
      : peers_(peers), pipeline_(std::move(pipeline)), flow_(peers, *pipeline_) {}

  void release() { pipeline_->release(); }
  // Moves on what it can without waiting.
  void step() { flow_.step(); }
  void wait_for(size_t block) {
    while (flow_.completed() < pipeline_->messages_until(block)) flow_.wait();
  }

 private:
  Endpoint& peers_;
  const std::unique_ptr<Pipeline> pipeline_;
  Flow flow_;
};

}  // namespace ringtrain
