// Pushes of a key of several chunks over TCP that a server refuses at their first chunk: another server, without the
// keys, has taken the place of the first one. The caller frees its memory as soon as the handle says that it may.
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "kvstore/server/server.h"
#include "kvstore/worker/client.h"

using namespace ringtrain;

static SocketAddress address_of(int socket) {
  sockaddr_in address = {};
  socklen_t bytes = sizeof address;
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes);
  return {"127.0.0.1", ntohs(address.sin_port)};
}

static int make_listener() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(listener, 64) != 0) abort();
  return listener;
}

static pid_t start_server(int listener, int start, bool is_recovery) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  char byte;
  if (read(start, &byte, 1) != 1) _exit(2);
  ServerOptions options;
  options.capacity = 1;
  options.listeners.emplace_back(dup(listener));
  options.secret = options.token = "x";
  StoreServer server(std::move(options));
  if (is_recovery) server.stores().begin_recovery();
  for (;;) pause();
}

int main() {
  constexpr uint64_t count = 16u << 20;
  const int listener = make_listener();
  int first[2], second[2];
  if (pipe(first) != 0 || pipe(second) != 0) abort();
  const pid_t a = start_server(listener, first[0], false);
  const pid_t b = start_server(listener, second[0], true);
  if (write(first[1], "x", 1) != 1) abort();
  StoreClientOptions options;
  options.workers = 1;
  options.remote.capacity = 1;
  options.remote.servers = {{address_of(listener)}};
  options.remote.secret = options.remote.token = "x";
  options.remote.return_s = 20;
  int refused = 0;
  {
    StoreClient client(options, [] {});
    client.meet();
    const std::vector<StoreKey> keys = {{0, "k", DType::float32, count, {{0, 0, count}}}};
    std::vector<float> zeros(count);
    client.open(1, false, PartSpec::kNoBound);
    client.create_keys(1, keys, {{zeros.data(), DType::float32, count}});
    RuleWords rule;
    rule.name = "test";
    rule.form = "mxnet";
    rule.numbers = {{"rescale_grad", 1.0}};
    client.set_rule(1, rule, true);
    kill(a, SIGKILL);
    waitpid(a, nullptr, 0);
    if (write(second[1], "x", 1) != 1) abort();
    for (int i = 0; i < 30; ++i) {
      auto values = std::make_unique<float[]>(count);
      std::shared_ptr<StoreHandle> handle;
      const auto error = error_of([&] {
        handle = client.push(1, {0}, {{{values.get(), DType::float32, count}, {0, 0}, {}}}, 0, false);
        while (!client.wait(*handle, 0.2)) {
        }
      });
      if (!error) continue;
      ++refused;
      const auto abandoned = client.take_abandoned();
      while (handle && !handle->is_memory_free()) usleep(10);
      while (abandoned && !abandoned->is_memory_free()) usleep(10);
      values.reset();  // the handle says that nobody reads it any more
      usleep(2000);
    }
  }
  std::printf("%d\n", refused);
  kill(b, SIGKILL);
  waitpid(b, nullptr, 0);
  return 0;
}
