// Wires between ranks that are threads of one process: lets negotiation be tried and measured with thousands of ranks.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "coordination/wire.h"

namespace ringtrain {

class MemoryWire final : public Wire {
 public:
  // The wires of all ranks; any of them may be used by one thread at a time. They keep what they share alive.
  static std::vector<std::unique_ptr<MemoryWire>> make(int size);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(inboxes_->size()); }

  void send(int to, Tag tag, const void* data, size_t bytes) override;
  void receive(int from, Tag tag, void* data, size_t bytes) override;
  void receive_from_any(Tag tag, void* data, size_t bytes) override;
  bool has_arrived(Tag tag) override;
  bool arrives_within(int from, Tag tag, double seconds) override;

  // Messages sent and received by this rank so far, and their bytes.
  size_t messages_handled() const { return messages_handled_; }
  size_t bytes_handled() const { return bytes_handled_; }

 private:
  using Messages = std::map<std::pair<Tag, int>, std::deque<Bytes>>;  // by tag and sender
  struct Inbox {
    std::mutex mutex;
    std::condition_variable changed;
    Messages messages;  // guarded by mutex
  };
  using Inboxes = std::vector<Inbox>;

  MemoryWire(int rank, std::shared_ptr<Inboxes> inboxes) : rank_(rank), inboxes_(std::move(inboxes)) {}
  Inbox& own() { return (*inboxes_)[rank_]; }
  static std::deque<Bytes>* find(Messages& messages, int from, Tag tag);
  template <typename Find>
  void take(Find find, void* data, size_t most, bool may_be_shorter);

  const int rank_;
  const std::shared_ptr<Inboxes> inboxes_;  // shared by all wires of one make()
  size_t messages_handled_ = 0;
  size_t bytes_handled_ = 0;
};

}  // namespace ringtrain
