#include "crowd.h"

#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "base/clock.h"

namespace ringtrain {

double processor_s() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

namespace {

// Of this process, such as "VmHWM:", in bytes.
size_t status(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    size_t kilobytes = 0;
    if (word == name && file >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

// From now on memory that was given back does not hide what is taken.
void forget_peak() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;
}

}  // namespace

// As TreeChannel at rank 0. All other ranks set the bits that it sets.
class Crowd::Tree final : public Channel {
 public:
  explicit Tree(int size) : Channel(0, size) {}

  void prepare(const std::vector<std::vector<RequestPtr>>& fresh) {
    subtrees_.clear();
    for (int distance = 1; distance < size(); distance *= 2) {
      Gathered gathered;
      for (int rank = distance; rank < std::min(2 * distance, size()); ++rank) {
        AnnouncementWriter writer;
        const auto& requests = fresh[static_cast<size_t>(rank) % fresh.size()];
        for (const RequestPtr& request : requests) writer.add(*request, 1e-3 + 1e-6 * rank);
        gathered.add(writer.take(false, true, 0, {}, ""));
      }
      subtrees_.emplace_back(gathered.bytes(), gathered.count());
    }
  }
  size_t messages() const { return messages_; }
  size_t bytes() const { return bytes_; }
  void forget() { messages_ = bytes_ = 0; }

  void begin_and(const Words& words) override {
    const size_t children = std::min<size_t>(4, static_cast<size_t>(size() - 1));
    count(2 * children, 2 * children * words.size() * sizeof(uint64_t));
  }
  bool finish_and(Words&, double) override { return true; }
  Gathered gather(const Bytes& mine) override {
    Gathered all(mine);
    for (const auto& [bytes, ranks] : subtrees_) {
      count(2, sizeof(uint64_t) + bytes.size());
      all.append(bytes, ranks);
    }
    return all;
  }
  Bytes broadcast(const Bytes& mine) override {
    count(2 * subtrees_.size(), subtrees_.size() * (sizeof(uint64_t) + mine.size()));
    return mine;
  }
  bool is_called() override { return false; }

 private:
  void count(size_t messages, size_t bytes) {
    messages_ += messages;
    bytes_ += bytes;
  }

  std::vector<std::pair<Bytes, size_t>> subtrees_;  // and of how many ranks
  size_t messages_ = 0, bytes_ = 0;
};

Crowd::Crowd(int size, const Coordinator::Limits& limits)
    : tree_(std::make_unique<Tree>(size)),
      membership_(size),
      coordinator_(std::make_unique<Coordinator>(*tree_, membership_, blockage_, limits)) {}

Crowd::~Crowd() = default;

Crowd::Cost Crowd::settle(const std::vector<std::vector<RequestPtr>>& fresh) {
  tree_->prepare(fresh);
  return round(fresh.front());
}

Crowd::Cost Crowd::repeat(const std::vector<RequestPtr>& fresh) { return round(fresh); }

Crowd::Cost Crowd::round(const std::vector<RequestPtr>& fresh) {
  turn.assert_held();  // one thread
  tree_->forget();
  Coordinator::News news = {blockage_.count(), {}, false};
  for (const RequestPtr& request : fresh) news.fresh.push_back({request});
  forget_peak();
  const size_t before = status("VmRSS:");
  const double begin_s = processor_s();
  coordinator_->begin_round(news);
  const Round& agreed = *coordinator_->finish_round(std::numeric_limits<double>::infinity());
  Cost cost = {processor_s() - begin_s, tree_->messages(), tree_->bytes(), 0, 0};
  cost.peak_bytes = std::max(status("VmHWM:"), before) - before;
  for (const PlanPtr& plan : agreed.plans) {
    cost.agreed += plan->parts.size();
    blockage_.note_carried_out(now_s());
  }
  return cost;
}

}  // namespace ringtrain
