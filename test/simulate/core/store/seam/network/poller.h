// Takes the place of csrc/network/poller.h in the simulation of stores: ends of simulated connections.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

namespace ringtrain {

class Watched {
 public:
  virtual ~Watched() = default;
  virtual void is_ready(uint32_t events) = 0;
};

class Poller {
 public:
  void add(int socket, Watched& watched, bool for_writing);
  void wait_for_writing(int socket, Watched& watched, bool for_writing);
  void remove(int socket) { watched_.erase(socket); }
  // Its owner may be gone: it is not called any more.
  void bury(std::unique_ptr<Watched> watched) {
    for (auto one = watched_.begin(); one != watched_.end();)
      one = one->second.watched == watched.get() ? watched_.erase(one) : std::next(one);
    buried_.push_back(std::move(watched));
  }
  void run();

  // Calls it in the next run().
  void call(std::function<void()> work) { calls_.push_back(std::move(work)); }
  bool has_work() const;

 private:
  struct Interest {
    Watched* watched;
    bool for_writing;
  };

  std::map<int, Interest> watched_;
  std::vector<std::function<void()>> calls_;
  std::vector<std::unique_ptr<Watched>> buried_;
};

}  // namespace ringtrain
