#include "memory/node.h"

#include <algorithm>
#include <cstring>
#include <fstream>

namespace ringtrain {
namespace {

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

bool is_stopped(int64_t pid) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), stat);
  const size_t name_end = stat.rfind(')');  // "4711 (python) T ..."
  return name_end != std::string::npos && name_end + 2 < stat.size() && std::strchr("Tt", stat[name_end + 2]);
}

}  // namespace

size_t Node::bytes(int size, size_t board_bytes) {
  return static_cast<size_t>(size) * (sizeof(Control) + 2 * padded(board_bytes));
}

Node::Node(SharedSegment segment, int index, std::vector<RankName> members, size_t board_bytes)
    : segment_(std::move(segment)), index_(index), members_(std::move(members)), board_bytes_(padded(board_bytes)) {
  hold_life_lock(segment_.descriptor(), index_);
}

char* Node::board(int member, int parity) {
  char* first = segment_.data() + members_.size() * sizeof(Control);
  return first + static_cast<size_t>(2 * member + parity) * board_bytes_;
}

void Node::say_last_words(ErrorKind kind, const std::string& message) {
  Control& mine = control(index_);
  if (mine.has_failed.load(std::memory_order_relaxed)) return;
  mine.failure_kind = kind;
  const std::string words = shortened(message);
  std::memcpy(mine.failure_message, words.c_str(), words.size() + 1);
  mine.has_failed.store(1, std::memory_order_release);
  for (int member = 0; member < size(); ++member) doorbell(member).ring();
}

void Node::listen() {
  for (int member = 0; member < size(); ++member) {
    if (member == index_) continue;
    if (control(member).has_failed.load(std::memory_order_acquire))
      throw Error(control(member).failure_kind, control(member).failure_message);
  }
  for (int member = 0; member < size(); ++member) {
    // A rank says that it leaves before its lock goes, so the order of the two questions matters.
    if (member == index_ || is_life_lock_held(segment_.descriptor(), member)) continue;
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
