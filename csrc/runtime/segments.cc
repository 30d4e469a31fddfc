#include "runtime/segments.h"

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

}  // namespace

SharedSegment make_segments(const World& world, const Placement& placement, const SegmentPlan& plan, Channel& channel) {
  SharedSegment segment;
  const bool is_member = placement.own >= 0;
  const int size = is_member ? static_cast<int>(placement.on_node(placement.own_node()).size()) : 0;
  const bool is_creator = is_member && placement.place_on_node() == 0;
  std::string name;
  if (is_member) name = "ringtrain-" + world.token + "-" + plan.purpose + "-" + std::to_string(placement.own_node());

  const auto create = [&] { segment = SharedSegment::create(name, plan.bytes(size), plan.pages); };
  const bool is_created = !is_creator || succeeds(create, plan.if_it_fails);
  if (!all_agree(channel, is_created)) return {};
  const auto attach = [&] { segment = SharedSegment::attach(name, plan.bytes(size)); };
  const bool is_attached = !is_member || is_creator || succeeds(attach, plan.if_it_fails);
  if (!all_agree(channel, is_attached)) return {};
  segment.unlink();
  return segment;
}

}  // namespace ringtrain
