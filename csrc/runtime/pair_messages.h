// Messages between two ranks: hvd.send and recv, those of torch.distributed and of XLA. Only the two take part.
//
// Both ends say what they have as soon as they begin: the sender a word that it sends, with the values if they are few,
// and the receiver a word that it awaits them. So neither waits for the other one longer than it must: the sender's
// message is complete when the receiver's word has come and fits, and many values go when it has, from the memory of
// one user into that of the other. Where the words do not fit, each end sees that by itself, says at which line of its
// script it is, and fails when it has heard that of the other one.
//
// Messages of one way (process set, source, destination, tag) are numbered by both ends, and come in this order. A
// receiver that takes what any rank sends gets the first word of its tag that no receiver before it has got; it says
// its own word when it knows the source, and so do those that wait behind it, since the next one may be meant for it.
//
// An end that waits for long, or while all ranks are blocked, is announced in a round of the world (coordinator.h).
#pragma once

#include <sched.h>

#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/thread_annotations.h"
#include "coordination/coordinator.h"
#include "coordination/membership.h"
#include "record/submission.h"
#include "runtime/direct_end.h"
#include "runtime/fabric.h"
#include "runtime/inbox.h"
#include "runtime/message_links.h"

namespace ringtrain {

class PairMessages final : public PendingMessages {
 public:
  // `ask_s`: after how long a message is announced. All else outlives this.
  PairMessages(const World& world, double ask_s, Fabric& fabric, Inbox& inbox);

  // Whether work() would do something: messages were submitted, or words or values have come.
  bool has_work() REQUIRES(turn);
  // Returns how many messages have ended.
  size_t work(double now) REQUIRES(turn);
  // Begins the ends that a thread carries itself (direct_end.h), and says their words. Returns whether it did: it does
  // not where one of them could wait for something else than its other end. The first message of each way goes the
  // usual way.
  bool begin_directly(const DirectEnds& ends) REQUIRES(turn);
  // Looks whether the other ends have come.
  void listen_for(const DirectEnds& ends) REQUIRES(turn);
  // Whether this thread runs on the core on which the rank last ran that has last said a word of such an end.
  bool may_share_core() const { return sched_getcpu() == core_of_direct_peer_; }
  // Those that still wait go on as all other messages do.
  void hand_over(const DirectEnds& ends) REQUIRES(turn);

  // Whether some have to go through a network.
  bool is_over_network() const { return network_ != nullptr; }
  // Any thread. Whether a rank of this node has said something.
  bool is_called_on_node() const { return rings_ && rings_->is_called(); }
  // Whether nothing of this rank is under way, so that nobody waits for what others say.
  bool is_quiet() const {
    return pending_.empty() && carried_.empty() && unexplained_.empty() && !is_asking_ && !(rings_ && rings_->any());
  }
  bool are_carried() const { return !carried_.empty(); }
  // Since when the oldest one waits for its other end; `now` if none does.
  double waits_since_s(double now) const { return pending_.empty() ? now : pending_.front()->since_s; }
  // Whether the Network carries some, which does not ring.
  bool are_carried_by_network() const;
  // Grows while values of those that are carried are on their way.
  size_t carried_so_far() const;
  // Whether no word may be said or heard: a round is settled.
  bool is_held() const { return is_held_; }
  // Whether ranks of this node are to ring when they say something.
  void let_others_ring(bool ring) REQUIRES(turn);

  // All ranks were told that an end fails which was announced. To be called before its Handle fails. The other end, if
  // it is this rank's, fails with it, when it comes at the latest.
  void note_failure(const Agreement& agreement) REQUIRES(turn);
  // All that wait have failed on all ranks, and no word is on its way.
  void forget_waiting() REQUIRES(turn);
  void forget(int process_set) REQUIRES(turn);
  // This rank submits nothing more: other ends that come are refused, and the negotiation tells them why.
  void refuse_others() REQUIRES(turn);

  // Whether the ranks of other nodes have all that this one has said, which it asks them.
  bool are_all_told() REQUIRES(turn);
  // As forget(), but gives messages whose ends have met the time that they need.
  void finish(int process_set) REQUIRES(turn);
  // Nothing is carried out any more.
  void abandon() REQUIRES(turn);

  // Of the negotiation.
  bool has_news(double now) const override;
  double next_deadline() const override { return oldest_s_ + ask_s_; }
  void announce(bool all, std::vector<Pending>& to_announce, std::vector<Key>& withdrawn) override;
  int64_t on_their_way() const override;
  void settled() override;

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  using Way = std::tuple<int32_t, int64_t, int>;  // process set, tag, the other rank
  using Address = std::pair<int32_t, int64_t>;    // process set, tag

  struct Message {
    SubmissionPtr submission;
    bool sends = false;
    Way way;              // the other rank: kAnySource until it is known
    int64_t number = -1;  // -1: not known yet
    char* memory = nullptr;
    double since_s = 0;
    bool is_announced = false;
    bool has_spoken = false;  // its word has been said
    bool is_pending = false;
    std::optional<Values> values = std::nullopt;
    std::list<std::shared_ptr<Message>>::iterator pending = {};  // while it waits

    const TensorSpec& spec() const { return submission->operation().tensors.front(); }
    int peer() const { return std::get<2>(way); }
  };
  using MessagePtr = std::shared_ptr<Message>;

