#include "runtime/segments.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace ringtrain {
namespace {

bool all_agree(Channel& channel, bool yes) {
  Words words = {yes ? ~uint64_t{0} : 0};
  channel.and_bits(words);
  return words[0] != 0;
}

// Runs `step`, and warns if it throws and somebody minds.
bool succeeds(const std::function<void()>& step, const char* otherwise) {
  try {
    step();
    return true;
  } catch (const Error& error) {
    if (otherwise) warn(std::string(error.what()) + ". " + otherwise);
    return false;
  }
}

// What this rank does for the segment of its node, step by step; nothing where it needs none.
class Making {
 public:
  Making(const World& world, const Placement& placement, const SegmentPlan& plan)
      : world_(world), plan_(plan), is_member_(placement.own >= 0) {
    if (!is_member_) return;
    const std::vector<int> places = placement.on_node(placement.own_node());
    creator_ = placement.ranks[places.front()];
    size_ = static_cast<int>(places.size());
    name_ = "ringtrain-" + world.token + "-" + plan.purpose + "-" + std::to_string(placement.own_node());
  }

  bool create() {
    return !is_creator() ||
           succeeds([&] { segment_ = SharedSegment::create(plan_.bytes(size_), plan_.pages); }, plan_.if_it_fails);
  }

  // Each node's ticket reaches all ranks, since the others leave all bits of its word set.
  void exchange_tickets(Channel& channel) {
    tickets_.assign(static_cast<size_t>(*std::max_element(world_.nodes.begin(), world_.nodes.end())) + 1, ~uint64_t{0});
    if (is_creator()) tickets_[own_node()] = segment_.ticket();
    channel.and_bits(tickets_);
  }

  bool attach_by_ticket() {
    const auto attach = [&] {
      segment_ = SharedSegment::attach(world_.names[creator_].pid, tickets_[own_node()], plan_.bytes(size_));
    };
    return !lacks_segment() || succeeds(attach, nullptr);
  }

  bool publish() {
    return !is_creator() || succeeds([&] { segment_.publish(name_); }, plan_.if_it_fails);
  }

  bool attach_by_name() {
    const auto attach = [&] { segment_ = SharedSegment::attach(name_, plan_.bytes(size_)); };
    return !lacks_segment() || succeeds(attach, plan_.if_it_fails);
  }

  SharedSegment take() {
    segment_.unlink();
    return std::move(segment_);
  }

 private:
  bool is_creator() const { return is_member_ && creator_ == world_.rank; }
  bool lacks_segment() const { return is_member_ && !segment_.data(); }
  size_t own_node() const { return static_cast<size_t>(world_.nodes[world_.rank]); }

  const World& world_;
  const SegmentPlan& plan_;
  const bool is_member_;
  int creator_ = -1;
  int size_ = 0;
  std::string name_;
  Words tickets_;
  SharedSegment segment_;
};

}  // namespace

SharedSegment make_segments(const World& world, const Placement& placement, const SegmentPlan& plan, Channel& channel) {
  Making making(world, placement, plan);
  if (!all_agree(channel, making.create())) return {};
  making.exchange_tickets(channel);
  if (all_agree(channel, making.attach_by_ticket())) return making.take();
  if (!all_agree(channel, making.publish())) return {};
  if (!all_agree(channel, making.attach_by_name())) return {};
  return making.take();
}

}  // namespace ringtrain
