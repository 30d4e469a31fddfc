// A worker that knows the secret says random and mutated things to a server of stores
// (test/kvstore/test_store_fuzz.py).
//
// main SECONDS SEED shared|tcp: prints what it has said, and ends with 0 if the server is well at the end. It is built
// with sanitizers, which end it where the server does what it must not.
#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "kvstore/server/server.h"
#include "kvstore/wire/connection.h"
#include "network/handshake.h"

using namespace ringtrain;

namespace {

constexpr int kCapacity = 3;
// Larger stores would take all memory of the machine; what claims to be larger is for test_kvstore_messages.py.
constexpr uint64_t kMostElements = 1 << 20;
constexpr int kMostWorkers = 64;
constexpr uint32_t kKeysOfOneServer = 400;

std::mt19937_64 generator;

uint64_t any(uint64_t below) { return below == 0 ? 0 : generator() % below; }
bool one_in(uint64_t times) { return any(times) == 0; }

template <typename T>
T one_of(std::initializer_list<T> choices) {
  return *(choices.begin() + any(choices.size()));
}

Bytes noise(size_t count) {
  Bytes bytes(count);
  for (char& byte : bytes) byte = static_cast<char>(generator());
  return bytes;
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// ------------------------------------------------------------------------------------------------------- connections

int make_listener() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(listener, 64) != 0)
    fail(std::strerror(errno));
  return listener;
}

int port_of(int listener) {
  sockaddr_in address = {};
  socklen_t bytes = sizeof address;
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes);
  return ntohs(address.sin_port);
}

ByteStream dial(int port, int worker) {
  constexpr double kWithin_s = 20;
  const Credentials credentials{"secret", "token", worker, kCapacity + 1};
  const double end = now_s() + kWithin_s;
  Handshake handshake =
      Handshake::dial(begin_connection("0.0.0.0", {"127.0.0.1", port}, kWithin_s), kCapacity, 0, credentials);
  while (now_s() < end) {
    const Handshake::State state = handshake.advance();
    if (state == Handshake::State::done) return handshake.take();
    if (state == Handshake::State::failed) break;
    pollfd waits = {handshake.socket(), static_cast<short>(handshake.has_to_write() ? POLLOUT : POLLIN), 0};
    poll(&waits, 1, 100);
  }
  fail("the server takes no worker any more");
}

// The answer of the server does not matter, but it must not wait for room.
void drain(int socket) {
  static char buffer[1 << 16];
  while (recv(socket, buffer, sizeof buffer, MSG_DONTWAIT) > 0) {
  }
}

