// A Channel between the ranks of one node: everybody writes on its board and reads the others'. A message that is
// longer than a board is sent in parts.
#pragma once

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "base/wait.h"
#include "coordination/channel.h"
#include "memory/boards.h"

namespace ringtrain {

class ShmChannel final : public Channel {
 public:
  // A member waits so long for the others to come by themselves before it rings their doorbells. Until then it calls
  // nobody where a round goes on to other nodes: one who came before its own callers have submitted would only take
  // part in a round more. On one node a round is short, and callers come to it themselves.
  struct Patience {
    double seconds = 150e-6;
    bool calls_by_ringing = false;
  };
  // `doorbells`: of each member. All else outlives this.
  ShmChannel(Boards boards, int member, std::vector<Flag*> doorbells, const Patience& patience, Watch& watch)
      : Channel(member, boards.size()),
        boards_(boards),
        doorbells_(std::move(doorbells)),
        patience_(patience),
        watch_(watch) {}

  void begin_and(const Words& words) override;
  bool finish_and(Words& words, double deadline) override;
  bool keeps_deadlines() const override { return true; }
  // More takes longer than the operation.
  size_t most_value_bytes() const override { return 64; }
  void put_value(const Value& value) override { next_value_ = value; }
  Value value_of(int rank) override;
  Gathered gather(const Bytes& mine) override;
  Bytes broadcast(const Bytes& mine) override;
  std::optional<Gathered> gather_until(double deadline, const Bytes& mine) override;
  std::optional<Bytes> broadcast_until(double deadline, const Bytes& mine) override;

  bool is_called() override;
  bool is_stuck() const override { return is_in_exchange_ && !have_all_come(); }
  bool have_others_come() const override;
  void be_called() override;
  void call_late() override;

 private:
  // An exchange: everybody writes on the board that begin() returns, publishes it, and reads the others' once they have
  // come. The boards stay as they are until this rank's next exchange.
  Flag& own_doorbell() { return *doorbells_[static_cast<size_t>(rank())]; }
  char* begin();
  void publish();
  bool have_all_come() const;
  bool have_come_to_exchange(double deadline);
  bool wait_for_all(double deadline);
  bool wait_patiently_for_all(double deadline);
  const char* board(int member);
  struct Head {
    int32_t slot;
    uint32_t bytes;
  };
  // Behind them there is room for a value.
  size_t words_of_board() const {
    return (boards_.board_bytes() - sizeof(Head) - most_value_bytes()) / sizeof(uint64_t);
  }
  size_t part_bytes() const { return boards_.board_bytes() - sizeof(uint64_t); }
  void publish_words(const Words& words, size_t first);
  void and_with_boards(Words& words, size_t first);
  // The messages of the first `kept` members: all go through the same exchanges, and read no more than they need.
  std::optional<std::vector<Bytes>> exchange(double deadline, const Bytes& mine, int kept);
  void publish_part(const Bytes& mine);
  void read_parts();

  Boards boards_;
  const std::vector<Flag*> doorbells_;
  const Patience patience_;
  Watch& watch_;
  Waiter waiter_;
  Value value_, next_value_;
  size_t words_before_value_ = 0;       // in the last and_bits; 0: it was too long for one board
  std::atomic<uint32_t> exchanges_{0};  // begun by this rank
  std::atomic<bool> is_in_exchange_{false};
  uint32_t rings_before_ = 0;  // of this rank's doorbell, when it began its last exchange
  double waits_since_s_ = 0;   // for the others' part in the last of them; 0: not yet

  // A message in parts, of which the one that begins at `sent` has been published.
  struct Gathering {
    size_t sent = 0, longest = 0;
    std::vector<Bytes> kept;
  };
  std::optional<Gathering> gathering_;  // which the others have not come to yet
  size_t first_word_ = 0;               // of the part of a long row that has been published
};

}  // namespace ringtrain