  // A word of another rank that waits for its other end here.
  struct Heard {
    int source = -1;  // the rank that has said it
    int64_t number = 0;
    uint32_t place = 0;  // of the values, of a receiver
    TensorSpec spec = {};
    bool has_values = false;  // of a sender, if they are few
    Bytes values = {};
    uint64_t order = 0;  // in which it was heard
  };
  using Failed = std::map<int64_t, Error>;  // numbers of messages whose other end has failed

  struct Sends {
    bool is_used = false;  // by this rank
    int64_t next = 0;
    std::deque<MessagePtr> waiting;
    std::deque<Heard> heard;
    Failed failed;
  };
  struct FromRank {
    bool is_used = false;  // by this rank
    int64_t next = 0;      // number of the next receive
    std::deque<Heard> heard;
    Failed failed;
    std::set<int64_t> given_up;  // numbers of receives that have failed
  };
  struct Receives {
    std::list<MessagePtr> waiting;
    size_t from_any = 0;  // of these
  };

  struct Word;

  MessageLink& link_to(int rank);
  bool is_few(const Message& message);
  void say(int to, const Word& word, const int64_t* shape, const void* values, size_t bytes);
  void say_own(Message& message);

  void begin(const SubmissionPtr& submission) REQUIRES(turn);
  void begin_send(const MessagePtr& message) REQUIRES(turn);
  void begin_receive(const MessagePtr& message) REQUIRES(turn);
  void speak(Receives& receives) REQUIRES(turn);
  bool has_failed(const MessagePtr& receive, FromRank& arrivals) REQUIRES(turn);
  void drop_given_up(Receives& receives) REQUIRES(turn);
  // Sets `arrivals` to those that it is one of.
  std::optional<Heard> take_first_heard(const Message& message, FromRank*& arrivals);

  static Way way_of(const DirectEnd& end) { return {end.process_set, end.tag, end.peer}; }
  bool can_begin(const DirectEnd& end) REQUIRES(turn);
  void begin(DirectEnd& end) REQUIRES(turn);
  void say_own(const DirectEnd& end);
  // Whether the word is that of the other end of one of them, which then is done.
  bool has_settled_directly(int from, const Word& word, const char* shape, const char* values) REQUIRES(turn);
  void hand_over_all() REQUIRES(turn);
  void hand_over(DirectEnd& end) REQUIRES(turn);

  void hear(const MessageLink::Word& word) REQUIRES(turn);
  void hear_sender(const Way& way, Heard heard, const char* values) REQUIRES(turn);
  void hear_receiver(const Way& way, Heard heard) REQUIRES(turn);
  void refuse(const Way& way, int64_t number, bool of_sender);
  void hear_refusal(const Way& way, int64_t number, bool of_sender) REQUIRES(turn);

  void meet_sender(const MessagePtr& receive, FromRank& arrivals, const Heard& heard, const char* values)
      REQUIRES(turn);
  void meet_receiver(const MessagePtr& send, const Heard& heard) REQUIRES(turn);
  // Both ends have met. Whether they fit; else it fails when the other end has said where it is.
  bool fits(const MessagePtr& message, const Heard& heard) REQUIRES(turn);

  void hear_explanation(const Way& way, int64_t number, bool of_sender, const std::string& site) REQUIRES(turn);
  void wait_for_other_end(const MessagePtr& message);
  void stop_waiting(Message& message);
  void find_oldest();
  void drop_receive(const MessagePtr& message) REQUIRES(turn);
  void finish(const MessagePtr& message) REQUIRES(turn);
  void fail(const MessagePtr& message, ErrorKind kind, const std::string& text) REQUIRES(turn);
  void forget_values(Message& message);
  void note_failure_of_other_end(const Operation& operation, const Error& error) REQUIRES(turn);

  const World& world_;
  Flag &bell_, &message_bell_;
  const double ask_s_;
  Inbox& inbox_;
  std::unique_ptr<RingLink> rings_;       // null where no rank shares memory with this one
  std::unique_ptr<NetworkLink> network_;  // null where all ranks share memory

  std::map<Way, Sends> sends_;
  std::map<Way, FromRank> arrivals_;
  std::map<Address, Receives> receives_;
  int core_of_direct_peer_ = -1;
  std::vector<DirectEnd*> direct_;       // that wait, in the order in which they began
  std::list<MessagePtr> pending_;        // that wait for their other ends, in the order of submission
  std::map<Key, MessagePtr> announced_;  // of these
  std::vector<Key> withdrawn_;           // to be told in the next round
  double oldest_s_ = kNever;             // of those that were not announced
  std::vector<MessagePtr> carried_;      // whose values are on their way
  struct Unexplained {
    MessagePtr message;
    TensorSpec spec;  // of the other end
  };
  std::vector<Unexplained> unexplained_;  // that do not fit
  std::vector<SubmissionPtr> fresh_;
  uint64_t heard_words_ = 0;
  size_t ended_ = 0;
  int64_t said_ = 0, heard_ = 0;

  // Of each rank of another node: how many words it was told, and how many it has confirmed and was asked to confirm.
  struct Told {
    uint64_t said = 0, asked = 0, confirmed = 0;
  };
  std::map<int, Told> told_;
  bool is_asking_ = false, is_held_ = false, refuses_ = false;
};

}  // namespace ringtrain