bool put(int socket, const Bytes& bytes) {
  constexpr double kWithin_s = 5;
  const double end = now_s() + kWithin_s;
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t count = send(socket, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
      continue;
    }
    if (errno != EAGAIN || now_s() > end) return false;
    drain(socket);
    pollfd waits = {socket, POLLOUT | POLLIN, 0};
    poll(&waits, 1, 50);
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------- messages

template <typename T>
void append(Bytes& bytes, const T* values, size_t count) {
  const char* const first = reinterpret_cast<const char*>(values);
  bytes.insert(bytes.end(), first, first + count * sizeof(T));
}

// A head and its body as frames; of one that is not honest, some bytes are others.
Bytes frames_of(uint32_t id, Head head, const Bytes& body, bool is_honest) {
  head.body_bytes = static_cast<uint32_t>(body.size());
  FrameHeader of_head = {Connection::kHeadTag, id, sizeof(Head)}, of_body = {Connection::kBodyTag, id, body.size()};
  if (!is_honest) {
    if (one_in(40)) of_head.bytes = any(100);
    if (one_in(40)) of_head.tag = static_cast<uint32_t>(generator());
    if (one_in(30)) head.body_bytes = static_cast<uint32_t>(any(1 << 21));
    if (one_in(40)) ++of_body.number;
  }
  Bytes all;
  append(all, &of_head, 1);
  append(all, &head, 1);
  if (!body.empty()) {
    append(all, &of_body, 1);
    all.insert(all.end(), body.begin(), body.end());
  }
  if (is_honest) return all;
  if (one_in(25))
    for (uint64_t left = 1 + any(6); left > 0; --left) all[any(all.size())] = static_cast<char>(generator());
  if (one_in(60)) all.resize(any(all.size()));
  return all;
}

// Whether a server of this test may be asked for it, whatever mutation has made of it.
bool is_small(const Bytes& body) {
  uint64_t elements = 0;
  int capacity = 0;
  const auto error = error_of([&] {
    Reader reader(body);
    const PartSpec spec = PartSpec::get(reader);
    capacity = spec.capacity;
    for (const KeyPiece& piece : spec.pieces) elements += piece.count;
  });
  return error || (elements <= kMostElements && capacity <= kMostWorkers);
}

Bytes body_of_create(uint32_t& keys, bool is_honest) {
  while (true) {
    PartSpec spec;
    spec.is_synchronous = one_in(2);
    spec.capacity = kCapacity;
    if (one_in(3)) spec.max_staleness = static_cast<int64_t>(any(4));
    for (uint64_t left = 1 + any(4); left > 0; --left)
      spec.pieces.push_back(
          {keys++, static_cast<DType>(any(kDTypes)), 0, one_of<uint64_t>({1, 10, 100, 16384, 20000, 40000})});
    if (!is_honest && one_in(4)) spec.capacity = static_cast<int>(any(6));
    Writer writer;
    spec.put(writer);
    Bytes body = writer.take();
    if (!is_honest && one_in(2)) body[any(body.size())] = static_cast<char>(any(4));
    if (!is_honest && one_in(8)) body.resize(any(body.size()));
    if (is_small(body)) return body;
  }
}

Bytes body_of_rule(bool is_honest) {
  RuleWords rule;
  rule.name = one_of<const char*>({"sgd", "adam", "test", "program", "", "rmsprop", "adagrad"});
  rule.form = one_of<const char*>({"mxnet", "torch", "server", ""});
  if (rule.name == "program") {
    rule.form = "server";
    rule.numbers = {{"keeps_gradient", 1.0}};
  } else if (rule.name == "test") {
    rule.form = "mxnet";
    rule.numbers = {{"rescale_grad", 1.0}};
  } else if (rule.name == "sgd") {
    rule.form = "mxnet";
    rule.numbers = {{"momentum", 0.9}, {"rescale_grad", 1.0}, {"clip_gradient", 0.0}};
  }
  rule.keeps_states = static_cast<uint8_t>(any(2));
  rule.begin_num_update = static_cast<int64_t>(any(5));
  Bytes body = bytes_of(rule);
  if (!is_honest && one_in(2)) body[any(body.size())] = static_cast<char>(generator());
  if (!is_honest && one_in(8)) body.resize(any(body.size()));
  return body;
}

size_t element_bytes(const Head& head) {
  return size_of(static_cast<DType>(std::min(static_cast<int>(head.dtype), kDTypes - 1)));
}

Bytes ranges_of(const Head& head, bool is_honest, size_t& elements) {
  Bytes body;
  uint32_t at = 0;
  for (uint32_t left = head.ranges; left > 0; --left) {
    ElementRange range = {at + static_cast<uint32_t>(any(5)), static_cast<uint32_t>(any(5))};
    if (!is_honest && one_in(6)) range.count = static_cast<uint32_t>(generator());
    if (!is_honest && one_in(6)) range.begin = static_cast<uint32_t>(generator());
    at = range.begin + range.count;
    elements += range.count;
    append(body, &range, 1);
  }
  return body;
}

Bytes body_of_values(const Head& head, bool is_honest) {
  constexpr size_t kMostOfRanges = 1000;
  const auto count = one_of<size_t>({1, 10, 100, 16384, 20000 - 16384, 40000 - 32768, 8192});
  if (head.ranges < 100) {
    size_t elements = 0;
    Bytes body = ranges_of(head, is_honest, elements);
    const Bytes values = noise(std::min(elements, kMostOfRanges) * element_bytes(head));
    body.insert(body.end(), values.begin(), values.end());
    return body;
  }
  if (head.codes == 1 || head.codes == 2)
    return noise(quantized_bytes(static_cast<Quantizer::Kind>(head.codes), count));
  return noise(count * element_bytes(head));
}

Head any_head(bool is_honest) {
  Head head;
  head.said = static_cast<Said>(any(static_cast<uint64_t>(kLastSaid) + 2));
  if (one_in(2)) head.said = one_of<Said>({Said::push, Said::push_pull, Said::pull, Said::assign});
  if (one_in(20)) head.said = Said::create;
  if (one_in(20)) head.said = Said::rule;
  head.dtype = static_cast<DType>(any(kDTypes + 1));
  head.wanted = static_cast<DType>(any(kDTypes + (is_honest ? 0 : 1)));
  if (one_in(2)) head.dtype = head.wanted = DType::float32;
  head.store = static_cast<uint32_t>(any(3));
  head.part = static_cast<uint32_t>(!is_honest && one_in(10) ? generator() : any(4));
  head.chunk = static_cast<uint32_t>(!is_honest && one_in(10) ? generator() : any(6));
  head.codes = static_cast<uint32_t>(one_in(8) ? any(4) : 0);
  head.threshold = one_of<float>({0.5f, 0.f, -1.f, NAN, INFINITY, 1e-30f});
  head.number = one_of<int64_t>({0, 1, 1, 2, 2, 3, 4, 5, -1, static_cast<int64_t>(any(12))});
  if (!is_honest && one_in(15)) head.number = static_cast<int64_t>(generator());
  if (one_in(6)) head.ranges = static_cast<uint32_t>(any(4));
  if (!is_honest && one_in(40)) head.ranges = static_cast<uint32_t>(generator());
  head.push = any(4);
  head.lr = one_of<double>({0.1, 0, NAN, 1e300});
  return head;
}

// ------------------------------------------------------------------------------------------------------------ trials

class Trial {
 public:
  explicit Trial(bool shares_memory) : node_(shares_memory ? "here" : "") { begin(); }

  // One connection, and what else happens to a server meanwhile.
  void go_on() {
    const int worker = static_cast<int>(any(kCapacity));
    const ByteStream connection = dial(port_, worker);
    ++connections_;
    uint32_t id = 1;
    for (uint64_t left = any(200); left > 0; --left) {
      drain(connection.socket());
      const uint32_t number = one_in(10) ? static_cast<uint32_t>(any(id + 1)) : id++;
      ++messages_;
      if (!put(connection.socket(), any_message(number))) break;
    }
    update();
    if (one_in(30)) server_->lost(worker, 0);
    if (one_in(30)) server_->back(worker, 0);
    if (one_in(50)) copy_all();
    if (keys_ <= kKeysOfOneServer) return;
    end();
    begin();
  }

  // The server still does what an honest worker asks.
  void end() {
    const ByteStream connection = dial(port_, 0);
    Head hello;
    put(connection.socket(), frames_of(1, hello, {}, true));
    pollfd waits = {connection.socket(), POLLIN, 0};
    if (poll(&waits, 1, 20'000) != 1) fail("the server answers nothing any more");
    server_->close();
    server_.reset();
  }

  void print() const { std::printf("%lu messages over %lu connections\n", messages_, connections_); }

 private:
  void begin() {
    keys_ = 0;
    const int listener = make_listener();
    port_ = port_of(listener);
    ServerOptions options;
    options.capacity = kCapacity;
    options.listeners.emplace_back(listener);
    options.secret = "secret";
    options.token = "token";
    options.threads = 2;
    options.timeout_s = 2;
    options.node = node_;
    server_ = std::make_unique<StoreServer>(std::move(options));
  }

  Bytes any_message(uint32_t id) {
    const bool is_honest = one_in(3);
    Head head = any_head(is_honest);
    Bytes body;
    if (is_of_store(head.said)) head.number = ++questions_;
    if (is_change(head.said) && !one_in(5)) head.push = ++changes_;
    switch (head.said) {
      case Said::create:
        body = body_of_create(keys_, is_honest);
        head.chunk = static_cast<uint32_t>(any(kCapacity + 2));
        break;
      case Said::rule:
        body = body_of_rule(is_honest);
        break;
      case Said::push:
      case Said::push_pull:
      case Said::assign:
      case Said::write_state:
        body = body_of_values(head, is_honest);
        break;
      default:
        size_t elements = 0;
        if (head.said == Said::pull && head.ranges < 100)
          body = ranges_of(head, true, elements);
        else if (!is_honest && one_in(3))
          body = noise(any(64));
    }
    return frames_of(id, head, body, is_honest);
  }

  void update() {
    const auto taken = server_->take(0);
    if (taken) error_of([&] { server_->finish(taken->part, taken->piece, taken->weight); });
  }

  void copy_all() {
    const auto error = error_of([&] {
      const auto parts = server_->stores().parts();
      for (size_t part = 0; part < parts.size(); ++part) {
        server_->stores().describe(part);
        server_->stores().copy(part, 0, 2);
      }
    });
    if (error) fail(std::string("a snapshot cannot be made: ") + error->what());
  }

  const std::string node_;
  std::unique_ptr<StoreServer> server_;
  int port_ = 0;
  uint32_t keys_ = 0;
  int64_t questions_ = 1000;
  uint64_t changes_ = 1000;
  uint64_t messages_ = 0, connections_ = 0;
};

}  // namespace

int main(int, char** arguments) {
  const double end = now_s() + std::atof(arguments[1]);
  generator.seed(static_cast<uint64_t>(std::atoll(arguments[2])));
  Trial trial(std::string(arguments[3]) == "shared");
  while (now_s() < end) trial.go_on();
  trial.end();
  trial.print();
}
