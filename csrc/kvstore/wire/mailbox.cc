#include "kvstore/wire/mailbox.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/log.h"
#include "network/tcp.h"

namespace ringtrain {

Mailbox::Mailbox(Poller& poller) : poller_(poller), event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!event_) throw failure("eventfd: " + text_of(errno));
  poller_.add(event_.number(), *this, false);
}

Mailbox::~Mailbox() { poller_.remove(event_.number()); }

void Mailbox::post(Work work) {
  if (!process_.is_this()) return;
  {
    const Lock lock(mutex_);
    letters_.push_back(std::move(work));
    if (letters_.size() > 1) return;  // it is awake
  }
  const uint64_t one = 1;
  const ssize_t written = write(event_.number(), &one, sizeof(one));
  static_cast<void>(written);
}

void Mailbox::empty() {
  std::vector<Work> letters;
  {
    const Lock lock(mutex_);
    letters.swap(letters_);
  }
  std::optional<Error> first;
  for (const Work& work : letters) {
    const auto error = error_of(work);
    if (error && !first) first.emplace(*error);
  }
  if (first) throw Error(*first);
}

void Mailbox::is_ready(uint32_t) {
  uint64_t times;
  const ssize_t count = read(event_.number(), &times, sizeof(times));
  static_cast<void>(count);
}

// The reason mostly stays for a while: it is told now and then.
void GuardedTurns::pause_after(const Error& error) {
  constexpr double kBetweenLines_s = 10;
  constexpr int kPause_ms = 10;
  const double now = now_s();
  if (told_at_ == 0 || now - told_at_ > kBetweenLines_s) {
    warn(thread_ + " goes on after an error: " + error.what());
    told_at_ = now;
  }
  poll(nullptr, 0, kPause_ms);
}

// The Poller may have read the event of a letter that came after the last ones were taken.
void Mailbox::sleep(double longest_s) {
  {
    const Lock lock(mutex_);
    if (!letters_.empty()) return;
  }
  pollfd waits = {poller_.descriptor(), POLLIN, 0};
  poll(&waits, 1, static_cast<int>(std::ceil(std::max(0.0, longest_s) * 1e3)));
}

}  // namespace ringtrain
