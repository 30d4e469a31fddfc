#include "network/poller.h"

#include <errno.h>
#include <sys/epoll.h>

#include <exception>

#include "base/error.h"
#include "network/tcp.h"

namespace ringtrain {

Poller::Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw failure("epoll_create1: " + text_of(errno));
}

void Poller::control(int operation, int socket, Watched& watched, bool for_writing) {
  epoll_event event = {};
  event.events = for_writing ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.ptr = &watched;
  if (epoll_ctl(epoll_.number(), operation, socket, &event) != 0) throw failure("epoll_ctl: " + text_of(errno));
  watched.is_for_writing_ = for_writing;
}

void Poller::add(int socket, Watched& watched, bool for_writing) {
  control(EPOLL_CTL_ADD, socket, watched, for_writing);
}

void Poller::wait_for_writing(int socket, Watched& watched, bool for_writing) {
  if (for_writing != watched.is_for_writing_) control(EPOLL_CTL_MOD, socket, watched, for_writing);
}

void Poller::remove(int socket) { epoll_ctl(epoll_.number(), EPOLL_CTL_DEL, socket, nullptr); }

void Poller::bury(std::unique_ptr<Watched> watched) {
  watched->is_over_ = true;
  buried_.push_back(std::move(watched));
}

bool Poller::run() {
  constexpr int kMost = 64;
  epoll_event events[kMost];
  std::exception_ptr first;
  int count;
  bool was_ready = false;
  do {
    count = epoll_wait(epoll_.number(), events, kMost, 0);
    for (int i = 0; i < count; ++i) {
      auto* const watched = static_cast<Watched*>(events[i].data.ptr);
      if (watched->is_over_) continue;
      try {
        watched->is_ready(events[i].events);
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    buried_.clear();
    was_ready |= count > 0;
  } while (count == kMost && !first);
  if (first) std::rethrow_exception(first);
  return was_ready;
}

}  // namespace ringtrain
