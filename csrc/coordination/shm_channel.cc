#include "coordination/shm_channel.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

namespace ringtrain {

// A board is written again two exchanges later. By then everybody has announced the one between, so has read this one.
char* ShmChannel::begin() {
  const uint32_t number = exchanges_.load(std::memory_order_relaxed) + 1;
  exchanges_.store(number, std::memory_order_relaxed);
  rings_before_ = own_doorbell().value.load(std::memory_order_acquire);
  return boards_.board(rank(), static_cast<int>(number % 2));
}

// Of two members that come last at the same time one sees that all have come, and that another one wants to know.
void ShmChannel::publish() {
  const uint32_t number = exchanges_.load(std::memory_order_relaxed);
  is_in_exchange_.store(true, std::memory_order_relaxed);
  boards_.posted(rank()).publish(number);
  waits_since_s_ = 0;
  for (int member = 0; member < size(); ++member)
    if (boards_.wanted(member).load(std::memory_order_relaxed) == number && have_all_come())
      doorbells_[static_cast<size_t>(member)]->ring();
}

const char* ShmChannel::board(int member) {
  return boards_.board(member, static_cast<int>(exchanges_.load(std::memory_order_relaxed) % 2));
}

bool ShmChannel::have_all_come() const {
  const uint32_t number = exchanges_.load(std::memory_order_relaxed);
  for (int i = 1; i < size(); ++i)
    if (!boards_.posted((rank() + i) % size()).reached(number)) return false;
  return true;
}

bool ShmChannel::have_come_to_exchange(double deadline) {
  if (!wait_for_all(deadline)) return false;
  is_in_exchange_.store(false, std::memory_order_relaxed);
  return true;
}

// Ranks that work come by themselves in a moment; only then it is worth waking those that do not.
bool ShmChannel::wait_for_all(double deadline) {
  if (deadline == kAtOnce) return have_all_come();
  if (waiter_.is_quick([&] { return have_all_come(); }, &watch_)) return true;
  if (wait_patiently_for_all(std::min(deadline, now_s() + patience_.seconds))) return true;
  call_late();
  return wait_patiently_for_all(deadline);
}

void ShmChannel::call_late() {
  const uint32_t number = exchanges_.load(std::memory_order_relaxed);
  for (int member = 0; member < size(); ++member)
    if (!boards_.posted(member).reached(number)) doorbells_[static_cast<size_t>(member)]->ring();
}

bool ShmChannel::have_others_come() const {
  if (is_in_exchange_.load(std::memory_order_relaxed)) return have_all_come();
  const uint32_t next = exchanges_.load(std::memory_order_relaxed) + 1;
  for (int i = 1; i < size(); ++i)
    if (!boards_.posted((rank() + i) % size()).reached(next)) return false;
  return true;
}

// Followed by another look whether it is stuck.
void ShmChannel::be_called() {
  boards_.wanted(rank()).store(exchanges_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool ShmChannel::wait_patiently_for_all(double deadline) {
  if (waits_since_s_ == 0) waits_since_s_ = now_s();
  const uint32_t number = exchanges_.load(std::memory_order_relaxed);
  for (int member = 0; member < size(); ++member)
    if (!waiter_.wait_patiently(boards_.posted(member), number, &watch_, {waits_since_s_, deadline})) return false;
  return true;
}

bool ShmChannel::is_called() {
  if (is_in_exchange_.load(std::memory_order_relaxed)) return have_all_come();
  if (patience_.calls_by_ringing && own_doorbell().value.load(std::memory_order_acquire) == rings_before_) return false;
  const uint32_t next = exchanges_.load(std::memory_order_relaxed) + 1;
  for (int member = 0; member < size(); ++member)
    if (boards_.posted(member).reached(next)) return true;
  return false;
}

void ShmChannel::begin_and(const Words& words) {
  value_ = std::exchange(next_value_, {});
  publish_words(words, 0);
}

bool ShmChannel::finish_and(Words& words, double deadline) {
  for (;; publish_words(words, first_word_)) {
    if (!have_come_to_exchange(deadline)) return false;
    and_with_boards(words, first_word_);
    first_word_ += words_of_board();
    if (first_word_ >= words.size()) break;
  }
  first_word_ = 0;
  return true;
}

// As many from `first` on as fit on a board.
void ShmChannel::publish_words(const Words& words, size_t first) {
  const size_t count = std::min(words_of_board(), words.size() - first);
  char* own = begin();
  std::memcpy(own, words.data() + first, count * sizeof(uint64_t));
  words_before_value_ = count == words.size() ? count : 0;
  // Next to the words, where it may be on the same cache line.
  if (words_before_value_ > 0) {
    const Head head = {value_.slot, value_.bytes};
    char* const place = own + count * sizeof(uint64_t);
    std::memcpy(place, &head, sizeof(head));
    std::memcpy(place + sizeof(head), value_.data, value_.bytes);
  }
  publish();
}

Value ShmChannel::value_of(int rank) {
  if (words_before_value_ == 0) return {};
  const char* const place = board(rank) + words_before_value_ * sizeof(uint64_t);
  Head head;
  std::memcpy(&head, place, sizeof(head));
  return {head.slot, head.bytes, place + sizeof(head)};
}

void ShmChannel::and_with_boards(Words& words, size_t first) {
  const size_t end = std::min(first + words_of_board(), words.size());
  for (int member = 0; member < size(); ++member) {
    const char* theirs = board(member);
    for (size_t i = first; i < end; ++i, theirs += sizeof(uint64_t)) {
      uint64_t word;
      std::memcpy(&word, theirs, sizeof(word));
      words[i] &= word;
    }
  }
}

// Each board carries the length of the whole message and the next part of it; all go on until the longest is through.
std::optional<std::vector<Bytes>> ShmChannel::exchange(double deadline, const Bytes& mine, int kept) {
  if (!gathering_) {
    gathering_.emplace(Gathering{0, mine.size(), std::vector<Bytes>(static_cast<size_t>(kept))});
    publish_part(mine);
  }
  while (true) {
    if (!have_come_to_exchange(deadline)) return std::nullopt;
    read_parts();
    if (gathering_->sent >= gathering_->longest) break;
    publish_part(mine);
  }
  std::vector<Bytes> messages = std::move(gathering_->kept);
  gathering_.reset();
  return messages;
}

void ShmChannel::publish_part(const Bytes& mine) {
  const size_t sent = gathering_->sent;
  const uint64_t total = mine.size();
  char* own = begin();
  std::memcpy(own, &total, sizeof(total));
  if (sent < total) std::memcpy(own + sizeof(total), mine.data() + sent, std::min<size_t>(part_bytes(), total - sent));
  publish();
}

void ShmChannel::read_parts() {
  Gathering& gathering = *gathering_;
  for (int member = 0; member < size(); ++member) {
    const char* theirs = board(member);
    uint64_t total;
    std::memcpy(&total, theirs, sizeof(total));
    gathering.longest = std::max<size_t>(gathering.longest, total);
    const auto place = static_cast<size_t>(member);
    if (gathering.sent >= total || place >= gathering.kept.size()) continue;
    const char* first = theirs + sizeof(total);
    Bytes& message = gathering.kept[place];
    message.insert(message.end(), first, first + std::min<size_t>(part_bytes(), total - gathering.sent));
  }
  gathering.sent += part_bytes();
}

std::optional<Gathered> ShmChannel::gather_until(double deadline, const Bytes& mine) {
  const std::optional<std::vector<Bytes>> messages = exchange(deadline, mine, rank() == 0 ? size() : 0);
  if (!messages) return std::nullopt;
  Gathered gathered;
  for (const Bytes& message : *messages) gathered.add(message);
  return gathered;
}

std::optional<Bytes> ShmChannel::broadcast_until(double deadline, const Bytes& mine) {
  std::optional<std::vector<Bytes>> messages = exchange(deadline, rank() == 0 ? mine : Bytes(), 1);
  if (!messages) return std::nullopt;
  return std::move(messages->front());
}

Gathered ShmChannel::gather(const Bytes& mine) { return *gather_until(std::numeric_limits<double>::infinity(), mine); }

Bytes ShmChannel::broadcast(const Bytes& mine) {
  return *broadcast_until(std::numeric_limits<double>::infinity(), mine);
}

}  // namespace ringtrain
