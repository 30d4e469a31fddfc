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

#include "base/thread_annotations.h"
#include "kvstore/worker/remote_server.h"
#include "kvstore/worker/remote_thread.h"

namespace ringtrain {

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
  static std::vector<uint32_t> numbers_of(RemoteReply& reply) { return words_of<NumberWords>(reply.take()).numbers; }
  int64_t next_join();
  static PartWords part_of(RemoteReply& reply) { return words_of<PartWords>(reply.take()); }
  static std::vector<PartWords> parts_of(RemoteReply& reply);

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
