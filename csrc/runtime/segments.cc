#include "runtime/segments.h"

#include "base/log.h"

namespace ringtrain {
namespace {

bool all_agree(Channel& channel, bool yes) {
  Words words = {yes ? ~uint64_t{0} : 0};
  channel.and_bits(words);
  return words[0] != 0;
}

// Runs `step`, and warns if it throws.
bool succeeds(const std::function<void()>& step) {
  try {
    step();
    return true;
  } catch (const Error& error) {
    warn(std::string(error.what()) + ". All ranks go through MPI instead, which is slower.");
    return false;
  }
}

}  // namespace

SharedSegment make_segments(const World& world, const Placement& placement, const std::string& purpose,
                            const std::function<size_t(int)>& bytes_for, Channel& channel) {
  SharedSegment segment;
  const bool is_member = placement.own >= 0;
  const int size = is_member ? static_cast<int>(placement.on_node(placement.own_node()).size()) : 0;
  const bool is_creator = is_member && placement.place_on_node() == 0;
  std::string name;
  if (is_member) name = "ringtrain-" + world.token + "-" + purpose + "-" + std::to_string(placement.own_node());

  const bool is_created = !is_creator || succeeds([&] { segment = SharedSegment::create(name, bytes_for(size)); });
  if (!all_agree(channel, is_created)) return {};
  const bool is_attached =
      !is_member || is_creator || succeeds([&] { segment = SharedSegment::attach(name, bytes_for(size)); });
  if (!all_agree(channel, is_attached)) return {};
  segment.unlink();
  return segment;
}

}  // namespace ringtrain
