#include "network/tcp.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace ringtrain {
namespace {

void set(int socket, int level, int option, int value) { setsockopt(socket, level, option, &value, sizeof(value)); }

struct Resolved {
  sockaddr_storage storage = {};
  socklen_t bytes = 0;

  const sockaddr* address() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Resolved resolve(const SocketAddress& address) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  const int code = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (code != 0) throw failure("\"" + address.host + "\" is not the address of a host: " + gai_strerror(code));
  Resolved resolved;
  resolved.bytes = found->ai_addrlen;
  std::memcpy(&resolved.storage, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return resolved;
}

}  // namespace

std::string to_string(const SocketAddress& address) { return address.host + ":" + std::to_string(address.port); }

void prepare_socket(int socket, double timeout_s) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (timeout_s == 0) return;
  const int pause_s = std::max(1, static_cast<int>(timeout_s / 8));
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, pause_s);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, pause_s);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(timeout_s * 1e3));
}

Descriptor begin_connection(const std::string& from, const SocketAddress& to, double timeout_s) {
  const Resolved there = resolve(to), here = resolve({from, 0});
  Descriptor socket(::socket(there.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return socket;
  prepare_socket(socket.number(), timeout_s);
  if (here.storage.ss_family == there.storage.ss_family) ::bind(socket.number(), here.address(), here.bytes);
  if (::connect(socket.number(), there.address(), there.bytes) == 0 || errno == EINPROGRESS) return socket;
  const int error = errno;
  socket = Descriptor();
  errno = error;
  return socket;
}

Answers answers_on(int socket) {
  tcp_info info = {};
  socklen_t bytes = sizeof(info);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return {};
  return {info.tcpi_unacked > 0, std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) / 1e3};
}

std::string text_of(int error) { return error == EBADMSG ? "bytes were changed on their way" : std::strerror(error); }

std::vector<std::pair<std::string, std::string>> interface_addresses() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw failure(std::string("getifaddrs: ") + std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(first, &freeifaddrs);
  std::vector<std::pair<std::string, std::string>> addresses;
  for (const ifaddrs* one = first; one; one = one->ifa_next) {
    if (!one->ifa_addr || !(one->ifa_flags & IFF_UP)) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char text[NI_MAXHOST];
    if (getnameinfo(one->ifa_addr, bytes, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0)
      addresses.emplace_back(one->ifa_name, text);
  }
  return addresses;
}

}  // namespace ringtrain
