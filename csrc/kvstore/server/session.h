// One worker's connection to a server, on a thread of the server: what it asks of chunks is done here by an Actor in
// the worker's name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kvstore/server/server_stores.h"
#include "kvstore/store/actor.h"
#include "kvstore/store/part.h"
#include "kvstore/wire/connection.h"

namespace ringtrain {

// Requests that wait at a server: for a round to close, for slow workers to come nearer, or for a chunk that somebody
// holds.
//
// One thread of a server, whose Parts outlive this. Each change retries all requests; those that cannot proceed stay.
class WaitingRoom {
 public:
  struct Name {
    uint64_t session;  // number of the connection that has asked
    uint32_t id;       // of its request
    bool operator<(const Name& other) const {
      return session != other.session ? session < other.session : id < other.id;
    }
  };
  // Whether it has its answer now. Does not throw.
  using Attempt = std::function<bool()>;

  // Whether it is here already.
  bool has(const Name& name) const { return names_.count(name) != 0; }
  // It is tried once more before this returns: what it waits for may just have happened.
  // `number`: of the worker's pushes of the key until this request.
  void enter(const Name& name, Part& part, size_t chunk, int64_t number, Attempt attempt);
  void leave(uint64_t session);
  // Calls on_request(id, part, chunk, number) for each request of a session.
  template <typename OnRequest>
  void visit(uint64_t session, OnRequest on_request) const {
    for (const auto& [place, guests] : tables_)
      for (const Guest& guest : guests)
        if (guest.name.session == session) on_request(guest.name.id, *place.first, place.second, guest.number);
  }

  void try_chunk(Part& part, size_t chunk);
  void try_all();
  size_t size() const { return names_.size(); }

 private:
  struct Guest {
    Name name;
    int64_t number;
    Attempt attempt;
  };
  using Place = std::pair<Part*, size_t>;
  using Tables = std::map<Place, std::vector<Guest>>;

  void try_table(Tables::value_type& table);
  void note_left(Part& part, const Name& name);

  Tables tables_;
  std::set<Name> names_;
};

class ServerThread;

// On the thread of the server that is its home.
class Session final : Connection::Owner {
 public:
  // `home` outlives this. `number`: of all sessions.
  Session(ServerThread& home, int worker, uint64_t number, ByteStream bytes);
  ~Session() override;

  int worker() const { return worker_; }
  // Goes on with what found a chunk in use. Whether there still is some.
  bool try_again();
  void flush() { connection_->flush(); }
  // It ends; its connection is not to be destroyed while the Poller is at it.
  std::unique_ptr<Connection> take_connection() { return std::move(connection_); }

 private:
  // Of one chunk.
  struct Request {
    uint32_t id;
    Head head;
    std::shared_ptr<char> body;
    std::shared_ptr<const ElementRanges> ranges;  // null: all of the chunk
    Actor* actor;
    bool has_begun = false;  // it is of a push that is applied
  };
  enum class Result { over, busy };

  // A push of several chunks to an asynchronous store. Its chunks are kept until all of them have come, and then
  // applied: a worker that dies before leaves nothing of it. From then on nothing but the death of this server ends it.
  struct WholePush {
    std::vector<std::optional<Request>> chunks;  // of the piece in order: that have come and are not applied
    size_t count = 0;                            // of these
    bool has_begun = false;                      // it is applied
  };
  // Of a piece. Pushes are applied one after the other, in the order of Head::push.
  struct WholePushes {
    std::map<uint64_t, WholePush> open;
    uint64_t over = 0;                  // up to this one all that are not open were applied or refused
    std::map<uint64_t, Error> refused;  // the last ones, with the reason: an answer may be lost
  };
  using PieceName = std::pair<Actor*, uint32_t>;

  char* place(uint32_t id, const Head& head) override;
  void take(uint32_t id, const Head& head) override;
  void has_room() override;
  void has_ended(int error) override;

  // Whether it is about a chunk, and no longer than what can be said about one.
  bool can_be_of_chunk(const Head& head) const;
  void answer_question(uint32_t id, const Head& head);
  Bytes greet(const Head& hello);
  Bytes awaited(const Bytes& question);
  void let_pass(uint32_t store);
  void take_request(uint32_t id, const Head& head);
  Actor& actor_of(const Head& head);
  // How many pushes of this worker a chunk has counted.
  int64_t counted(const Actor& actor, size_t chunk) const {
    return static_cast<int64_t>(actor.pushes_of(chunk, static_cast<size_t>(worker_)));
  }
  Result carry_out(const Request& request);
  Result push(const Request& request);
  Reading read(const Request& request, Answer& answer);
  Result pull(const Request& request);
  Result change(const Request& request);
  Result read_state(const Request& request);
  void defer(const Request& request, std::deque<Request>& queue);
  // Of one that is in a queue.
  void renumber(uint32_t id, int64_t number);
  void carry_out_in_order(const Request& request);
  static PieceName piece_of(const Request& request);
  bool is_behind_push(const Request& request) const;
  void take_chunk_of_push(const Request& request);
  void note_staged(const Request& request);
  void apply_pushes(const PieceName& piece);
  bool begin(WholePush& push, Actor& actor);
  bool apply(WholePush& push);
  std::optional<Request> take_out(std::optional<Request>& chunk, WholePush& push);
  void refuse_all(WholePush& push, const Error& error);
  void refuse_rest_of_push(const Head& head, const Error& error);
  void leave_pushes();
  void wait_for_value(const Request& request);
  // Returns whether the request has an answer, which may be an error. Does not throw.
  bool has_ended_waiting(const Request& request);
  // Whether the answer was sent, or will be when there is room for it.
  bool try_to_answer(const Request& request);
  void send_value(const Request& request, const Answer& answer, std::shared_ptr<char> buffer);
  void say(uint32_t id, Said said, int64_t number = 0);
  void refuse(uint32_t id, const Error& error);
  bool is_full() const;
  // Notes the work on a chunk on a track, in the timeline.
  void note(const char* what, const Request& request, double begin_s, const std::string& track) const;

  ServerThread& home_;
  const int worker_;
  uint32_t term_ = 0;  // of the worker's process, as it has said
  const uint64_t number_;
  const std::string receiving_;  // the track in timelines of what comes
  std::unique_ptr<Connection> connection_;
  std::map<std::pair<uint32_t, uint32_t>, std::unique_ptr<Actor>> actors_;  // by store and part
  Bytes question_;
  std::shared_ptr<char> body_;  // of the request that comes
  size_t body_room_ = 0;
  double body_begins_s_ = 0;               // to come, where there is a timeline
  std::deque<Request> busy_;               // that have found a chunk in use, in order
  std::deque<Request> unsent_;             // whose answers wait for room in the connection
  std::unordered_set<uint32_t> deferred_;  // ids in these
  std::map<PieceName, WholePushes> pushes_;
  std::set<PieceName> begun_;  // whose first push waits for chunks that are in use
  // Chunks of pushes that the worker does not know to have come: bytes by id.
  std::unordered_map<uint32_t, size_t> not_said_;
  size_t not_said_bytes_ = 0;
};

}  // namespace ringtrain
