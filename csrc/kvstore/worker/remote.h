// The servers of a job as a worker reaches them over TCP: what it asks them, and what it pushes and pulls where it does
// not share memory with them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/signals.h"
#include "base/thread_annotations.h"
#include "kvstore/wire/mailbox.h"
#include "kvstore/worker/remote_server.h"
#include "network/poller.h"

namespace ringtrain {

// A thread that talks to some of the servers. Each server has one such thread, and no other one touches its connection
// and what is on its way there.
//
// Any thread.
class RemoteThread {
 public:
  // All outlive this. `servers`: their numbers.
  RemoteThread(std::string name, Traffic& traffic, const RemoteOptions& options, const Credentials& credentials,
               const std::vector<int>& servers);
  ~RemoteThread();
  RemoteThread(const RemoteThread&) = delete;
  RemoteThread& operator=(const RemoteThread&) = delete;

  // Before start().
  const RemoteReplyPtr& hello_of(int server) const { return servers_.at(server)->hello(); }
  void start();

  // Has the thread do work(there), with one of its servers. Nothing happens with what comes after it has ended.
  template <typename Work>
  void tell(int server, Work work) {
    mailbox_.post([this, server, work = std::move(work)] { do_with(*servers_.at(server), work); });
  }
  // Has the thread do work().
  void post(Mailbox::Work work) { mailbox_.post(std::move(work)); }
  // On the thread: whether all of its servers have all, and a message to each.
  bool has_all() const;
  void say(const Head& head);

  // Operations that are pending at its servers fail, and the thread ends.
  void ask_to_end();
  void join();

 private:
  template <typename Work>
  static void do_with(RemoteServer& there, const Work& work) {
    if (const auto error = error_of([&] { work(there); })) there.begin_again(*error);
  }
  void run();
  void take_turn();

  const std::string name_;
  Poller poller_;
  Mailbox mailbox_{poller_};
  std::map<int, std::unique_ptr<RemoteServer>> servers_;  // by number; from start() on the thread's
  bool stops_ = false;                                    // the thread only
  Thread thread_;
};

// The threads that talk to servers, and the copies of the values that they have to send.
//
// Any thread.
class Remote {
 public:
  // Begins to dial all servers.
  explicit Remote(RemoteOptions options);
  // Pending operations fail.
  ~Remote();

  // Returns what they are. Throws peer_lost, naming the server that cannot be reached; nothing if it takes longer.
  std::optional<std::vector<ServerWords>> meet(double longest_s);

  // Questions to one server: of each, one at a time, in order. See Said for the bodies.
  RemoteReplyPtr create(int server, uint32_t store, int workers, const PartSpec& spec);
  RemoteReplyPtr attach(int server, uint32_t store, uint32_t first_part, size_t least_pieces);
  RemoteReplyPtr set_rule(int server, uint32_t store, const RuleWords& rule);
  // `number`: of next_join().
  RemoteReplyPtr join(int server, uint32_t store, int64_t number);
  RemoteReplyPtr resume(int server, uint32_t store, const EndedJoins& ended);
  RemoteReplyPtr awaited(int server, const StoreHandle& call);
  static std::vector<uint32_t> numbers_of(RemoteReply& reply) { return words_of<NumberWords>(reply.take()); }
  int64_t next_join();
  static PartWords part_of(RemoteReply& reply) { return words_of<PartWords>(reply.take()); }
  static std::vector<PartWords> parts_of(RemoteReply& reply) { return words_of<std::vector<PartWords>>(reply.take()); }

  // Tells the server what has become of a chunk, for which others may wait at it.
  void poke(int server, uint32_t store, uint32_t part, uint32_t chunk);
  // Tells all servers that this worker waits in a store, see Said::waiting; but not while one of them has not said that
  // it has what this worker has pushed.
  void waits(uint32_t store);

  // Begins it. Returns false if there is no room for a copy of its values in so long; then nothing has happened.
  bool start(RemoteOperation operation, double longest_s);

  // News from others about a server: it is gone; or another one has taken its place.
  void lost(int server, const std::string& text);
  void back(int server, std::vector<SocketAddress> addresses);

  // All that is under way fails, and all that comes.
  void end(const Error& error);

  std::map<std::string, double> metrics() const;

 private:
  RemoteReplyPtr ask(int server, Head head, Bytes body);
  RemoteThread& thread_of(int server) const { return *threads_[static_cast<size_t>(server) % threads_.size()]; }
  // Has the thread of the server do work(there), with it.
  template <typename Work>
  void tell(int server, Work work) {
    thread_of(server).tell(server, std::move(work));
  }
  void say_waiting(uint32_t store, const RemoteThread& last);
  // Room for so many bytes; a single one that is larger than all of it waits until all is free.
  bool take_room(size_t bytes, double longest_s);
  void give_room(size_t bytes);

  const RemoteOptions options_;
  const Credentials credentials_;
  Traffic traffic_;
  std::vector<RemoteReplyPtr> hellos_;  // constant after construction
  std::atomic<int64_t> questions_;      // the number of the next one

  mutable Mutex mutex_;
  Condition has_room_;
  size_t used_ GUARDED_BY(mutex_) = 0;

  std::vector<std::unique_ptr<RemoteThread>> threads_;  // server i has the one of number i modulo their number
};

}  // namespace ringtrain
