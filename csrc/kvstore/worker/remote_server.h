// One server as a worker reaches it: the connection, what is on its way, and what has to be sent again.
//
// TCP loses nothing while a connection lives. So a message is sent once over each connection, and all that have no
// answer once more when the connection was broken and is there again. A server that is asked for a sign of life and
// says nothing is lost, and so is one that cannot be reached any more.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/error.h"
#include "kernels/quantize.h"
#include "kvstore/store/layout.h"
#include "kvstore/wire/connection.h"
#include "kvstore/wire/dialler.h"
#include "kvstore/wire/message.h"
#include "kvstore/worker/store_handle.h"
#include "network/tcp.h"

namespace ringtrain {

struct RemoteOptions {
  int worker = 0, capacity = 1;                     // its number, and how many there may be
  uint32_t term = 0;                                // of this process, see WorkerPlace
  std::vector<std::vector<SocketAddress>> servers;  // by the number of the server: where it listens
  std::string secret, token;                        // see Credentials
  bool is_sealed = false;
  double timeout_s = 30, return_s = 0;  // how long a server may be gone before it is lost
  size_t outbox_bytes = 64 << 20;
  int threads = 1;  // that talk to servers, at most one for each
  int verbose = 0;
  // Called when a server is lost, on the thread that talks to it: it must not block.
  std::function<void(int server, const Error& error)> has_lost;
};

// An operation on a piece of a key at one server.
struct RemoteOperation {
  Said said = Said::push;  // push, pull, push_pull, assign, read_state or write_state
  int server = 0;
  uint32_t store = 0, part = 0;  // its number
  std::shared_ptr<const Layout> layout;
  size_t piece = 0;

  // Of the elements of the piece, or of its rows: what is sent, and where the answer goes. Null: neither.
  const char* values = nullptr;
  DType dtype = DType::float32;
  Quantizer quantizer;  // the values are codes
  char* out = nullptr;
  DType wanted = DType::float32;
  std::shared_ptr<const ChunkRows> rows;  // null: all of the piece
  bool copies = false;                    // the values may change as soon as start() has returned

  int64_t number = 0;  // of this worker's pushes of the key until now, with this one; of states: which array
  uint64_t push = 0;  // of pushes: more than in those of the key before, see Head; of changes the RemoteServer gives it
  double lr = 0, wd = 0;
  int priority = 0;                   // what is higher goes first
  const StoreHandle* call = nullptr;  // tells the operations of a call from others; it may be gone

  // Once, on the thread that talks to the server: it must not block. num_update: the smallest of its chunks.
  std::function<void(const std::optional<Error>& error, int64_t num_update)> done;

  // One of the requests that it takes: a chunk, or the rows of one.
  struct Leg {
    uint32_t chunk;
    size_t begin, count;          // elements of the values that are given, and of the answer's place
    const ElementRanges* ranges;  // null: all of the chunk
  };
  size_t legs() const { return rows ? rows->size() : layout->first_chunk(piece + 1) - layout->first_chunk(piece); }
  Leg leg(size_t i) const {
    if (rows) {
      const RowsOfChunk& one = (*rows)[i];
      return {one.chunk, one.begin, one.count, &one.ranges};
    }
    const size_t number = layout->first_chunk(piece) + i;
    const KeyChunk& chunk = layout->chunks()[number];
    return {static_cast<uint32_t>(number), chunk.begin, chunk.count, nullptr};
  }
  bool pushes() const { return said == Said::push || said == Said::push_pull; }
  // Of the values that are sent: bytes from their beginning up to an element, on which a word of codes begins.
  size_t bytes_up_to(size_t element) const {
    if (quantizer.kind == Quantizer::Kind::none) return element * size_of(dtype);
    return quantized_bytes(quantizer.kind, element);
  }
};

// The answer of a server to a question. Any thread.
class RemoteReply {
 public:
  // Waits for at most so long; returns true once the answer is there, or has failed.
  bool wait(double longest_s) {
    if (!handle_.is_done()) handle_.sleep(longest_s);
    return handle_.is_done();
  }
  // Once it is there. Throws what went wrong.
  Bytes take() {
    handle_.require_success();
    return body_;
  }

  // On the thread that talks to the server. The first one of these counts.
  void finish(Bytes body) {
    if (handle_.is_done()) return;
    body_ = std::move(body);
    handle_.end_one(std::nullopt);
  }
  void fail(const Error& error) {
    if (!handle_.is_done()) handle_.fail(error);
  }

