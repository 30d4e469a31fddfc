// Ways from this rank to others for messages of two ranks: words, which are short and stay in order, and values, which
// the receiver expects in memory of the user before the sender begins.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "memory/node.h"
#include "network/endpoint.h"

namespace ringtrain {

// The values of one message, in the memory of the user. Stays at its place while it is under way.
struct Values {
  int peer = -1;       // of the world
  uint32_t place = 0;  // by which both sides know it; the receiver's choice
  char* memory = nullptr;
  size_t bytes = 0;
  size_t done = 0;                             // bytes through rings, requests over a network
  std::vector<NetworkRequest> requests = {};   // over a network
  bool is_expected = false;                    // from there
  std::shared_ptr<const void> loan = nullptr;  // lives as long as requests that may use the memory
};

// Requires Engine::turn_.
class MessageLink {
 public:
  virtual ~MessageLink() = default;

  // The bytes of a word. None is longer.
  struct Text {
    static constexpr size_t kMostBytes = 896;
    size_t bytes = 0;
    std::array<char, kMostBytes> data;

    void put(const void* begin, size_t count) {
      if (count > kMostBytes - bytes) throw failure("a word of a message is too long");
      if (count > 0) std::memcpy(data.data() + bytes, begin, count);
      bytes += count;
    }
  };
  // A word with values of at most so many bytes behind it.
  virtual size_t most_bytes() const = 0;
  virtual void say(int to, const Text& word, const void* values, size_t bytes) = 0;
  // Whether words have come, or there is room for what waits.
  virtual bool is_called() = 0;
  struct Word {
    int from;
    const char* data;
    size_t bytes;  // at least those of the word and its values
  };
  // The next words, which are valid until the next call.
  template <typename Hear>
  void listen(Hear hear) {
    take([](void* hear, const Word& word) { (*static_cast<Hear*>(hear))(word); }, &hear);
  }

  // Chooses values.place.
  virtual void expect(Values& values) = 0;
  virtual void send(Values& values) = 0;
  virtual bool is_over(Values& values) = 0;
  // They are not expected, or sent, any more.
  virtual void forget(Values& values) = 0;

 protected:
  using Hear = void (*)(void*, const Word&);
  virtual void take(Hear hear, void* hearer) = 0;
};

// Between the ranks of this node.
class RingLink final : public MessageLink {
 public:
  // `ranks`: of this node, in the world. `node` outlives this.
  RingLink(Node& node, std::vector<int> ranks);

  size_t most_bytes() const override { return kMostBytes; }
  void say(int to, const Text& word, const void* values, size_t bytes) override;
  // Any thread.
  bool is_called() override { return node_.rings().is_called(); }
  // Whether something waits for room.
  bool any() const;
  // As listen(), to one rank and whether it has called or not: which costs less where one waits for that rank.
  template <typename Hear>
  void listen_to(int rank, Hear hear) {
    take_from(member_of(rank), [](void* hear, const Word& word) { (*static_cast<Hear*>(hear))(word); }, &hear);
  }
  // Between the two, words are put and nobody is called.
  void hold_calls() { holds_calls_ = true; }
  void call_now() {
    holds_calls_ = false;
    for (; !to_call_.empty(); to_call_.pop_back()) call(to_call_.back());
  }
  bool reaches(int rank) const { return static_cast<size_t>(rank) < members_.size() && member_of(rank) >= 0; }
  void let_others_ring(bool ring) { node_.rings().let_others_ring(ring); }
  void expect(Values& values) override;
  void send(Values& values) override;
  bool is_over(Values& values) override { return values.done == values.bytes; }
  void forget(Values& values) override;

 private:
  static constexpr size_t kMostBytes = size_t{2} << 10;
  struct Waiting {
    std::deque<Bytes> words;
    std::deque<Values*> values;
  };

  int member_of(int rank) const { return members_[static_cast<size_t>(rank)]; }
  void take(Hear hear, void* hearer) override;
  void take_from(int member, Hear hear, void* hearer);
  void push(int member);
  bool put_piece(int member, Values& values);
  void take_piece(int rank, uint32_t place, const char* data, size_t bytes);
  void call(int member);

  Node& node_;
  const std::vector<int> ranks_;
  std::vector<int> members_;                              // by rank; -1: of another node
  std::vector<Waiting> waiting_;                          // for room, by member
  std::map<std::pair<int, uint32_t>, Values*> expected_;  // by sender and place
  uint32_t places_ = 0;
  bool holds_calls_ = false;
  std::vector<int> to_call_;
};

// To ranks of other nodes, and to all where nodes have no memory in common.
class NetworkLink final : public MessageLink {
 public:
  // Its tags begin at that of `peers`, all ranks of the world.
  explicit NetworkLink(Endpoint peers) : peers_(std::move(peers)) {}
  // Gives the last words a moment to leave.
  ~NetworkLink() override {
    constexpr double kMoment_s = 1;
    peers_.drain(kMoment_s);
  }

  size_t most_bytes() const override { return kMostBytes; }
  void say(int to, const Text& word, const void* values, size_t bytes) override;
  bool is_called() override { return peers_.has_arrived_from_any(0); }
  void expect(Values& values) override;
  void send(Values& values) override { start(values, true); }
  bool is_over(Values& values) override;
  void forget(Values& values) override;

 private:
  static constexpr size_t kMostBytes = size_t{8} << 10;
  struct Places {
    std::vector<uint32_t> free;
    uint32_t used = 0;
  };

  void take(Hear hear, void* hearer) override;
  void start(Values& values, bool sends);

  Endpoint peers_;
  std::map<int, Places> places_;  // by sender
};

}  // namespace ringtrain
