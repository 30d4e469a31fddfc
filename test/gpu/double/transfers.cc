#include "transfers.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>

namespace gpu_double {
namespace {

// A message on its way to or from one peer. An empty one is one empty chunk.
class Message {
 public:
  Message(Communicator& communicator, const Transfer& transfer)
      : us_(communicator), what_(transfer), box_(box_of(communicator, transfer)) {}

  // One chunk further, if the mailbox allows.
  bool progress() { return what_.is_send ? write() : take(); }
  bool is_over() const { return is_over_; }

 private:
  static Mailbox& box_of(Communicator& us, const Transfer& what) {
    auto& mail = (*us.segment)->mail;
    return what.is_send ? mail[us.rank][what.peer] : mail[what.peer][us.rank];
  }

  bool write() {
    if (box_.written != box_.taken) return false;
    const size_t length = std::min(kMailBytes, what_.bytes - done_);
    box_.message_bytes = what_.bytes;
    std::memcpy(box_.chunk, what_.memory + done_, length);
    ++box_.written;
    has_moved(length, what_.bytes);
    return true;
  }

  // Data that does not fit is received and dropped, so that the sender can go on.
  bool take() {
    if (box_.written == box_.taken) return false;
    const size_t length = std::min(kMailBytes, box_.message_bytes - done_);
    if (box_.message_bytes == what_.bytes)
      std::memcpy(what_.memory + done_, box_.chunk, length);
    else
      us_.fail_everywhere(nccl::kInvalidUsage);
    const size_t all = box_.message_bytes;
    ++box_.taken;
    has_moved(length, all);
    return true;
  }

  void has_moved(size_t length, size_t all) {
    done_ += length;
    is_over_ = done_ == all;
    Word& bell = (*us_.segment)->ranks[what_.peer].bell;
    ++bell;
    wake_all(bell);
  }

  Communicator& us_;
  const Transfer what_;
  Mailbox& box_;
  size_t done_ = 0;
  bool is_over_ = false;
};

// Only the first of each is on its way.
using Queues = std::map<std::pair<bool, int>, std::deque<Message>>;

bool progress(Queues& queues) {
  bool has_moved = false;
  for (auto at = queues.begin(); at != queues.end();) {
    std::deque<Message>& queue = at->second;
    has_moved |= queue.front().progress();
    if (queue.front().is_over()) queue.pop_front();
    at = queue.empty() ? queues.erase(at) : std::next(at);
  }
  return has_moved;
}

}  // namespace

void carry_out(Communicator& communicator, const std::vector<Transfer>& transfers) {
  Queues queues;
  for (const Transfer& one : transfers) queues[{one.is_send, one.peer}].emplace_back(communicator, one);
  const Word& bell = (*communicator.segment)->ranks[communicator.rank].bell;
  while (!queues.empty()) {
    communicator.require_not_aborted();
    const uint32_t heard = bell;
    if (!progress(queues)) sleep_while(bell, heard);
  }
}

}  // namespace gpu_double
