// Agrees with all ranks of the world, or of a process set, on what to do next. Touches no tensor memory and uses no
// transport but a Channel.
//
// A round: every rank sets the bits of the cached operations that it is ready for; one and_bits tells all which of them
// are common. If somebody has something that is not cached, all announcements are gathered at rank 0, whose Ledger
// decides, and its decision is broadcast. Agreed operations are fused into plans, alike on all ranks.
//
// A deadlock is certain when all ranks are blocked at one moment: every thread that could submit something waits, and
// nothing that was agreed on is left to be carried out. Each rank sets a bit if it is blocked as it begins the round,
// and by then it has taken in all that its threads have submitted. If all have set it and no operation is common, all
// announce what they have pending, and say whether they have been blocked without a break since they began. Those
// times overlap, so if everybody says yes there was such a moment; and if nothing of what was announced is complete,
// nothing ever will be. So nobody's word has to be kept, or taken back, from one round to the next.
//
// Messages between two ranks go without rounds (runtime/pair_messages.h). Here their ends only wait: an end without its
// other one is announced when it is overdue, for the question and the warning, and when all ranks are blocked. It never
// becomes complete, and is withdrawn when the other end has come. A word between two ranks that is on its way may end
// what looks like a deadlock. While a round is settled no rank sends or receives any, so they are as many as were sent,
// over all ranks, less those that were received.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/options.h"
#include "base/thread_annotations.h"
#include "coordination/blockage.h"
#include "coordination/channel.h"
#include "coordination/ledger.h"
#include "coordination/membership.h"
#include "coordination/messages.h"
#include "coordination/operation.h"
#include "coordination/plan_cache.h"

namespace ringtrain {

// How often the others waited for this rank: the straggler's own count.
//
// A round tells which bits all ranks have set. Here it also tells which bits nobody has set, as the bits of a
// complement that all have set. So each rank knows what some others were ready for in the round before; if that becomes
// common as soon as this rank is ready, it was this rank that came last.
class Lateness {
 public:
  // This rank's own bits.
  void keep(const Words& ready) { own_ = ready; }

  // Appends to this rank's row what the others are to know.
  void tell(Words& row) const {
    for (const uint64_t word : own_) row.push_back(~word);
  }

  // Takes from the row what was appended, so that the common bits stay.
  void hear(Words& row) {
    const size_t size = own_.size();
    own_before_.resize(size);
    some_before_.resize(size);
    for (size_t i = 0; i < size; ++i) {
      const uint64_t common = row[i], some = ~row[size + i];
      came_last_ += static_cast<uint64_t>(__builtin_popcountll(common & own_[i] & ~own_before_[i] & some_before_[i]));
      own_before_[i] = own_[i] & ~common;
      some_before_[i] = some & ~common;
    }
    row.resize(size);
  }

  // The bits mean something else from now on.
  void forget() {
    own_before_.clear();
    some_before_.clear();
  }

  // Any thread. For how many operations, of those that are agreed on by a bit.
  uint64_t came_last() const { return came_last_; }

 private:
  Words own_, own_before_, some_before_;  // of this rank and of any; before: without what became common
  std::atomic<uint64_t> came_last_{0};
};

// An operation that this rank is ready for, and when it first saw it.
struct Pending {
  RequestPtr request;
  double since = 0;
  const void* value = nullptr;  // the memory of a small tensor that may travel beside its bit
};

// The cached operations for which this rank waits: a bit and the request each, by slot of the PlanCache.
class Ready {
 public:
  void add(int slot, Pending pending);
  bool has(int slot) const { return static_cast<size_t>(slot) < places_.size() && at(slot).request; }
  Pending take(int slot);
  void drop(int slot) {
    if (has(slot)) take(slot);
  }

  // `words` has as many bits as the cache has slots.
  void add_bits_to(Words& words) const;

  // The slot of the only one there is; nothing if there are others, or none.
  std::optional<int> only_one() const { return first_ == last_ && first_ >= 0 ? std::optional(first_) : std::nullopt; }
  const Pending& at(int slot) const { return places_[static_cast<size_t>(slot)].pending; }

  // When the oldest came, or infinity.
  double oldest() const { return first_ < 0 ? std::numeric_limits<double>::infinity() : at(first_).since; }

