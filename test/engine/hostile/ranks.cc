#include "ranks.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace ringtrain {

void fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::_Exit(1);
}

void require(bool holds, const std::string& message) {
  if (!holds) fail(message);
}

namespace {

sockaddr_in loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

}  // namespace

int make_listener() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const sockaddr_in address = loopback(0);
  const bool listens =
      bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 && listen(listener, 4096) == 0;
  require(listens, "cannot listen on 127.0.0.1");
  return listener;
}

SocketAddress address_of(int listener) {
  sockaddr_in address = {};
  socklen_t bytes = sizeof(address);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes);
  return {"127.0.0.1", ntohs(address.sin_port)};
}

int connect_to(const SocketAddress& to) {
  const int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = loopback(to.port);
  require(connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, "cannot connect");
  return connection;
}

Job::Job(int size, int streams, double timeout_s) {
  for (int rank = 0; rank < size; ++rank) {
    description_.listeners.push_back(make_listener());
    description_.addresses.push_back({address_of(description_.listeners.back())});
    names_.push_back({rank, "h", getpid()});
  }
  description_.secret = "secret";
  description_.token = "token";
  description_.streams = streams;
  description_.timeout_s = timeout_s;
}

SocketDescription Job::description(int rank) const {
  SocketDescription description = description_;
  description.listeners = {description_.listeners[static_cast<size_t>(rank)]};
  return description;
}

}  // namespace ringtrain
