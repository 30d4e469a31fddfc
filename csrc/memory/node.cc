#include "memory/node.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include "base/clock.h"

namespace ringtrain {
namespace {

bool is_stopped(int64_t pid) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), stat);
  const size_t name_end = stat.rfind(')');  // "4711 (python) T ..."
  return name_end != std::string::npos && name_end + 2 < stat.size() && std::strchr("Tt", stat[name_end + 2]);
}

}  // namespace

size_t Node::rings_begin(int size, size_t board_bytes) {
  constexpr size_t kLine = 64;
  const size_t bytes = static_cast<size_t>(size) * sizeof(Control) + Boards::bytes(size, board_bytes);
  return (bytes + kLine - 1) / kLine * kLine;
}

Node::Node(SharedSegment segment, int index, std::vector<RankName> members, size_t board_bytes)
    : segment_(std::move(segment)),
      index_(index),
      members_(std::move(members)),
      board_bytes_(board_bytes),
      rings_(segment_, rings_begin(static_cast<int>(members_.size()), board_bytes), static_cast<int>(members_.size()),
             index) {
  hold_life_lock(segment_.descriptor(), index_);
}

void Node::say_last_words(ErrorKind kind, const std::string& message) {
  std::atomic<uint32_t>& first = control(0).first_to_fail;
  if (first.load(std::memory_order_relaxed) != 0) return;
  Control& mine = control(index_);
  mine.failure_kind = kind;
  const std::string words = shortened(message);
  std::memcpy(mine.failure_message, words.c_str(), words.size() + 1);
  uint32_t nobody = 0;
  if (!first.compare_exchange_strong(nobody, static_cast<uint32_t>(index_) + 1, std::memory_order_acq_rel)) return;
  for (int member = 0; member < size(); ++member) doorbell(member).ring();
}

void Node::hear_last_words() {
  const auto first = static_cast<int>(control(0).first_to_fail.load(std::memory_order_acquire)) - 1;
  if (first < 0 || first == index_) return;
  throw Error(control(first).failure_kind, control(first).failure_message);
}

// The clock is read last, so that what was written meanwhile is not from the future.
bool Node::has_looked(int member, double lately_s) {
  const double looked_s = control(member).looked_s.load(std::memory_order_relaxed);
  return now_s() - looked_s < lately_s;
}

// A member notes first that it looks: of those that begin to wait at the same time, most then find one that looks
// already. "Lately" follows from its own pauses, which are longer while it does not wait, or its host is busy.
void Node::listen() {
  constexpr double kLongest_s = 0.5;
  hear_last_words();
  std::atomic<double>& own_s = control(index_).looked_s;
  const double now = now_s(), pause_s = now - own_s.exchange(now, std::memory_order_relaxed);
  const double lately_s = std::clamp(2 * pause_s, 2 * kRollCall_s, kLongest_s);
  for (int distance = 1; distance < size(); ++distance) {
    const int member = (index_ + distance) % size();
    if (is_life_lock_held(segment_.descriptor(), member)) {
      if (has_looked(member, lately_s)) break;
      continue;
    }
    // A member says why it goes, or that it may, before its lock goes, so the order of the questions matters.
    hear_last_words();
    if (control(member).has_left.load(std::memory_order_acquire)) continue;
    throw Error(ErrorKind::peer_lost, is_gone(members_[member]));
  }
}

std::string Node::who_is_stopped(double) const {
  std::string text;
  for (const RankName& name : members_)
    if (is_stopped(name.pid)) text += to_string(name) + " is stopped, by SIGSTOP or a debugger; ";
  return text;
}

}  // namespace ringtrain