 private:
  // They are linked in the order in which they came; -1: none.
  struct Place {
    Pending pending;
    int before = -1, after = -1;
  };
  int& after(int slot) { return slot < 0 ? first_ : places_[static_cast<size_t>(slot)].after; }
  int& before(int slot) { return slot < 0 ? last_ : places_[static_cast<size_t>(slot)].before; }

  std::vector<Place> places_;
  int first_ = -1, last_ = -1;
  Words bits_;
};

// The statement of this rank in one round.
struct Round {
  std::vector<PlanPtr> plans;
  std::vector<int> left;         // ranks that leave; nobody comes to another round
  bool closes_lanes = false;     // all ranks are blocked: what is pending in lanes is to be judged here
  std::string question;          // not empty: something waits for long, and each rank is to say where its threads are
  std::optional<Tuning> tuning;  // to be used from now on, first for these plans
  // If there is one plan and its only tensor travelled beside the bits: that of each rank of the process set or, where
  // they have been added up on the way, their sum. They stay where they are until the next round begins.
  struct Values {
    std::vector<const void*> data;
    bool are_added_up = false;

    void clear() {
      data.clear();
      are_added_up = false;
    }
  };
  Values values;

  // Keeps the memory for the next round.
  void clear() {
    plans.clear();
    left.clear();
    closes_lanes = false;
    question.clear();
    tuning.reset();
    values.clear();
  }
};

// An operation that this rank has become ready for, and the memory of a tensor that may travel with its bit.
struct Fresh {
  RequestPtr request;
  const void* value = nullptr;
};

// The messages between this rank and others, as the negotiation sees them.
class PendingMessages {
 public:
  virtual ~PendingMessages() = default;
  // Whether announce() has something to say.
  virtual bool has_news(double now) const = 0;
  // When one of them is to be announced.
  virtual double next_deadline() const = 0;
  // Adds the ends that wait for their other end and were not announced before: those that are overdue, or all of them.
  // Adds to `withdrawn` those that were announced and wait no longer. No message goes on until settled().
  virtual void announce(bool all, std::vector<Pending>& to_announce, std::vector<Key>& withdrawn) = 0;
  // Words that this rank has sent, less those that it has received. More where it is carrying out a message.
  virtual int64_t on_their_way() const = 0;
  // All ranks know the decision. All that it says of messages is to be done before the turn is let go of.
  virtual void settled() = 0;
};

class Coordinator {
 public:
  struct Limits {
    size_t cache_capacity = 1024;
    size_t fusion_threshold_bytes = size_t{128} << 20;
    double stall_warning_s = 60;
    double stall_shutdown_s = 600;  // 0: never
  };

  // Agrees on the operations of one process set, its lane; of set 0, those of the world and of all process sets without
  // a lane. `channel`: between its ranks. All but the limits outlives this. The membership changes by what is agreed.
  Coordinator(Channel& channel, Membership& membership, Blockage& blockage, const Limits& limits, int process_set = 0);
  // After how many seconds a bit, or an end of a message, is announced in full, and the ranks are asked.
  static double ask_s(const Limits& limits);
  // In the lane of the world. It outlives this, and is asked in a round, while all ranks wait.
  void ask_for(PendingMessages& messages) { messages_ = &messages; }

  // The input of a rank to a round. In this order: a blocked thread has submitted what it waits for, so `fresh`,
  // taken afterwards, has it.
  struct News {
    uint64_t blockage;         // Blockage::count() before `fresh` was taken; 0 in a lane
    std::vector<Fresh> fresh;  // since the last round
    bool is_leaving;
    double now = now_s();
    std::string whereabouts = {};  // the answer to the last Round::question, once; empty: none
  };

  // A round in two halves; all ranks go through equally many. finish_round waits for the other ranks until `deadline`;
  // null if they have not come by then, wherever in the round: it is to be called again and goes on there. The Round
  // stays until the next one begins.
  void begin_round(const News& news) REQUIRES(turn);
  bool is_in_round() const REQUIRES(turn) { return stage_ != Stage::none; }
  Round* finish_round(double deadline) REQUIRES(turn);

