#include "kvstore/worker/remote.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"

namespace ringtrain {
namespace {

// Of questions, so that a server can tell the next one from the same one again, even by the successor of this process.
int64_t first_question() { return static_cast<int64_t>(now_s() * 1e6) << 10 | 1; }

}  // namespace

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
  Head head;
  head.said = Said::create;
  head.store = store;
  head.chunk = static_cast<uint32_t>(workers);
  Writer writer;
  spec.put(writer);
  return ask(server, head, writer.take());
}

RemoteReplyPtr Remote::attach(int server, uint32_t store, uint32_t first_part, size_t least_pieces) {
  Head head;
  head.said = Said::attach;
  head.store = store;
  head.part = first_part;
  head.chunk = static_cast<uint32_t>(least_pieces);
  return ask(server, head, {});
}

RemoteReplyPtr Remote::set_rule(int server, uint32_t store, const RuleWords& rule) {
  Head head;
  head.said = Said::rule;
  head.store = store;
  return ask(server, head, bytes_of(rule));
}

int64_t Remote::next_join() { return questions_.fetch_add(1); }

RemoteReplyPtr Remote::join(int server, uint32_t store, int64_t number) {
  Head head;
  head.said = Said::join;
  head.store = store;
  return ask(server, head, bytes_of(JoinWords{static_cast<uint32_t>(options_.worker), number}));
}

RemoteReplyPtr Remote::resume(int server, uint32_t store, const EndedJoins& ended) {
  Head head;
  head.said = Said::resume;
  head.store = store;
  return ask(server, head, bytes_of(ended));
}

RemoteReplyPtr Remote::awaited(int server, const StoreHandle& call) {
  const auto reply = std::make_shared<RemoteReply>();
  tell(server, [reply, call = &call](RemoteServer& there) {
    if (const auto error = error_of([&] { there.ask_awaited(call, reply); })) reply->fail(*error);
  });
  return reply;
}

std::vector<PartWords> Remote::parts_of(RemoteReply& reply) {
  const Bytes body = reply.take();
  Reader reader(body);
  return read_list<PartWords>(reader);
}

void Remote::poke(int server, uint32_t store, uint32_t part, uint32_t chunk) {
  Head head;
  head.said = Said::poke;
  head.store = store;
  head.part = part;
  head.chunk = chunk;
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
  Head head;
  head.said = Said::waiting;
  head.store = store;
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
