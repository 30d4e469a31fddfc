#include "runtime/arrival_bell.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "base/error.h"
#include "base/signals.h"

namespace ringtrain {
namespace {

epoll_event event_of(int descriptor, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = descriptor;
  return event;
}

}  // namespace

ArrivalBell::ArrivalBell(int descriptor, Flag& bell)
    : network_(descriptor), bell_(bell), epoll_(epoll_create1(EPOLL_CLOEXEC)), end_(eventfd(0, EFD_CLOEXEC)) {
  epoll_event network = event_of(network_, 0), end = event_of(end_.number(), EPOLLIN);
  if (!epoll_ || !end_ || epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, network_, &network) != 0 ||
      epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, end_.number(), &end) != 0)
    throw failure("no file descriptors are left for the connections between ranks (see ulimit -n)");
  thread_ = start_thread(&ArrivalBell::listen, this);
}

ArrivalBell::~ArrivalBell() {
  eventfd_write(end_.number(), 1);
  thread_.join();
}

void ArrivalBell::arm() {
  epoll_event event = event_of(network_, EPOLLIN | EPOLLONESHOT);
  epoll_ctl(epoll_.number(), EPOLL_CTL_MOD, network_, &event);
}

void ArrivalBell::listen() {
  epoll_event event = {};
  while (true) {
    if (epoll_wait(epoll_.number(), &event, 1, -1) < 1) continue;
    if (event.data.fd == end_.number()) return;
    bell_.ring_all();
  }
}

}  // namespace ringtrain