  // All that waits for other ranks, the oldest first, when no more rounds come.
  std::vector<Fresh> take_pending() REQUIRES(turn);

  // Rank 0: has all ranks change to this in the next round.
  void propose(const Tuning& tuning) REQUIRES(turn) { proposal_ = tuning; }

  // Any thread. How much there was to agree on so far.
  struct Counts {
    uint64_t rounds, agreed_by_bit, announced, came_last, came_with_values;

    Counts& operator+=(const Counts& other) {
      rounds += other.rounds;
      agreed_by_bit += other.agreed_by_bit;
      announced += other.announced;
      came_last += other.came_last;
      came_with_values += other.came_with_values;
      return *this;
    }
  };
  Counts counts() const {
    return {rounds_, agreed_by_bit_, announced_in_full_, lateness_.came_last(), came_with_values_};
  }

  // When to come to a round even if nobody asks for one, on the clock of base/clock.h.
  double next_deadline() const REQUIRES(turn);

 private:
  void take_in(const std::vector<Fresh>& fresh, double now);
  void reannounce_overdue(double now);
  void reannounce(int slot);
  void reannounce_all();
  void reannounce_all_of(const std::set<int>& process_sets);
  double find_next_deadline() const;
  void note_progress(const Plan& plan);
  void drop_removed(std::vector<AgreementPtr>& agreements) const;

  void make_own_words(double now);
  void find_always_ready();
  void look_whether_always_ready(int slot);
  bool is_always_ready(int slot) const;
  void put_value();
  void take_values(int slot);
  AgreementPtr agreement_of(int slot) const;
  std::vector<AgreementPtr> agreements_of(const Words& bits) const;
  void plan(const Words& bits);

  // The exchange that a round waits for: of bits or, if something is to be settled, of announcements and a decision.
  enum class Stage { none, bits, announcements, decision };

  bool take_bits(double deadline) REQUIRES(turn);
  // Announces what is new, and applies what rank 0 decides.
  void begin_to_settle();
  bool settle(double deadline);
  std::vector<AgreementPtr> apply_decision(Decision decision);
  Bytes announcement();
  Decision decide(const Gathered& gathered);
  void note(const Announced& announced, double now, Decision& decision);
  bool can_go_on(const Operation& cached, const Announced& announced) const;
  const Request* own_request(const Operation& operation) const;
  AgreementPtr apply(Agreement agreement);
  void remember(const AgreementPtr& agreement, RequestPtr own);
  void evict(int slot);
  void forget_process_set(int id);

  Channel& channel_;
  Membership& membership_;
  Blockage& blockage_;
  const std::vector<int> members_;
  const int rank_;  // this one, of the world
  const int process_set_;
  Limits limits_;
  PlanCache cache_;
  Ledger ledger_;
  Ready ready_;                       // by slot: this rank sets the bit until all do
  std::vector<Pending> to_announce_;  // in the next round that gathers
  std::map<Key, Pending> announced_;  // in full, not agreed yet
  std::vector<Key> withdrawn_;        // to be told with to_announce_
  PendingMessages* messages_ = nullptr;
  bool has_just_joined_ = false;  // the next round can agree on what the others wait for
  // Bits of cached operations that do not wait for this rank; nothing when they must be found again.
  std::optional<Words> always_ready_;
  Lateness lateness_;
  std::optional<Tuning> proposal_;
  double next_deadline_ = std::numeric_limits<double>::infinity();

  bool may_have_lanes_ = false;  // some process set has, on any rank

  std::atomic<uint64_t> rounds_{0}, agreed_by_bit_{0}, announced_in_full_{0}, came_with_values_{0};

  // Of the round under way.
  Stage stage_ = Stage::none;
  bool is_leaving_ = false;
  std::string whereabouts_;
  uint64_t blockage_of_round_ = 0;  // as the round began
  bool are_all_blocked_ = false;    // as each of them began the round
  Words words_;
  Bytes value_;  // a copy: its caller may take the memory away when the operation fails
  Round round_;
  std::vector<AgreementPtr> agreements_;  // where something is to be settled; in the end all of the round
  Bytes message_;                         // of this rank to the others at this stage
};

}  // namespace ringtrain
