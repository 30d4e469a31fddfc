#include "kvstore/worker/remote_server.h"

#include "base/clock.h"
#include "base/log.h"

namespace ringtrain {
namespace {

// Limits of what is sent without an answer, and of what waits in the connection: enough for a fast link, and so little
// that urgent messages do not wait long behind it.
constexpr size_t kWindowBytes = 8 << 20, kMostRequests = 4096, kQueuedBytes = 512 << 10;
constexpr int kMostSilences = 10, kMostDials = 5;
constexpr double kLongestPause_s = 0.1, kProbe_s = 1;
// A process that was there, and whose port nobody listens at any more, has ended.
constexpr double kRefused_s = 0.5;

}  // namespace

RemoteServer::RemoteServer(Poller& poller, Traffic& traffic, const RemoteOptions& options,
                           const Credentials& credentials, int number)
    : poller_(poller),
      traffic_(traffic),
      options_(options),
      number_(number),
      addresses_(options.servers[static_cast<size_t>(number)]),
      dialler_(poller_, *this, credentials),
      down_since_(now_s()) {}

RemoteServer::~RemoteServer() = default;

std::string RemoteServer::name() const {
  return "server " + std::to_string(number_) + (addresses_.empty() ? "" : " at " + to_string(addresses_.front()));
}

// -------------------------------------------------------------------------------------------------------- connections

void RemoteServer::dial(double now) {
  constexpr double kFirstPause_s = 0.01, kMostPause_s = 0.5;
  dial_at_ = now + std::min(kMostPause_s, kFirstPause_s * static_cast<double>(1 << std::min(dials_, 8)));
  if (addresses_.empty()) return give_up("it has told no address");
  const SocketAddress& address = addresses_[static_cast<size_t>(dials_++) % addresses_.size()];
  const auto error = error_of([&] { dialler_.dial(options_.capacity + number_, address, options_.timeout_s); });
  if (error) give_up(error->what());
}

void RemoteServer::dialled(ByteStream bytes) {
  Connection::Owner& owner = *this;
  connection_ = std::make_unique<Connection>(poller_, owner, traffic_, std::move(bytes));
  heard_at_ = now_s();
  silences_ = 0;
  say_hello();
}

// A process that ends the connection at once is another program, or has another secret.
void RemoteServer::cannot_dial(int error) {
  if (error == 0 && !words_ && dials_ >= kMostDials) return give_up("it ends the connection at once");
  const double limit_s = std::max(options_.return_s, words_ ? kRefused_s : options_.timeout_s);
  if (now_s() - down_since_ > limit_s) give_up(error == 0 ? "it ends the connection at once" : text_of(error));
}

void RemoteServer::has_ended(int error) {
  end_connection();
  down_since_ = now_s();
  dials_ = 0;
  dial_at_ = 0;
  if (traffic_.verbose >= 1)
    inform(traffic_.name + ": the connection to " + name() + " has ended" + (error ? ": " + text_of(error) : ""));
}

void RemoteServer::end_connection() {
  if (connection_) poller_.bury(std::move(connection_));
  connection_.reset();
  is_met_ = is_open_ = false;
  question_id_ = 0;
  dialler_.give_up();
}

// Only another process can be the server from here on: the lost one, if it runs again, hears that it was expelled.
void RemoteServer::lose(const std::string& text) {
  if (options_.return_s == 0) return give_up(text);
  if (connection_) has_ended(0);
  dialler_.give_up();
  successor_missing_ = text + "; no other server has taken its place within kv_rejoin_s";
}

void RemoteServer::give_up(const std::string& why) {
  fail(Error(ErrorKind::peer_lost, name() + " is gone (" + why + ")"));
}

void RemoteServer::fail(const Error& error) {
  if (lost_) return;
  lost_ = error;
  fail_all(*lost_);
  if (options_.has_lost) options_.has_lost(number_, *lost_);
}

void RemoteServer::come_back(std::vector<SocketAddress> addresses) {
  if (is_closed_) return;
  end_connection();
  if (!addresses.empty()) addresses_ = std::move(addresses);
  lost_.reset();
  successor_missing_.reset();
  down_since_ = now_s();
  dials_ = 0;
  dial_at_ = 0;
}

void RemoteServer::begin_again(const Error& error) {
  if (traffic_.verbose >= 1) inform(traffic_.name + " connects to " + name() + " again: " + error.what());
  if (connection_) has_ended(0);
}

void RemoteServer::close(const Error& error) {
  if (std::exchange(is_closed_, true)) return;
  lost_ = error;
  fail_all(error);
}

// ---------------------------------------------------------------------------------------------------- who it is

void RemoteServer::say_hello() {
  question_id_ = next_id_++;
  connection_->send(question_id_, Head::of(Said::hello, options_.term));
}

void RemoteServer::take_hello() {
  const auto words = words_of<ServerWords>(answer_body_);
  const bool is_another = words_ && words_->identity != words.identity;
  if (!words_) hello_->finish(answer_body_);
  words_ = words;
  is_met_ = true;
  dials_ = 0;
  let_go();
  if (is_another) ask_again_for_parts();
  ask_next();
}

// A server that refuses this worker with peer_lost lives: the worker was expelled.
void RemoteServer::take_refusal(ErrorKind kind) {
  const std::string text(answer_body_.begin(), answer_body_.end());
  if (kind != ErrorKind::peer_lost) return give_up(text);
  fail(Error(kind, text));
}

// Requests that the server has held are sent again as a whole, and so are all of a push of several chunks, also those
// that were answered: the server needs them all to apply one. Another server in its place may not have them, and the
// same one forgets requests that it has put off when their connection ends: pushes among them are not counted yet.
void RemoteServer::let_go() {
  for (auto& [id, request] : requests_) {
    const bool was_had = request.is_held || request.is_staged || request.is_answered;
    if (was_had) ++unanswered_;
    if (request.is_answered) --request.flight->answered;
    request.is_held = request.is_staged = request.is_answered = false;
  }
}

// Another server has taken its place, with what was kept of it: pushes that it has not are sent again, and what comes
// after them is counted on from there. It takes all workers for such as push.
void RemoteServer::ask_again_for_parts() {
  for (const uint32_t store : stores_) {
    const auto join = joins_.find(store);
    if (join != joins_.end()) ask_again_first(join->second.first, store, join->second.second);
    ask_again_first(Said::attach, store, {});
  }
}

void RemoteServer::ask_again_first(Said said, uint32_t store, Bytes body) {
  RemoteQuestion question;
  question.head = Head::of_store(said, store);
  question.body = std::move(body);
  question.reply = std::make_shared<RemoteReply>();
  question.asks_again = true;
  questions_.push_front(std::move(question));
}

void RemoteServer::take_parts(uint32_t store) {
  for (const PartWords& part : words_of<std::vector<PartWords>>(answer_body_)) take_part(part, store);
}

void RemoteServer::take_part(const PartWords& part, uint32_t store) {
  auto& shifts = shifts_[{store, part.number}];
  shifts.resize(part.pushes.size());
  for (size_t piece = 0; piece < part.spec.pieces.size(); ++piece) untold_.erase({store, part.number, piece});
  struct Next {
    int64_t number = std::numeric_limits<int64_t>::max(), shift = 0;
  };
  std::vector<Next> next(part.pushes.size());
  const auto is_of_part = [&](const RemoteOperation& operation, uint32_t chunk) {
    return operation.store == store && operation.part == part.number && chunk < next.size();
  };
  const auto note = [&](const RemoteOperation& operation, uint32_t chunk, int64_t shift) {
    if (operation.pushes() && is_of_part(operation, chunk) && operation.number < next[chunk].number)
      next[chunk] = {operation.number, shift};
  };
  for (const auto& [id, request] : requests_) note(request.flight->operation, request.leg.chunk, request.shift);
  for (const auto& [place, flight] : waiting_)
    for (size_t i = flight->sent; i < flight->legs(); ++i) {
      const uint32_t chunk = flight->operation.leg(i).chunk;
      note(flight->operation, chunk, chunk < shifts.size() ? shifts[chunk] : 0);
    }
  const Layout layout(part.spec);
  for (size_t chunk = 0; chunk < std::min(next.size(), layout.chunks().size()); ++chunk) {
    const auto line = lines_.find({store, part.number, layout.chunks()[chunk].piece});
    if (line != lines_.end() && line->second.last_number + 1 < next[chunk].number)
      next[chunk] = {line->second.last_number + 1, shifts[chunk]};
    if (next[chunk].number == std::numeric_limits<int64_t>::max()) {
      untold_[{store, part.number, layout.chunks()[chunk].piece}].push_back(part.pushes[chunk]);
      continue;
    }
    shifts[chunk] = std::min(next[chunk].shift, static_cast<int64_t>(part.pushes[chunk]) + 1 - next[chunk].number);
  }
  for (auto& [id, request] : requests_)
    if (is_of_part(request.flight->operation, request.leg.chunk)) request.shift = shifts[request.leg.chunk];
}

// This worker shared memory with the server before, and counts its pushes on from there.
void RemoteServer::begin_piece(const RemoteOperation& operation) {
  const auto untold = untold_.find({operation.store, operation.part, operation.piece});
  if (untold == untold_.end()) return;
  const int64_t next = operation.pushes() ? operation.number : operation.number + 1;
  auto& shifts = shifts_[{operation.store, operation.part}];
  const size_t first = operation.layout->first_chunk(operation.piece);
  for (size_t i = 0; i < untold->second.size() && first + i < shifts.size(); ++i)
    shifts[first + i] = std::min(shifts[first + i], static_cast<int64_t>(untold->second[i]) + 1 - next);
  untold_.erase(untold);
}

// ---------------------------------------------------------------------------------------------------------- questions

void RemoteServer::add(RemoteQuestion question) {
  if (lost_) return question.reply->fail(*lost_);
  stores_.insert(question.head.store);
  const Said said = question.head.said;
  if (said == Said::join || said == Said::resume) joins_[question.head.store] = {said, question.body};
  questions_.push_back(std::move(question));
  if (is_met_) ask_next();
}

void RemoteServer::ask_awaited(const StoreHandle* call, const RemoteReplyPtr& reply) {
  RemoteQuestion question;
  question.head.said = Said::awaited;
  question.reply = reply;
  NumberWords held;
  for (const auto& [id, request] : requests_) {
    if (request.flight->operation.call != call || !request.is_held) continue;
    held.push_back(id);
    question.head.store = request.flight->operation.store;
  }
  if (held.empty() || !is_open_ || !questions_.empty()) return reply->finish(bytes_of(NumberWords{}));
  question.body = bytes_of(held);
  add(std::move(question));
}

void RemoteServer::ask_next() {
  if (!is_open_ && (questions_.empty() || !questions_.front().asks_again)) open();
  if (questions_.empty() || question_id_ != 0) return;
  question_id_ = next_id_++;
  send_question();
}

// Repeats what was sent before.
void RemoteServer::open() {
  is_open_ = true;
  std::vector<std::pair<uint64_t, uint32_t>> sent;
  for (const auto& [id, request] : requests_) sent.emplace_back(request.order, id);
  std::sort(sent.begin(), sent.end());
  for (const auto& [order, id] : sent) transmit(id, requests_.at(id));
}

void RemoteServer::send_question() {
  const RemoteQuestion& question = questions_.front();
  connection_->send(question_id_, question.head, question.body);
}

void RemoteServer::answer_question(const Head& head) {
  question_id_ = 0;
  if (!is_met_ && head.said == Said::refused) return take_refusal(static_cast<ErrorKind>(head.number));
  if (!is_met_) return take_hello();
  RemoteQuestion question = std::move(questions_.front());
  questions_.pop_front();
  if (head.said == Said::refused) {
    question.reply->fail(
        Error(static_cast<ErrorKind>(head.number), std::string(answer_body_.begin(), answer_body_.end())));
  } else {
    if (question.asks_again && question.head.said == Said::attach) take_parts(question.head.store);
    question.reply->finish(std::move(answer_body_));
  }
  answer_body_ = Bytes();
  ask_next();
}

void RemoteServer::say(const Head& head) {
  if (is_open_) connection_->send(next_id_++, head);
}

// --------------------------------------------------------------------------------------------------------- operations

void RemoteServer::add(RemoteFlightPtr flight) {
  const RemoteOperation& operation = flight->operation;
  if (lost_) flight->error = *lost_;
  if (flight->error || flight->legs() == 0) return flight->end();
  stores_.insert(operation.store);
  if (operation.said <= Said::push_pull) begin_piece(operation);
  if (is_change(operation.said)) flight->operation.push = ++changes_;
  Line& line = lines_[{operation.store, operation.part, operation.piece}];
  const int64_t place = -int64_t{operation.priority};
  line.place = line.waiting > 0 ? std::max(line.place, place) : place;
  line.last_number = std::max(line.last_number, operation.number);
  ++line.waiting;
  flight->place_in_line = line.place;
  flight->order = ++orders_;
  waiting_[{flight->place_in_line, flight->order}] = flight;
}

void RemoteServer::feed() {
  while (is_open_ && !waiting_.empty() && window_bytes_ < kWindowBytes && unanswered_ < kMostRequests &&
         connection_->queued_bytes() < kQueuedBytes)
    send_leg(waiting_.begin()->second);
}

void RemoteServer::send_leg(const RemoteFlightPtr& flight) {
  const uint32_t id = next_id_++;
  Request& request = requests_[id];
  request.flight = flight;
  request.leg = flight->operation.leg(flight->sent++);
  request.order = ++orders_;
  const RemoteOperation& operation = flight->operation;
  const auto shifts = shifts_.find({operation.store, operation.part});
  if (shifts != shifts_.end() && request.leg.chunk < shifts->second.size())
    request.shift = shifts->second[request.leg.chunk];
  ++unanswered_;
  if (flight->is_whole()) flight->requests.push_back(id);
  transmit(id, request);
  if (!flight->is_all_sent()) return;
  --lines_[{operation.store, operation.part, operation.piece}].waiting;
  waiting_.erase({flight->place_in_line, flight->order});
}

Head RemoteServer::head_of(const Request& request) const {
  const RemoteOperation& operation = request.flight->operation;
  Head head = request.flight->head(request.leg);
  // A push that the server has is not sent again: only its answer is missing.
  if (request.is_held && operation.said == Said::push_pull) head.said = Said::pull;
  if (operation.said <= Said::push_pull) head.number = std::max<int64_t>(0, head.number + request.shift);
  if (is_change(operation.said) || request.flight->is_whole()) head.push = operation.push;
  return head;
}

void RemoteServer::transmit(uint32_t id, Request& request) {
  const RemoteOperation& operation = request.flight->operation;
  Head head = head_of(request);
  const bool has_values = operation.values && head.said != Said::pull;
  const ElementRanges* ranges = request.leg.ranges;
  const size_t begin = has_values ? operation.bytes_up_to(request.leg.begin) : 0;
  const size_t value_bytes = has_values ? operation.bytes_up_to(request.leg.begin + request.leg.count) - begin : 0;
  if (request.window_bytes == 0 && !request.is_held && !request.is_staged) {
    request.window_bytes = value_bytes;
    window_bytes_ += value_bytes;
  }
  const char* const values = has_values ? operation.values + begin : nullptr;
  if (!ranges) {
    head.body_bytes = static_cast<uint32_t>(value_bytes);
    return connection_->send(id, head, values, request.flight);
  }
  const char* const first = reinterpret_cast<const char*>(ranges->data());
  Bytes body(first, first + ranges->size() * sizeof(ElementRange));
  if (has_values) body.insert(body.end(), values, values + value_bytes);
  connection_->send(id, head, std::move(body));
}

// ------------------------------------------------------------------------------------------------------------ answers

size_t RemoteServer::expected_bytes(const Request& request) const {
  const RemoteOperation& operation = request.flight->operation;
  return operation.out ? request.leg.count * size_of(operation.wanted) : 0;
}

char* RemoteServer::place(uint32_t id, const Head& head) {
  const auto found = requests_.find(id);
  if (found != requests_.end() && found->second.is_answered) return nullptr;
  const bool is_value = found != requests_.end() && head.said == Said::done;
  if (is_value) {
    const RemoteOperation& operation = found->second.flight->operation;
    if (head.body_bytes != expected_bytes(found->second)) return nullptr;
    return operation.out + found->second.leg.begin * size_of(operation.wanted);
  }
  if (id != question_id_ && found == requests_.end()) return nullptr;
  answer_body_.resize(head.body_bytes);
  return answer_body_.data();
}

void RemoteServer::take(uint32_t id, const Head& head) {
  if (head.said < Said::held) throw failure("a server has sent what no server sends");
  heard_at_ = now_s();
  silences_ = 0;
  if (id == question_id_) {
    if (head.body_bytes == 0) answer_body_ = Bytes();
    return answer_question(head);
  }
  if (requests_.count(id)) answer(id, head);
}

void RemoteServer::answer(uint32_t id, const Head& head) {
  Request& request = requests_.at(id);
  if (request.is_answered) return;
  const RemoteFlightPtr flight = request.flight;
  if (head.said == Said::early) return count_again(id, head.number);
  window_bytes_ -= std::exchange(request.window_bytes, 0);
  if (!request.is_held && !request.is_staged) --unanswered_;
  request.is_staged = head.said == Said::staged && !request.is_held;
  if (head.said == Said::staged) return;
  request.is_held = true;
  if (head.said == Said::held) return;
  if (head.said == Said::refused && !flight->error)
    flight->error = Error(static_cast<ErrorKind>(head.number), std::string(answer_body_.begin(), answer_body_.end()));
  else if (head.said != Said::refused && head.body_bytes != expected_bytes(request))
    throw failure("a server's answer has another size than what was asked for");
  if (flight->is_whole())
    request.is_answered = true;
  else
    requests_.erase(id);
  flight->answer(head.number);
  if (flight->error && flight->is_whole()) end_refused(*flight);
  if (flight->error) leave_line(*flight);
  if (!flight->is_over()) return;
  for (const uint32_t number : flight->requests) requests_.erase(number);
  if (!flight->error) flight->end();  // else with its last message
}

// Several of its legs may be refused, but it leaves its line once.
void RemoteServer::leave_line(const RemoteFlight& flight) {
  if (waiting_.erase({flight.place_in_line, flight.order}) == 0) return;
  const RemoteOperation& operation = flight.operation;
  --lines_[{operation.store, operation.part, operation.piece}].waiting;
}

// The server has refused all of it.
void RemoteServer::end_refused(RemoteFlight& flight) {
  for (const uint32_t id : flight.requests) {
    Request& request = requests_.at(id);
    window_bytes_ -= std::exchange(request.window_bytes, 0);
    if (!request.is_held && !request.is_staged && !request.is_answered) --unanswered_;
    request.is_answered = true;
  }
  flight.answered = flight.sent;
}

// The server takes the pushes of a chunk in order. If the one that it misses has no answer yet, another connection is
// to come, over which all are sent again. Else it was refused, or never left because another chunk of its key was
// refused: it has failed here, and those after it take its number. No copy of it can still be on its way, because the
// server answers what it is sent in order.
void RemoteServer::count_again(uint32_t id, int64_t counted) {
  Request& early = requests_.at(id);
  if (std::exchange(early.is_staged, false)) ++unanswered_;
  const RemoteOperation& operation = early.flight->operation;
  const auto is_of_chunk = [&](const Request& other) {
    const RemoteOperation& its = other.flight->operation;
    return its.said <= Said::push_pull && its.store == operation.store && its.part == operation.part &&
           other.leg.chunk == early.leg.chunk;
  };
  std::vector<std::pair<uint64_t, uint32_t>> from_here;
  for (const auto& [number, other] : requests_) {
    if (!is_of_chunk(other) || other.is_answered) continue;
    if (other.order >= early.order)
      from_here.emplace_back(other.order, number);
    else if (other.flight->operation.said != Said::pull && !other.is_held)
      return;
  }
  auto& shifts = shifts_[{operation.store, operation.part}];
  if (shifts.size() < operation.layout->chunks().size()) shifts.resize(operation.layout->chunks().size());
  const int64_t next = operation.said == Said::pull ? counted : counted + 1;
  const int64_t shift = shifts[early.leg.chunk] = next - operation.number;
  if (shift == early.shift) return;
  std::sort(from_here.begin(), from_here.end());
  for (const auto& [order, number] : from_here) {
    requests_.at(number).shift = shift;
    transmit(number, requests_.at(number));
  }
}

void RemoteServer::fail_all(const Error& error) {
  end_connection();
  std::map<uint64_t, RemoteFlightPtr> flights;
  for (const auto& [id, request] : requests_) flights.emplace(request.flight->order, request.flight);
  for (const auto& [place, flight] : waiting_) flights.emplace(flight->order, flight);
  requests_.clear();
  waiting_.clear();
  lines_.clear();
  window_bytes_ = unanswered_ = 0;
  for (const auto& [order, flight] : flights) {
    flight->error = error;
    flight->requests.clear();
    flight->end();
  }
  for (const RemoteQuestion& question : std::exchange(questions_, {})) question.reply->fail(error);
  if (!words_) hello_->fail(error);
}

// -------------------------------------------------------------------------------------------------------- what is due

void RemoteServer::look(double now) {
  if (lost_) return;
  if (successor_missing_ && now - down_since_ > options_.return_s) return give_up(*successor_missing_);
  if (!connection_ && !successor_missing_ && !dialler_.is_under_way() && now >= dial_at_) dial(now);
  if (!connection_ && now - down_since_ > std::max(options_.return_s, options_.timeout_s))
    return give_up("it does not answer");
  if (connection_ && now - looked_at_ > kLongestPause_s) {
    looked_at_ = now;
    note_what_moves(now);
    look_for_silence(now);
  }
  feed();
  if (connection_) connection_->flush();
}

double RemoteServer::pause_s() const {
  if (lost_) return kLongestPause_s * 10;
  if (!connection_) return 0.01;
  const bool waits = question_id_ != 0 || !requests_.empty();
  return waits ? kLongestPause_s : kLongestPause_s * 10;
}

// Keys of atomic stores are long messages. A server is not silent while it takes or sends one. Sending counts only
// while more waits: a stopped process takes as much as the buffers of the kernel, and no more.
void RemoteServer::note_what_moves(double now) {
  constexpr size_t kLong = 1 << 20;
  const uint64_t sent = connection_->sent_bytes(), received = connection_->received_bytes();
  const bool has_sent = std::exchange(sent_bytes_, sent) < sent && connection_->queued_bytes() >= kLong;
  const bool has_received = std::exchange(received_bytes_, received) < received;
  if (has_sent || has_received) heard_at_ = now;
}

// Asks a server that owes an answer for a sign of life: one that keeps a push for its round says nothing. A worker that
// was itself stopped has heard nothing either, so it is the number of questions that counts.
void RemoteServer::look_for_silence(double now) {
  if (question_id_ == 0 && requests_.empty()) {
    heard_at_ = now;
    silences_ = 0;
    return;
  }
  const double pause_s = std::min(kProbe_s, options_.timeout_s / kMostSilences);
  if (now - std::max(heard_at_, probed_at_) <= pause_s) return;
  if (++silences_ > kMostSilences)
    return give_up("it has not answered for " + std::to_string(static_cast<int>(now - heard_at_)) + " s");
  probed_at_ = now;
  connection_->send(next_id_++, Head::of(Said::hello, options_.term));
}

}  // namespace ringtrain
