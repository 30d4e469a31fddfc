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

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/network/flow.h"

namespace ringtrain {

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
  Stream(Peers& peers, std::unique_ptr<Pipeline> pipeline)
      : peers_(peers), pipeline_(std::move(pipeline)), flow_(peers, *pipeline_) {}

  void release() { pipeline_->release(); }
  // Moves on what it can without waiting.
  void step() { flow_.step(); }
  void wait_for(size_t block) {
    while (flow_.completed() < pipeline_->messages_until(block)) flow_.wait();
  }

 private:
  Peers& peers_;
  const std::unique_ptr<Pipeline> pipeline_;
  Flow flow_;
};

}  // namespace ringtrain
