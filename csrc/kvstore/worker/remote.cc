#include "kvstore/worker/remote.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace ringtrain {
namespace {

// Of questions, so that a server can tell the next one from the same one again, even by the successor of this process.
int64_t first_question() { return static_cast<int64_t>(now_s() * 1e6) << 10 | 1; }

}  // namespace

RemoteThread::RemoteThread(std::string name, Traffic& traffic, const RemoteOptions& options,
                           const Credentials& credentials, const std::vector<int>& servers)
    : name_(std::move(name)) {
  for (const int number : servers)
    servers_[number] = std::make_unique<RemoteServer>(poller_, traffic, options, credentials, number);
}

RemoteThread::~RemoteThread() {
  ask_to_end();
  join();
}

void RemoteThread::start() {
  thread_ = start_thread([this] { run(); });
}

void RemoteThread::ask_to_end() {
  if (thread_.joinable()) mailbox_.post([this] { stops_ = true; });
}

void RemoteThread::join() {
  if (thread_.joinable()) thread_.join();
}

void RemoteThread::run() {
  GuardedTurns turns(name_);
  while (true) {
    turns.run([this] { mailbox_.empty(); });
    if (stops_) break;
    turns.run([this] { poller_.run(); });
    turns.run([this] { take_turn(); });
  }
  const Error closed(ErrorKind::shut_down, "the store has been closed");
  for (const auto& [number, server] : servers_) server->close(closed);
  servers_.clear();
  turns.run([this] { poller_.run(); });
}

void RemoteThread::take_turn() {
  double pause_s = 1;
  const double now = now_s();
  for (const auto& [number, server] : servers_) {
    do_with(*server, [&](RemoteServer& there) { there.look(now); });
    pause_s = std::min(pause_s, server->pause_s());
  }
  mailbox_.sleep(pause_s);
}

bool RemoteThread::has_all() const {
  return std::all_of(servers_.begin(), servers_.end(), [](const auto& one) { return one.second->has_all(); });
}

void RemoteThread::say(const Head& head) {
  for (const auto& [number, server] : servers_) do_with(*server, [&](RemoteServer& there) { there.say(head); });
}

Remote::Remote(RemoteOptions options)
    : options_(std::move(options)),
      credentials_{options_.secret, options_.token, options_.worker,
                   options_.capacity + static_cast<int>(options_.servers.size()), options_.is_sealed},
      questions_(first_question()) {
  traffic_.name = "worker " + std::to_string(options_.worker);
  traffic_.verbose = options_.verbose;
  const size_t servers = options_.servers.size();
  const size_t threads = std::max(size_t{1}, std::min(static_cast<size_t>(std::max(1, options_.threads)), servers));
  for (size_t i = 0; i < threads; ++i) {
    std::vector<int> own;
    for (size_t server = i; server < servers; server += threads) own.push_back(static_cast<int>(server));
    const std::string name = traffic_.name + (threads > 1 ? ", thread " + std::to_string(i) : "");
    threads_.push_back(std::make_unique<RemoteThread>(name, traffic_, options_, credentials_, own));
  }
  for (int i = 0; i < static_cast<int>(servers); ++i) hellos_.push_back(thread_of(i).hello_of(i));
  for (const auto& thread : threads_) thread->start();
}

// One thread may have something to tell another one until both have ended.
Remote::~Remote() {
  for (const auto& thread : threads_) thread->ask_to_end();
  for (const auto& thread : threads_) thread->join();
}

bool Remote::take_room(size_t bytes, double longest_s) {
  const Lock lock(mutex_);
  const auto fits = [&]() REQUIRES(mutex_) { return used_ == 0 || used_ + bytes <= options_.outbox_bytes; };
  if (!has_room_.wait_for(mutex_, std::chrono::duration<double>(longest_s), fits)) return false;
  used_ += bytes;
  return true;
}

void Remote::give_room(size_t bytes) {
  const Lock lock(mutex_);
  used_ -= bytes;
  has_room_.notify_all();
}

std::optional<std::vector<ServerWords>> Remote::meet(double longest_s) {
  std::vector<ServerWords> all;
  const double end = now_s() + longest_s;
  for (const RemoteReplyPtr& hello : hellos_) {
    if (!hello->wait(std::max(0.0, end - now_s()))) return std::nullopt;
    all.push_back(words_of<ServerWords>(hello->take()));
  }
  return all;
}

RemoteReplyPtr Remote::ask(int server, Head head, Bytes body) {
  if (body.size() > kLongestBody) throw invalid("these are too many keys for one call; make them in several");
  RemoteQuestion question;
  head.number = questions_.fetch_add(1);
  question.head = head;
  question.body = std::move(body);
  question.reply = std::make_shared<RemoteReply>();
  const RemoteReplyPtr reply = question.reply;
  tell(server, [question](RemoteServer& there) {
    if (const auto error = error_of([&] { there.add(question); })) question.reply->fail(*error);
  });
  return reply;
}