 private:
  StoreHandle handle_;
  Bytes body_;  // constant once it is done
};
using RemoteReplyPtr = std::shared_ptr<RemoteReply>;

// An operation on its way to one server, chunk by chunk.
//
// On the thread that talks to the server from when it is added on.
struct RemoteFlight {
  explicit RemoteFlight(RemoteOperation of) : operation(std::move(of)) {}
  // One that a server has refused ends here: messages with its values may still wait in the connection, which keep it.
  ~RemoteFlight() {
    if (error) end();
  }
  RemoteFlight(const RemoteFlight&) = delete;
  RemoteFlight& operator=(const RemoteFlight&) = delete;

  // Calls `done`, the first time.
  void end() {
    const auto done = std::exchange(operation.done, nullptr);
    if (done) done(error, legs() == 0 ? 0 : smallest_num_update);
  }

  size_t legs() const { return operation.legs(); }
  size_t value_bytes() const {
    size_t end = 0;
    for (size_t i = 0; i < legs(); ++i) end = std::max(end, operation.leg(i).begin + operation.leg(i).count);
    return operation.values ? operation.bytes_up_to(end) : 0;
  }

  Head head(const RemoteOperation::Leg& leg) const {
    Head head;
    head.said = operation.said;
    head.dtype = operation.dtype;
    head.wanted = operation.wanted;
    head.store = operation.store;
    head.part = operation.part;
    head.chunk = leg.chunk;
    head.codes = static_cast<uint32_t>(operation.quantizer.kind);
    head.threshold = operation.quantizer.threshold;
    if (leg.ranges) head.ranges = static_cast<uint32_t>(leg.ranges->size());
    head.number = operation.number;
    head.lr = operation.lr;
    head.wd = operation.wd;
    return head;
  }

  bool is_all_sent() const { return sent == legs(); }
  bool is_over() const { return sent == answered && (is_all_sent() || error.has_value()); }
  // Whether the server applies it once it has all of it, or refuses all of it. Then it is also sent again as a whole.
  bool is_whole() const { return operation.pushes() && operation.layout->is_pushed_as_a_whole(operation.piece); }
  void answer(int64_t num_update) {
    ++answered;
    smallest_num_update = std::min(smallest_num_update, num_update);
  }

  RemoteOperation operation;
  std::unique_ptr<char[]> copy;    // of the values
  size_t sent = 0, answered = 0;   // legs
  std::vector<uint32_t> requests;  // of one that is_whole(): of the legs that were sent
  std::optional<Error> error;
  int64_t smallest_num_update = std::numeric_limits<int64_t>::max();
  int64_t place_in_line = 0;  // among those that wait to be sent: the smallest is the next
  uint64_t order = 0;         // of arrival
};
using RemoteFlightPtr = std::shared_ptr<RemoteFlight>;

// A request to a server, and the handle that waits for the answer.
struct RemoteQuestion {
  Head head;
  Bytes body;
  RemoteReplyPtr reply;
  bool asks_again = false;  // what it is about, after another server has taken the place of the first one
};

// On the thread of its Poller.
class RemoteServer final : Connection::Owner, Dialler::Owner {
 public:
  // All outlive this.
  RemoteServer(Poller& poller, Traffic& traffic, const RemoteOptions& options, const Credentials& credentials,
               int number);
  ~RemoteServer() override;

  void add(RemoteFlightPtr flight);
  void add(RemoteQuestion question);
  // Asks for which workers' pushes the operations of a call wait; NumberWords. Nobody where the server is busy or away.
  void ask_awaited(const StoreHandle* call, const RemoteReplyPtr& reply);
  // Whether the server has said of all requests that it has them.
  bool has_all() const { return unanswered_ == 0 && waiting_.empty(); }
  // Sends what has no answer.
  void say(const Head& head);
  // The scheduler says so.
  void lose(const std::string& text);
  void come_back(std::vector<SocketAddress> addresses);
  // After an error on the way, such as for lack of memory: over another connection.
  void begin_again(const Error& error);
  // Fails all that is under way, and all that comes.
  void close(const Error& error);

  // Completes once the server has identified itself.
  const RemoteReplyPtr& hello() const { return hello_; }

