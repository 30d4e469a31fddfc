// Blocks that go through the same steps over the network, each one step behind the block before it.
//
// A step of a block is some messages each way, as many in one as in the other: empty ones count. All that blocks do at
// one time, each in another step, is a wave: no message of a wave needs another of the same wave, only some of the wave
// before. So while one block waits for its neighbour, the link is busy with others; a block that has taken its last
// step can be used while those behind it are still on the wire; and one that comes late holds up only what comes after
// it.
//
//   wave 0   wave 1   wave 2   wave 3
//   0.0      0.1 1.0  0.2 1.1 2.0  ...       block.step
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/wait.h"
#include "collectives/group.h"
#include "collectives/joined_blocks.h"
#include "network/endpoint.h"

namespace ringtrain {

// A piece of memory that goes to a peer, or comes from it. Empty ones are not sent: both sides know the sizes.
struct Message {
  char* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

// Describes the messages 0 .. count() - 1 of both directions; implemented by each algorithm. Each direction goes in
// this order, so two ranks must have the messages between them in the same order.
class Messages {
 public:
  virtual ~Messages() = default;
  virtual size_t count() const = 0;
  virtual Message outgoing(size_t i) = 0;
  virtual Message incoming(size_t i) = 0;
  // Message i is there; called in order.
  virtual void arrived(size_t) {}
  // Whether message i may go out when so many have arrived, and may come in when so many have been sent.
  virtual bool may_send(size_t, size_t /*arrived*/) const { return true; }
  virtual bool may_receive(size_t, size_t /*sent*/) const { return true; }
  // Whether the Watch is told when all have been sent.
  virtual bool is_long() const { return false; }
};

// A stream of messages out and another in, several of each under way all the time. Messages under way when it is
// destroyed, after an error, stay with the Network.
class Flow {
 public:
  // Both outlive this.
  Flow(Endpoint& peers, Messages& messages)
      : peers_(peers), messages_(messages), count_(messages.count()), pace_(2 * count_) {}

  bool is_done() const { return completed() == count_; }
  // How many messages have both arrived and been sent.
  size_t completed() const { return std::min(arrived_, sent_); }
  // Starts and finishes what it can without waiting; how many sends and receives it has finished.
  int step();
  // Waits until there was something to finish.
  void wait();

  static constexpr size_t kWindow = 8;  // messages under way in each direction

 private:
  bool post_receive();
  bool post_send();
  bool finish_receive();
  bool finish_send();

  Endpoint& peers_;
  Messages& messages_;
  const size_t count_;
  size_t receives_posted_ = 0, arrived_ = 0, sends_posted_ = 0, sent_ = 0;
  NetworkRequest receives_[kWindow], sends_[kWindow];
  Pace pace_;
};

// All of them, from the first to the last.
void run(Endpoint& peers, Messages& messages);
// One message each way, cut into chunks.
void exchange(Endpoint& peers, const Message& outgoing, const Message& incoming, size_t chunk_bytes);

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
    chunks_per_slice_ = chunks_of(longest, chunk_elements);
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
    const ringtrain::Chunk chunk = chunk_of(it.counts[slice], chunk_elements_, index);
    const size_t offset = offsets_[block][slice] + chunk.offset;
    return {it.source + offset * elements_.source_bytes, it.destination + offset * elements_.destination_bytes,
            chunk.count};
  }

 private:
  const std::vector<Block> blocks_;
  const Elements elements_;
  const size_t chunk_elements_;
  std::vector<Counts> offsets_;  // of the slices of each block
  size_t chunks_per_slice_ = 0;
};

// The part of an allreduce that is to be done.
enum class Phases { reduce_scatter, allgather, both };

class Pipeline : public Messages {
 public:
  // The next block may start. All ranks name the same blocks, but need not release them at the same time.
  void release() { ++released_; }
  void release_all() { released_ = blocks_; }
  // How many messages it takes until `block` has taken its last step.
  size_t messages_until(size_t block) const { return end_message(block, last_step_); }
  size_t steps() const { return last_step_ + 1 - first_step_; }

  size_t count() const final { return step_of_.size(); }
  bool is_long() const final { return true; }
  bool may_send(size_t i, size_t arrived) const final {
    const Position it = position_of(i);
    return it.block < released_ && (it.step == first_step_ || needs_arrived(it) < arrived);
  }
  bool may_receive(size_t i, size_t sent) const final {
    const Position it = position_of(i);
    return it.block < released_ && is_free(it, sent);
  }

 protected:
  struct Position {
    size_t block, step, index;  // index: among the messages of the step
  };

  // Steps first_step .. end_step - 1.
  Pipeline(size_t blocks, size_t first_step, size_t end_step)
      : blocks_(blocks), first_step_(first_step), last_step_(end_step - 1) {}
  // A step has width(block, step) messages. Called once, when the algorithm is made.
  void lay_out(const std::function<size_t(size_t, size_t)>& width);

  Position position_of(size_t message) const {
    const Step& step = steps_[step_of_[message]];
    return {step.block, step.step, message - step.first_message};
  }
  // The first message of a step, and the one after its last.
  size_t first_message(size_t block, size_t step) const { return step_at(block, step).first_message; }
  size_t end_message(size_t block, size_t step) const { return step_at(block, step).end_message; }
  size_t first_step() const { return first_step_; }

 private:
  // The last message that must have arrived before this one of a later step than the first can be sent.
  virtual size_t needs_arrived(const Position& at) const = 0;
  // Whether what comes in may be written to its place when so many messages have been sent.
  virtual bool is_free(const Position& at, size_t sent) const = 0;

  struct Step {
    size_t block, step, first_message, end_message;
  };
  const Step& step_at(size_t block, size_t step) const { return steps_[places_[block * steps() + step - first_step_]]; }

  const size_t blocks_, first_step_, last_step_;
  std::vector<Step> steps_;
  std::vector<size_t> places_;     // in steps_, of each step of each block
  std::vector<uint32_t> step_of_;  // in steps_, of each message
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

// For waits in shared memory while messages are under way over the network: it moves these on. Requires Engine::turn_.
class StreamWatch final : public Watch {
 public:
  explicit StreamWatch(Watch& watch) : watch_(watch) {}

  // Moves a Stream on as long as this lives.
  class Attendance {
   public:
    Attendance(StreamWatch& watch, Stream* stream) : watch_(watch) { watch_.stream_ = stream; }
    ~Attendance() { watch_.stream_ = nullptr; }
    Attendance(const Attendance&) = delete;
    Attendance& operator=(const Attendance&) = delete;

   private:
    StreamWatch& watch_;
  };

  void check(double waited_s) override {
    if (stream_) stream_->step();
    watch_.check(waited_s);
  }
  double interval_s(double waited_s) const override {
    constexpr double kLongest_s = 200e-6;
    return stream_ ? std::min(kLongest_s, watch_.interval_s(waited_s)) : watch_.interval_s(waited_s);
  }
  bool is_wanted() const override { return watch_.is_wanted(); }
  void step_aside() override { watch_.step_aside(); }
  void step_back() override { watch_.step_back(); }

 private:
  Watch& watch_;
  Stream* stream_ = nullptr;  // null while there is none
};

}  // namespace ringtrain