RemoteReplyPtr Remote::create(int server, uint32_t store, int workers, const PartSpec& spec) {
  return ask(server, Head::of_store(Said::create, store, 0, static_cast<uint32_t>(workers)), bytes_of(spec));
}

RemoteReplyPtr Remote::attach(int server, uint32_t store, uint32_t first_part, size_t least_pieces) {
  return ask(server, Head::of_store(Said::attach, store, first_part, static_cast<uint32_t>(least_pieces)), {});
}

RemoteReplyPtr Remote::set_rule(int server, uint32_t store, const RuleWords& rule) {
  return ask(server, Head::of_store(Said::rule, store), bytes_of(rule));
}

int64_t Remote::next_join() { return questions_.fetch_add(1); }

RemoteReplyPtr Remote::join(int server, uint32_t store, int64_t number) {
  return ask(server, Head::of_store(Said::join, store),
             bytes_of(JoinWords{static_cast<uint32_t>(options_.worker), number}));
}

RemoteReplyPtr Remote::resume(int server, uint32_t store, const EndedJoins& ended) {
  return ask(server, Head::of_store(Said::resume, store), bytes_of(ended));
}

RemoteReplyPtr Remote::awaited(int server, const StoreHandle& call) {
  const auto reply = std::make_shared<RemoteReply>();
  tell(server, [reply, call = &call](RemoteServer& there) {
    if (const auto error = error_of([&] { there.ask_awaited(call, reply); })) reply->fail(*error);
  });
  return reply;
}

void Remote::poke(int server, uint32_t store, uint32_t part, uint32_t chunk) {
  const Head head = Head::of_store(Said::poke, store, part, chunk);
  tell(server, [head](RemoteServer& there) { there.say(head); });
}

// The last thread whose servers have all speaks for all threads. The caller's pushes are in their mailboxes before the
// question.
void Remote::waits(uint32_t store) {
  const auto left = std::make_shared<std::atomic<size_t>>(threads_.size());
  for (const auto& thread : threads_)
    thread->post([this, store, left, &own = *thread] {
      if (own.has_all() && left->fetch_sub(1) == 1) say_waiting(store, own);
    });
}

void Remote::say_waiting(uint32_t store, const RemoteThread& last) {
  const Head head = Head::of_store(Said::waiting, store);
  for (const auto& thread : threads_)
    if (thread.get() == &last)
      thread->say(head);
    else
      thread->post([head, &own = *thread] { own.say(head); });
}

bool Remote::start(RemoteOperation operation, double longest_s) {
  const auto flight = std::make_shared<RemoteFlight>(std::move(operation));
  RemoteOperation& own = flight->operation;
  const size_t bytes = own.copies && own.values && flight->legs() > 0 ? flight->value_bytes() : 0;
  if (bytes > 0 && !take_room(bytes, longest_s)) return false;
  if (bytes > 0) {
    flight->copy.reset(new char[bytes]);
    std::copy_n(own.values, bytes, flight->copy.get());
    own.values = flight->copy.get();
    own.done = [this, bytes, done = std::move(own.done)](const std::optional<Error>& error, int64_t num_update) {
      give_room(bytes);
      done(error, num_update);
    };
  }
  tell(own.server, [flight](RemoteServer& there) {
    const auto error = error_of([&] { there.add(flight); });
    if (!error) return;
    flight->error = error;
    flight->end();
  });
  return true;
}

void Remote::lost(int server, const std::string& text) {
  tell(server, [text](RemoteServer& there) { there.lose(text); });
}

void Remote::back(int server, std::vector<SocketAddress> addresses) {
  tell(server, [addresses = std::move(addresses)](RemoteServer& there) { there.come_back(addresses); });
}

void Remote::end(const Error& error) {
  for (size_t i = 0; i < options_.servers.size(); ++i)
    tell(static_cast<int>(i), [error](RemoteServer& there) { there.close(error); });
}

std::map<std::string, double> Remote::metrics() const {
  const auto number = [](const std::atomic<uint64_t>& counter) { return static_cast<double>(counter.load()); };
  const Lock lock(mutex_);
  return {{"sent_bytes", number(traffic_.sent_bytes)},
          {"sent_messages", number(traffic_.sent_messages)},
          {"received_bytes", number(traffic_.received_bytes)},
          {"received_messages", number(traffic_.received_messages)},
          {"outbox_bytes", static_cast<double>(used_)}};
}

}  // namespace ringtrain