  // Does what is due by now, and sends what can be sent.
  void look(double now);
  // How long look() has nothing to do, if nothing happens.
  double pause_s() const;

 private:
  using PieceName = std::tuple<uint32_t, uint32_t, size_t>;  // store, part, piece
  using PartName = std::pair<uint32_t, uint32_t>;

  // A leg that was sent and not answered; of a flight that is_whole(), also one that was.
  struct Request {
    RemoteFlightPtr flight;
    RemoteOperation::Leg leg;
    uint64_t order;          // in which it was sent first
    int64_t shift = 0;       // what its number is more at the server
    bool is_held = false;    // the server has it, and its answer comes later
    bool is_staged = false;  // the server has it, and needs the others of its flight
    bool is_answered = false;
    size_t window_bytes = 0;
  };

  // Requests to be sent for a piece of a key stay in order, whatever their priorities.
  struct Line {
    int64_t place;
    int waiting;
    int64_t last_number;
  };

  char* place(uint32_t id, const Head& head) override;
  void take(uint32_t id, const Head& head) override;
  void has_room() override {}
  void has_ended(int error) override;
  void dialled(ByteStream bytes) override;
  void cannot_dial(int error) override;

  void dial(double now);
  void say_hello();
  void take_hello();
  void take_refusal(ErrorKind kind);
  void let_go();
  void ask_again_for_parts();
  void ask_again_first(Said said, uint32_t store, Bytes body);
  void take_parts(uint32_t store);
  void take_part(const PartWords& part, uint32_t store);
  void begin_piece(const RemoteOperation& operation);
  void ask_next();
  void open();
  void send_question();
  void answer_question(const Head& head);
  void feed();
  void send_leg(const RemoteFlightPtr& flight);
  void transmit(uint32_t id, Request& request);
  Head head_of(const Request& request) const;
  size_t expected_bytes(const Request& request) const;
  void answer(uint32_t id, const Head& head);
  void count_again(uint32_t id, int64_t counted);
  void leave_line(const RemoteFlight& flight);
  void end_refused(RemoteFlight& flight);
  void look_for_silence(double now);
  void note_what_moves(double now);
  void give_up(const std::string& why);
  void fail(const Error& error);
  void end_connection();
  void fail_all(const Error& error);
  std::string name() const;

  Poller& poller_;
  Traffic& traffic_;
  const RemoteOptions& options_;
  const int number_;
  std::vector<SocketAddress> addresses_;
  Dialler dialler_;
  std::unique_ptr<Connection> connection_;
  const RemoteReplyPtr hello_ = std::make_shared<RemoteReply>();
  std::optional<ServerWords> words_;       // of the last server there
  bool is_met_ = false, is_open_ = false;  // it has said who it is; it may be sent what waits
  bool is_closed_ = false;
  std::optional<Error> lost_;

  std::optional<std::string> successor_missing_;  // the error, once the scheduler has lost it, until it comes back
  double down_since_ = 0, dial_at_ = 0;
  int dials_ = 0;

  std::deque<RemoteQuestion> questions_;  // the first one is asked
  uint32_t question_id_ = 0;              // 0: it is not
  Bytes answer_body_;

  std::map<std::pair<int64_t, uint64_t>, RemoteFlightPtr> waiting_;  // by place and order
  std::map<PieceName, Line> lines_;
  std::map<PartName, std::vector<int64_t>> shifts_;  // by chunk: Request::shift of the next request
  // Of pieces of which nothing has gone this way before: what another server in the place of the first one has of them.
  std::map<PieceName, std::vector<uint64_t>> untold_;
  std::unordered_map<uint32_t, Request> requests_;
  std::set<uint32_t> stores_;  // that it was asked for
  // By store: the last join or resume of this worker, with its body.
  std::map<uint32_t, std::pair<Said, Bytes>> joins_;
  size_t window_bytes_ = 0, unanswered_ = 0;  // of what it has not said that it has
  uint32_t next_id_ = 1;
  uint64_t orders_ = 0;
  uint64_t changes_ = 0;                                 // of all chunks
  double heard_at_ = 0, looked_at_ = 0, probed_at_ = 0;  // heard_at_: or when it owed no answer
  int silences_ = 0;                                     // probes since then
  uint64_t sent_bytes_ = 0, received_bytes_ = 0;         // over the connection, when it was looked at
};

}  // namespace ringtrain
