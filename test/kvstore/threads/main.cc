// Workers and servers of a store as threads of one process, under ThreadSanitizer (test/kvstore/test_store_threads.py).
//
// Its arguments say whether workers share memory with the servers, "shared" or "tcp", and how many threads a worker has
// for its servers, and a server for its workers. It ends with 0 where all values are exact.
#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "kvstore/server/server.h"
#include "kvstore/wire/mailbox.h"
#include "kvstore/worker/client.h"

using namespace ringtrain;

namespace {

constexpr int kWorkers = 3, kServers = 3, kRounds = 40;
constexpr uint64_t kLong = 40'000, kFirst = 15'000, kShort = 10;
constexpr double kWait_s = 0.2;

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

SocketAddress address_of(int socket) {
  sockaddr_in address = {};
  socklen_t bytes = sizeof address;
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes);
  return {"127.0.0.1", ntohs(address.sin_port)};
}

int make_listener() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  require(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && listen(listener, 64) == 0,
          std::strerror(errno));
  return listener;
}

// A thread posts while that of the Poller is between its letters and its sockets, as it may at any time.
void require_that_letters_wake() {
  constexpr double kSleep_s = 20;
  Poller poller;
  Mailbox mailbox(poller);
  bool is_read = false;
  mailbox.empty();
  std::thread([&] { mailbox.post([&] { is_read = true; }); }).join();
  poller.run();
  const double begin_s = now_s();
  mailbox.sleep(kSleep_s);
  require(now_s() - begin_s < kSleep_s / 2, "a mailbox slept although a letter had come");
  mailbox.empty();
  require(is_read, "a letter was lost");
}

// Synchronous: store 0; asynchronous: 1; asynchronous, and a thread of the server's updates: 2.
class Job {
 public:
  Job(std::string node, int threads) : node_(std::move(node)), threads_(threads) {
    pthread_barrier_init(&barrier_, nullptr, kWorkers);
    for (int i = 0; i < kServers; ++i) {
      ServerOptions options;
      options.number = i;
      options.capacity = kWorkers;
      options.listeners.emplace_back(make_listener());
      options.secret = options.token = "of this test";
      options.threads = threads_;
      options.node = node_;
      addresses_.push_back({address_of(options.listeners.front().number())});
      servers_.push_back(std::make_unique<StoreServer>(std::move(options)));
    }
  }

  void run() {
    std::vector<std::thread> workers, programs;
    for (auto& server : servers_) programs.emplace_back([this, &server] { run_program(*server); });
    for (int i = 0; i < kWorkers; ++i) workers.emplace_back([this, i] { work(i); });
    for (std::thread& worker : workers) worker.join();
    is_over_ = true;
    for (std::thread& program : programs) program.join();
    for (auto& server : servers_) server->close();
  }

 private:
  void meet() { pthread_barrier_wait(&barrier_); }

  void run_program(StoreServer& server) {
    while (!is_over_)
      if (auto taken = server.take(0.01)) {
        auto* const weight = reinterpret_cast<float*>(taken->weight.data());
        const auto* const gradient = reinterpret_cast<const float*>(taken->gradient.data());
        for (uint64_t i = 0; i < taken->of_key.count; ++i) weight[i] += gradient[i];
        server.finish(taken->part, taken->piece, taken->weight);
      }
  }

  static void wait(StoreClient& client, const std::shared_ptr<StoreHandle>& handle) {
    while (!client.wait(*handle, kWait_s)) {
    }
  }

  void begin(StoreClient& client, int worker, uint32_t store) {
    const std::vector<StoreKey> keys = {
        {0, "long", DType::float32, kLong, {{0, 0, kFirst}, {1, kFirst, kFirst}, {2, 2 * kFirst, kLong - 2 * kFirst}}},
        {1, "short", DType::float32, kShort, {{1, 0, kShort}}}};
    std::vector<float> zeros(kLong);
    client.open(store, store == 0, PartSpec::kNoBound);
    if (worker == 0)
      client.create_keys(store, keys, {{zeros.data(), DType::float32, kLong}, {zeros.data(), DType::float32, kShort}});
    meet();
    if (worker != 0) client.attach_keys(store, keys);
    RuleWords rule;
    rule.name = store == 1 ? "test" : store == 2 ? "program" : "";
    rule.form = store == 1 ? "mxnet" : store == 2 ? "server" : "";
    if (store == 1) rule.numbers = {{"rescale_grad", 1.0}};
    if (store == 2) rule.numbers = {{"keeps_gradient", 1.0}};
    if (worker == 0 && store != 0) client.set_rule(store, rule, true);
    meet();
    if (worker != 0 && store != 0) client.set_rule(store, rule, false);
  }

  void push_and_pull(StoreClient& client, uint32_t store) {
    std::vector<float> ones(kLong, 1.0f), to_long(kLong), to_short(kShort);
    const std::vector<Pushed> pushed = {{{ones.data(), DType::float32, kLong}, {0, 0}, {}},
                                        {{ones.data(), DType::float32, kShort}, {0, 0}, {}}};
    const std::vector<HostArray> outs = {{to_long.data(), DType::float32, kLong},
                                         {to_short.data(), DType::float32, kShort}};
    for (int i = 0; i < kRounds; ++i)
      if (i % 2 == 0) {
        wait(client, client.push_pull(store, {0, 1}, pushed, outs, 0));
      } else {
        wait(client, client.push(store, {0, 1}, pushed, 0, true));
        wait(client, client.pull(store, {0, 1}, outs, 0));
      }
    meet();
    wait(client, client.pull(store, {0, 1}, outs, 0));
    const float expected = store == 0 ? kWorkers : kWorkers * kRounds;
    for (const std::vector<float>* values : {&to_long, &to_short})
      for (const float value : *values)
        require(value == expected, "store " + std::to_string(store) + " has " + std::to_string(value) + ", not " +
                                       std::to_string(expected));
    meet();
  }

  // The pushes are cut over all servers, and some of them are in the middle of it when the client ends.
  static void push_and_leave(StoreClient& client, uint32_t store) {
    constexpr int kPushes = 100;
    std::vector<float> ones(kLong, 1.0f);
    for (int i = 0; i < kPushes; ++i)
      client.push(store, {0}, {{{ones.data(), DType::float32, kLong}, {0, 0}, {}}}, 0, true);
    client.close();
  }

  void work(int worker) {
    StoreClientOptions options;
    options.workers = kWorkers;
    options.node = node_;
    options.remote.worker = worker;
    options.remote.capacity = kWorkers;
    options.remote.servers = addresses_;
    options.remote.secret = options.remote.token = "of this test";
    options.remote.threads = threads_;
    const auto error = error_of([&] {
      StoreClient client(options, [] {});
      client.meet();
      for (uint32_t store = 0; store < 3; ++store) {
        begin(client, worker, store);
        push_and_pull(client, store);
      }
      require(client.metrics().at("sent_bytes") > 0, "nothing was sent");
      push_and_leave(client, 1);
    });
    require(!error, error ? error->what() : "");
  }

  const std::string node_;
  const int threads_;
  pthread_barrier_t barrier_;
  std::vector<std::vector<SocketAddress>> addresses_;
  std::vector<std::unique_ptr<StoreServer>> servers_;
  std::atomic<bool> is_over_{false};
};

}  // namespace

int main(int, char** arguments) {
  require_that_letters_wake();
  Job(std::string(arguments[1]) == "shared" ? "here" : "", std::atoi(arguments[2])).run();
  std::puts("exact");
}
