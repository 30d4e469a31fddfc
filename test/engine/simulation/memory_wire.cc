#include "memory_wire.h"

#include <chrono>
#include <cstring>

#include "base/error.h"

namespace ringtrain {
namespace {

constexpr std::chrono::seconds kDeadline{60};

// The first waiting message with this tag, or null.
template <typename Messages>
auto* find_any(Messages& messages, Tag tag) {
  for (auto it = messages.lower_bound({tag, 0}); it != messages.end() && it->first.first == tag; ++it)
    if (!it->second.empty()) return &it->second;
  return static_cast<decltype(&messages.begin()->second)>(nullptr);
}

}  // namespace

std::vector<std::unique_ptr<MemoryWire>> MemoryWire::make(int size) {
  auto inboxes = std::make_shared<Inboxes>(size);
  std::vector<std::unique_ptr<MemoryWire>> wires;
  for (int rank = 0; rank < size; ++rank) wires.emplace_back(new MemoryWire(rank, inboxes));
  return wires;
}

void MemoryWire::send(int to, Tag tag, const void* data, size_t bytes) {
  const char* begin = static_cast<const char*>(data);
  Inbox& inbox = (*inboxes_)[to];
  {
    std::lock_guard lock(inbox.mutex);
    inbox.messages[{tag, rank_}].emplace_back(begin, begin + bytes);
  }
  inbox.changed.notify_all();
  ++messages_handled_;
  bytes_handled_ += bytes;
}

template <typename Find>
void MemoryWire::take(Find find, void* data, size_t most, bool may_be_shorter) {
  Inbox& inbox = own();
  std::unique_lock lock(inbox.mutex);
  std::deque<Bytes>* queue = nullptr;
  if (!inbox.changed.wait_for(lock, kDeadline, [&] { return (queue = find(inbox.messages)) != nullptr; }))
    throw Error(ErrorKind::stalled, "no message came for a minute");
  const size_t bytes = queue->front().size();
  if (bytes > most || (bytes < most && !may_be_shorter))
    throw failure("a message has another size than its receiver expects");
  std::memcpy(data, queue->front().data(), bytes);
  queue->pop_front();
  ++messages_handled_;
  bytes_handled_ += bytes;
}

std::deque<Bytes>* MemoryWire::find(Messages& messages, int from, Tag tag) {
  const auto it = messages.find({tag, from});
  return it == messages.end() || it->second.empty() ? nullptr : &it->second;
}

void MemoryWire::receive(int from, Tag tag, void* data, size_t bytes) {
  take([&](Messages& messages) { return find(messages, from, tag); }, data, bytes, tag == Tag::bits);
}

void MemoryWire::receive_from_any(Tag tag, void* data, size_t bytes) {
  take([&](Messages& messages) { return find_any(messages, tag); }, data, bytes, false);
}

bool MemoryWire::has_arrived(Tag tag) {
  std::lock_guard lock(own().mutex);
  return find_any(own().messages, tag) != nullptr;
}

bool MemoryWire::arrives_within(int from, Tag tag, double seconds) {
  Inbox& inbox = own();
  std::unique_lock lock(inbox.mutex);
  return inbox.changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                [&] { return find(inbox.messages, from, tag) != nullptr; });
}

}  // namespace ringtrain
