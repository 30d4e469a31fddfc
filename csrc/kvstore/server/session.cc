#include "kvstore/server/session.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "kvstore/server/server.h"
#include "record/timeline.h"

namespace ringtrain {

// The Part says that somebody waits before the last look: who changes something looks after it has changed it.
void WaitingRoom::enter(const Name& name, Part& part, size_t chunk, int64_t number, Attempt attempt) {
  part.header().has_parked.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  names_.insert(name);
  tables_[{&part, chunk}].push_back({name, number, std::move(attempt)});
  try_chunk(part, chunk);
}

void WaitingRoom::note_left(Part& part, const Name& name) {
  part.header().has_parked.fetch_sub(1, std::memory_order_relaxed);
  names_.erase(name);
}

void WaitingRoom::leave(uint64_t session) {
  for (auto table = tables_.begin(); table != tables_.end();) {
    auto& guests = table->second;
    const auto gone = std::stable_partition(guests.begin(), guests.end(),
                                            [&](const Guest& guest) { return guest.name.session != session; });
    std::for_each(gone, guests.end(), [&](const Guest& guest) { note_left(*table->first.first, guest.name); });
    guests.erase(gone, guests.end());
    table = guests.empty() ? tables_.erase(table) : std::next(table);
  }
}

void WaitingRoom::try_table(Tables::value_type& table) {
  auto& guests = table.second;
  const auto done =
      std::stable_partition(guests.begin(), guests.end(), [](const Guest& one) { return !one.attempt(); });
  std::for_each(done, guests.end(), [&](const Guest& guest) { note_left(*table.first.first, guest.name); });
  guests.erase(done, guests.end());
}

void WaitingRoom::try_chunk(Part& part, size_t chunk) {
  const auto table = tables_.find({&part, chunk});
  if (table == tables_.end()) return;
  try_table(*table);
  if (table->second.empty()) tables_.erase(table);
}

void WaitingRoom::try_all() {
  for (auto table = tables_.begin(); table != tables_.end();) {
    try_table(*table);
    table = table->second.empty() ? tables_.erase(table) : std::next(table);
  }
}

namespace {

// The values of a chunk, and before them ranges of its elements.
constexpr size_t longest_request(size_t chunk_bytes) {
  return 2 * chunk_bytes + chunk_bytes / sizeof(float) * sizeof(ElementRange);
}
// So much waits in a connection to be sent; answers to more requests are made when it has left.
constexpr size_t kFull = 1 << 20;
constexpr size_t kAlignment = 64;

std::shared_ptr<char> aligned_memory(size_t bytes) {
  char* const memory = static_cast<char*>(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) & ~(kAlignment - 1)));
  if (!memory) throw failure("no memory for a message of a worker");
  return {memory, &std::free};
}

// For the values of a chunk of `part`. The last one that was used is the next one, while it is in the cache. Of one
// thread.
std::shared_ptr<char> answer_buffer(const Part& part) {
  constexpr size_t kMostKept = 32;
  if (part.layout().chunk_bytes() > Layout::kChunkBytes) return aligned_memory(part.layout().chunk_bytes());
  struct Pool {
    std::vector<std::shared_ptr<char>> free;
  };
  thread_local const auto pool = std::make_shared<Pool>();
  std::shared_ptr<char> memory;
  if (pool->free.empty()) {
    memory = aligned_memory(Layout::kChunkBytes);
  } else {
    memory = std::move(pool->free.back());
    pool->free.pop_back();
  }
  return {memory.get(), [memory, home = std::weak_ptr<Pool>(pool)](char*) {
            const auto there = home.lock();
            if (there && there->free.size() < kMostKept) there->free.push_back(memory);
          }};
}

void require(bool fits, const char* what) {
  if (!fits) throw failure(std::string("a worker's message does not fit: ") + what);
}

size_t ranges_bytes(const Head& head) { return head.ranges == Head::kAll ? 0 : head.ranges * sizeof(ElementRange); }

Source source_of(const Head& head, const char* body, const ElementRanges* ranges) {
  return {body + ranges_bytes(head), head.dtype, {static_cast<Quantizer::Kind>(head.codes), head.threshold}, ranges};
}

// Reads the beginning of the body. Throws where it is not about elements of the chunk.
std::shared_ptr<const ElementRanges> ranges_of(const Head& head, const KeyChunk& chunk, const char* body) {
  if (head.ranges == Head::kAll) return nullptr;
  require(head.ranges <= chunk.count && head.body_bytes >= ranges_bytes(head), "the number of ranges");
  auto ranges = std::make_shared<ElementRanges>(head.ranges);
  if (head.ranges > 0) std::memcpy(ranges->data(), body, ranges_bytes(head));
  uint64_t end = 0;
  for (const ElementRange& range : *ranges) {
    require(range.begin >= end && uint64_t{range.begin} + range.count <= chunk.count, "the ranges");
    end = uint64_t{range.begin} + range.count;
  }
  return ranges;
}

size_t source_bytes(const Head& head, const KeyChunk& chunk, const ElementRanges* ranges) {
  const auto kind = static_cast<Quantizer::Kind>(head.codes);
  if (ranges) return ranges_bytes(head) + count_of(*ranges) * size_of(head.dtype);
  return kind == Quantizer::Kind::none ? chunk.count * size_of(head.dtype) : quantized_bytes(kind, chunk.count);
}

// Whether a head may say this about a chunk.
void require_fitting(const Head& head, const KeyChunk& chunk, const ElementRanges* ranges) {
  const bool pushes = head.said == Said::push || head.said == Said::push_pull;
  const auto fits = [&](DType dtype) { return dtype == chunk.dtype || (is_float(dtype) && size_of(dtype) <= 4); };
  require(head.number >= 0, "a negative number");
  require(!is_change(head.said) || (head.push > 0 && head.push < kChangesOfProcess), "the number of a change");
  require(!ranges || head.said == Said::pull || (head.said == Said::push && head.codes == 0), "ranges");
  require(fits(head.wanted), "the dtype of the answer");
  require(head.codes <= static_cast<uint32_t>(Quantizer::Kind::one_bit), "the kind of codes");
  if (pushes) {
    require(head.number > 0, "pushes count from 1");
    require(head.codes != 0 || fits(head.dtype), "the dtype of the values");
    require(head.codes == 0 || head.threshold >= 0, "the threshold of codes");
    require(head.body_bytes == source_bytes(head, chunk, ranges), "the number of bytes");
  } else if (head.said == Said::assign) {
    require(head.dtype == chunk.dtype && head.body_bytes == chunk.value_bytes(), "the number of bytes");
  } else if (head.said != Said::write_state) {
    require(head.body_bytes == (ranges ? ranges_bytes(head) : 0), "the number of bytes");
  }
}

// Whether the array `number` of a Part has values.
void require_array(const Head& head, Part& part) {
  const auto rule = part.rule(part.header().rule.load());
  const size_t arrays = rule ? 2 + rule->state_names().size() : 1;
  const bool is_master = head.number == 1;
  const KeyChunk& chunk = part.chunk(head.chunk);
  const bool is_there = static_cast<size_t>(head.number) < arrays && (!is_master || is_half(chunk.dtype));
  if (!is_there) throw invalid("the optimizer of this key does not remember this");
  const size_t bytes = head.number == 0 ? chunk.value_bytes() : chunk.wide_bytes();
  require(head.said == Said::read_state || head.body_bytes == bytes, "the number of bytes");
}

}  // namespace

Session::Session(ServerThread& home, int worker, uint64_t number, ByteStream bytes)
    : home_(home),
      worker_(worker),
      number_(number),
      receiving_(home.shared().traffic.name + ", from worker " + std::to_string(worker)) {
  Connection::Owner& owner = *this;
  connection_ = std::make_unique<Connection>(home.poller(), owner, home.shared().traffic, std::move(bytes));
}

Session::~Session() {
  home_.waiting_room().leave(number_);
  leave_pushes();
}

// ----------------------------------------------------------------------------------------------------------- messages

char* Session::place(uint32_t, const Head& head) {
  if (is_of_store(head.said)) {
    question_.resize(head.body_bytes);
    return question_.data();
  }
  if (!can_be_of_chunk(head)) return nullptr;
  body_begins_s_ = begin_of_stretch();
  if (body_room_ < head.body_bytes || body_.use_count() > 1) {
    body_room_ = head.body_bytes;
    body_ = aligned_memory(body_room_);
  }
  return body_.get();
}

void Session::take(uint32_t id, const Head& head) {
  if (head.said == Said::waiting)
    let_pass(head.store);
  else if (is_of_store(head.said))
    answer_question(id, head);
  else if (can_be_of_chunk(head))
    take_request(id, head);
  else
    throw failure("a worker has sent what no worker sends");
}

// Only chunks of atomic stores are larger than others.
bool Session::can_be_of_chunk(const Head& head) const {
  if (!is_of_chunk(head.said)) return false;
  if (head.body_bytes <= longest_request(Layout::kChunkBytes)) return true;
  const auto part = home_.shared().stores.part(head.store, head.part);
  return part && head.body_bytes <= longest_request(part->layout().chunk_bytes());
}

void Session::has_ended(int) { home_.has_ended(*this); }

void Session::say(uint32_t id, Said said, int64_t number) { connection_->send(id, Head::of(said, number)); }

void Session::refuse(uint32_t id, const Error& error) {
  const std::string text = shortened(error.what());
  connection_->send(id, Head::of(Said::refused, static_cast<int64_t>(error.kind())), Bytes(text.begin(), text.end()));
}

void Session::note(const char* what, const Request& request, double begin_s, const std::string& track) const {
  const Part& part = request.actor->part();
  const auto text = [&] {
    const uint32_t key = part.layout().spec().pieces[part.chunk(request.head.chunk).piece].key;
    return what + (" key " + std::to_string(key));
  };
  note_stretch(begin_s, track, text);
}

bool Session::is_full() const { return connection_->queued_bytes() > kFull; }

// ---------------------------------------------------------------------------------------------------------- questions

// Throws peer_lost where a later process has the place of this worker, or this one was expelled.
Bytes Session::greet(const Head& hello) {
  require(hello.number >= 0 && hello.number < kTerms, "the term");
  term_ = static_cast<uint32_t>(hello.number);
  if (!home_.shared().stores.admit(worker_, term_)) throw expelled(static_cast<uint32_t>(worker_));
  return bytes_of(home_.shared().words);
}

// Requests that are not in the waiting room wait for no worker.
Bytes Session::awaited(const Bytes& question) {
  const std::vector<uint32_t> asked = words_of<NumberWords>(question);
  const std::unordered_set<uint32_t> ids(asked.begin(), asked.end());
  std::set<uint32_t> workers;
  home_.waiting_room().visit(number_, [&](uint32_t id, const Part& part, size_t chunk, int64_t number) {
    if (ids.count(id) == 0) return;
    const auto of_part = [&](const auto& one) { return &one.second->part() == &part; };
    const Actor& actor = *std::find_if(actors_.begin(), actors_.end(), of_part)->second;
    for (const size_t worker : actor.awaited(chunk, static_cast<uint64_t>(number)))
      workers.insert(static_cast<uint32_t>(worker));
  });
  return bytes_of(NumberWords(workers.begin(), workers.end()));
}

void Session::answer_question(uint32_t id, const Head& head) {
  Bytes body;
  const Bytes question = head.body_bytes > 0 ? std::move(question_) : Bytes();
  question_ = Bytes();
  const auto error = error_of([&] {
    body = head.said == Said::hello     ? greet(head)
           : head.said == Said::awaited ? awaited(question)
                                        : home_.shared().stores.answer(worker_, head, question);
  });
  if (error) return refuse(id, *error);
  connection_->send(id, Head::of(Said::done), std::move(body));
  const bool changes_nothing = head.said == Said::hello || head.said == Said::create || head.said == Said::awaited;
  if (!changes_nothing) home_.has_changed();
}

void Session::let_pass(uint32_t store) {
  if (home_.shared().stores.let_pass(worker_, store)) home_.has_changed();
}

// ----------------------------------------------------------------------------------------------------------- requests

Actor& Session::actor_of(const Head& head) {
  auto& actor = actors_[{head.store, head.part}];
  if (!actor) {
    auto part = home_.shared().stores.part(head.store, head.part);
    if (!part) throw lacking("keys", home_.shared().stores.is_recovery());
    if (static_cast<size_t>(worker_) >= part->layout().capacity()) throw failure("the store is for fewer workers");
    actor = std::make_unique<Actor>(std::move(part), static_cast<uint32_t>(worker_), home_.shared().timeout_s, term_);
  }
  return *actor;
}

// One that has come before is still waited for: its worker has not heard so, or counts it with another number now.
void Session::take_request(uint32_t id, const Head& head) {
  if (deferred_.count(id)) renumber(id, head.number);
  if (deferred_.count(id) || home_.waiting_room().has({number_, id})) return say(id, Said::held);
  const auto error = error_of([&] {
    Actor& actor = actor_of(head);
    require(head.chunk < actor.part().chunk_count(), "there is no such chunk");
    const KeyChunk& chunk = actor.part().chunk(head.chunk);
    const Request request{id, head, body_, ranges_of(head, chunk, body_.get()), &actor};
    require_fitting(head, chunk, request.ranges.get());
    if (head.body_bytes > 0) note("receive", request, body_begins_s_, receiving_);
    const bool pushes = head.said == Said::push || head.said == Said::push_pull;
    if (pushes && actor.part().layout().is_pushed_as_a_whole(chunk.piece))
      take_chunk_of_push(request);
    else
      carry_out_in_order(request);
  });
  if (!error) return;
  refuse(id, *error);
  refuse_rest_of_push(head, *error);
}

void Session::carry_out_in_order(const Request& request) {
  const auto is_same = [&](const Request& other) {
    return other.actor == request.actor && other.head.chunk == request.head.chunk;
  };
  const bool has_to_wait = is_behind_push(request) || std::any_of(busy_.begin(), busy_.end(), is_same);
  if (has_to_wait || carry_out(request) == Result::busy) defer(request, busy_);
}

void Session::defer(const Request& request, std::deque<Request>& queue) {
  deferred_.insert(request.id);
  queue.push_back(request);
}

// Its worker has sent it again behind those that come before it now.
void Session::renumber(uint32_t id, int64_t number) {
  for (std::deque<Request>* const queue : {&busy_, &unsent_}) {
    const auto found =
        std::find_if(queue->begin(), queue->end(), [id](const Request& request) { return request.id == id; });
    if (found == queue->end()) continue;
    found->head.number = number;
    std::rotate(found, std::next(found), queue->end());
  }
}

// The requests of a chunk stay in order, because its pushes are counted one by one.
bool Session::try_again() {
  for (const PieceName& piece : std::set<PieceName>(begun_)) apply_pushes(piece);
  std::set<std::pair<const Actor*, uint32_t>> still_busy;  // chunks
  for (size_t left = busy_.size(); left > 0; --left) {
    const Request request = std::move(busy_.front());
    busy_.pop_front();
    deferred_.erase(request.id);
    const std::pair<const Actor*, uint32_t> chunk(request.actor, request.head.chunk);
    Result result = Result::over;
    const bool has_to_wait = still_busy.count(chunk) != 0 || is_behind_push(request);
    const auto error = error_of([&] { result = has_to_wait ? Result::busy : carry_out(request); });
    if (error) refuse(request.id, *error);
    if (result != Result::busy) continue;
    still_busy.insert(chunk);
    defer(request, busy_);
  }
  return !busy_.empty() || !begun_.empty();
}

void Session::has_room() {
  while (!unsent_.empty() && !is_full()) {
    const Request request = std::move(unsent_.front());
    unsent_.pop_front();
    deferred_.erase(request.id);
    const auto error = error_of([&] {
      if (pull(request) == Result::busy) defer(request, busy_);
    });
    if (error) refuse(request.id, *error);
  }
}

// ----------------------------------------------------------------------------------------- pushes of several chunks

Session::PieceName Session::piece_of(const Request& request) {
  return {request.actor, request.actor->part().chunk(request.head.chunk).piece};
}

// Whether a push that has come before is to change the same chunk.
bool Session::is_behind_push(const Request& request) const {
  const auto piece = pushes_.find(piece_of(request));
  if (piece == pushes_.end()) return false;
  const size_t place = request.head.chunk - request.actor->part().layout().first_chunk(piece->first.second);
  return std::any_of(piece->second.open.begin(), piece->second.open.end(),
                     [&](const auto& push) { return push.second.chunks[place].has_value(); });
}

// A chunk of a push that is over comes again where its worker has not got the answer.
void Session::take_chunk_of_push(const Request& request) {
  const Head& head = request.head;
  const PieceName name = piece_of(request);
  const Layout& layout = request.actor->part().layout();
  WholePushes& pushes = pushes_[name];
  const auto known = pushes.open.find(head.push);
  const bool is_over = known == pushes.open.end() ? head.push <= pushes.over : known->second.has_begun;
  const size_t place = head.chunk - layout.first_chunk(name.second);
  if (known != pushes.open.end() && known->second.chunks[place]) {
    WholePush& push = known->second;
    say(request.id, Said::staged);
    // The worker may count it with another number now.
    if (!push.has_begun) push.chunks[place]->head.number = head.number;
    return;
  }
  if (is_over) {
    const auto refused = pushes.refused.find(head.push);
    if (refused != pushes.refused.end()) throw Error(refused->second);
    require(head.number <= counted(*request.actor, head.chunk), "it is of a push that was refused");
    return carry_out_in_order(request);
  }
  WholePush& push = pushes.open[head.push];
  push.chunks.resize(layout.first_chunk(name.second + 1) - layout.first_chunk(name.second));
  push.chunks[place] = request;
  ++push.count;
  note_staged(request);
  apply_pushes(name);
}

// A worker sends a limited number of bytes of which it does not know that they have come.
void Session::note_staged(const Request& request) {
  constexpr size_t kMostBytes = 1 << 20, kMost = 512;
  not_said_[request.id] = request.head.body_bytes;
  not_said_bytes_ += request.head.body_bytes;
  if (not_said_bytes_ < kMostBytes && not_said_.size() < kMost) return;
  for (const auto& [id, bytes] : not_said_) say(id, Said::staged);
  not_said_.clear();
  not_said_bytes_ = 0;
}

// To be called again for what is in begun_ then.
void Session::apply_pushes(const PieceName& piece) {
  WholePushes& pushes = pushes_[piece];
  begun_.erase(piece);
  while (!pushes.open.empty()) {
    const auto first = pushes.open.begin();
    WholePush& push = first->second;
    const auto refused = error_of([&] { push.has_begun = push.has_begun || begin(push, *piece.first); });
    if (refused) refuse_all(push, *refused);
    if (!refused && !push.has_begun) return;
    if (push.has_begun && !apply(push)) return void(begun_.insert(piece));
    pushes.over = std::max(pushes.over, first->first);
    pushes.open.erase(first);
  }
}

// Returns whether all chunks have come and are the next ones that count. Throws what refuses the push.
bool Session::begin(WholePush& push, Actor& actor) {
  if (push.count < push.chunks.size()) return false;
  for (auto& chunk : push.chunks) {
    const int64_t counted = this->counted(actor, chunk->head.chunk);
    if (chunk->head.number > counted + 1) say(take_out(chunk, push)->id, Said::early, counted);
  }
  if (push.count < push.chunks.size()) return false;
  actor.require_term();
  for (auto& chunk : push.chunks) chunk->has_begun = true;
  return true;
}

// An error before any chunk is applied refuses all of them.
bool Session::apply(WholePush& push) {
  for (auto& chunk : push.chunks) {
    if (!chunk) continue;
    Result result = Result::over;
    const auto error = error_of([&] { result = carry_out(*chunk); });
    if (error && push.count == push.chunks.size()) {
      refuse_all(push, *error);
      return true;
    }
    if (error) refuse(chunk->id, *error);
    if (result == Result::over) take_out(chunk, push);
  }
  return push.count == 0;
}

std::optional<Session::Request> Session::take_out(std::optional<Request>& chunk, WholePush& push) {
  const auto not_said = not_said_.find(chunk->id);
  if (not_said != not_said_.end()) {
    not_said_bytes_ -= not_said->second;
    not_said_.erase(not_said);
  }
  --push.count;
  return std::exchange(chunk, std::nullopt);
}

void Session::refuse_all(WholePush& push, const Error& error) {
  constexpr size_t kMostKept = 64;
  for (auto& chunk : push.chunks) {
    if (!chunk) continue;
    auto& refused = pushes_[piece_of(*chunk)].refused;
    refused.emplace(chunk->head.push, error);
    if (refused.size() > kMostKept) refused.erase(refused.begin());
    refuse(take_out(chunk, push)->id, error);
  }
}

// Of a push of which a chunk was refused as it came: its worker does not send the others any more.
void Session::refuse_rest_of_push(const Head& head, const Error& error) {
  const auto actor = actors_.find({head.store, head.part});
  const bool is_known = actor != actors_.end() && actor->second;
  if (head.push == 0 || !is_known || head.chunk >= actor->second->part().chunk_count()) return;
  const PieceName piece(actor->second.get(), actor->second->part().chunk(head.chunk).piece);
  const auto pushes = pushes_.find(piece);
  if (pushes == pushes_.end()) return;
  const auto push = pushes->second.open.find(head.push);
  if (push == pushes->second.open.end() || push->second.has_begun) return;
  refuse_all(push->second, error);
  pushes->second.open.erase(push);
  pushes->second.over = std::max(pushes->second.over, head.push);
}

// The worker may be dead.
void Session::leave_pushes() {
  std::vector<LateChunk> late;
  for (const PieceName& piece : begun_)
    for (const auto& chunk : pushes_[piece].open.begin()->second.chunks) {
      if (!chunk) continue;
      const Head& head = chunk->head;
      late.push_back({worker_,
                      head.store,
                      head.part,
                      head.chunk,
                      static_cast<uint64_t>(head.number),
                      chunk->body,
                      chunk->ranges,
                      source_of(head, chunk->body.get(), chunk->ranges.get()),
                      {head.lr, head.wd}});
    }
  if (!late.empty()) home_.shared().stores.finish(std::move(late));
}

// -------------------------------------------------------------------------------------------------- requests of chunks

Session::Result Session::carry_out(const Request& request) {
  switch (request.head.said) {
    case Said::push:
    case Said::push_pull:
      return push(request);
    case Said::pull:
      return pull(request);
    case Said::read_state:
      return read_state(request);
    case Said::read_updates:
      say(request.id, Said::done, static_cast<int64_t>(request.actor->num_update(request.head.chunk)));
      return Result::over;
    case Said::poke:
      home_.has_changed(request.actor->part(), request.head.chunk);
      return Result::over;
    default:
      return change(request);
  }
}

Session::Result Session::push(const Request& request) {
  const Head& head = request.head;
  const bool pulls = head.said == Said::push_pull;
  std::shared_ptr<char> buffer;
  if (pulls && !is_full()) buffer = answer_buffer(request.actor->part());
  Answer answer{buffer.get(), head.wanted};
  const double begin_s = begin_of_stretch();
  const Outcome outcome = request.actor->push(head.chunk, static_cast<uint64_t>(head.number),
                                              source_of(head, request.body.get(), request.ranges.get()),
                                              {head.lr, head.wd}, buffer ? &answer : nullptr, request.has_begun);
  if (outcome == Outcome::early) {
    say(request.id, Said::early, counted(*request.actor, head.chunk));
    return Result::over;
  }
  if (outcome == Outcome::busy || outcome == Outcome::full) return Result::busy;
  note("update", request, begin_s, home_.row());
  if (!pulls)
    say(request.id, Said::done, static_cast<int64_t>(request.actor->num_update(head.chunk)));
  else if (answer.is_there)
    send_value(request, answer, std::move(buffer));
  else
    wait_for_value(request);
  if (outcome == Outcome::applied || outcome == Outcome::left) home_.has_changed(request.actor->part(), head.chunk);
  return Result::over;
}

Reading Session::read(const Request& request, Answer& answer) {
  answer.ranges = request.ranges.get();
  const double begin_s = begin_of_stretch();
  const Reading reading = request.actor->read(request.head.chunk, static_cast<uint64_t>(request.head.number), answer);
  if (reading == Reading::done) note("answer", request, begin_s, home_.row());
  return reading;
}

Session::Result Session::pull(const Request& request) {
  if (is_full()) {
    wait_for_value(request);
    return Result::over;
  }
  auto buffer = answer_buffer(request.actor->part());
  Answer answer{buffer.get(), request.head.wanted};
  const Reading reading = read(request, answer);
  if (reading == Reading::busy) return Result::busy;
  if (reading == Reading::done)
    send_value(request, answer, std::move(buffer));
  else
    wait_for_value(request);
  return Result::over;
}

void Session::wait_for_value(const Request& request) {
  const int64_t counted = this->counted(*request.actor, request.head.chunk);
  if (request.head.number > counted) return say(request.id, Said::early, counted);
  say(request.id, Said::held);
  Request without_body = request;
  without_body.body.reset();
  if (is_full()) return defer(without_body, unsent_);
  home_.waiting_room().enter({number_, request.id}, request.actor->part(), request.head.chunk, request.head.number,
                             [this, without_body] { return has_ended_waiting(without_body); });
}

// An error is the answer, too.
bool Session::has_ended_waiting(const Request& request) {
  bool is_answered = false;
  const auto error = error_of([&] { is_answered = try_to_answer(request); });
  if (error) refuse(request.id, *error);
  return error || is_answered;
}

bool Session::try_to_answer(const Request& request) {
  if (is_full()) {
    defer(request, unsent_);
    return true;
  }
  auto buffer = answer_buffer(request.actor->part());
  Answer answer{buffer.get(), request.head.wanted};
  if (read(request, answer) != Reading::done) return false;
  send_value(request, answer, std::move(buffer));
  return true;
}

void Session::send_value(const Request& request, const Answer& answer, std::shared_ptr<char> buffer) {
  Head head = Head::of(Said::done, static_cast<int64_t>(answer.num_update));
  const KeyChunk& chunk = request.actor->part().chunk(request.head.chunk);
  const size_t count = request.ranges ? count_of(*request.ranges) : chunk.count;
  head.body_bytes = static_cast<uint32_t>(count * size_of(answer.dtype));
  connection_->send(request.id, head, buffer.get(), buffer);
}

Session::Result Session::change(const Request& request) {
  const Head& head = request.head;
  Actor& actor = *request.actor;
  bool is_done;
  if (head.said == Said::assign) {
    is_done = actor.assign(head.chunk, request.body.get(), head.push);
  } else if (head.said == Said::write_updates) {
    is_done = actor.set_num_update(head.chunk, static_cast<uint64_t>(head.number), head.push);
  } else {
    require_array(head, actor.part());
    is_done = actor.write_array(head.chunk, static_cast<size_t>(head.number), request.body.get(), head.push);
  }
  if (!is_done) return Result::busy;
  say(request.id, Said::done);
  return Result::over;
}

Session::Result Session::read_state(const Request& request) {
  const Head& head = request.head;
  require_array(head, request.actor->part());
  const KeyChunk& chunk = request.actor->part().chunk(head.chunk);
  auto buffer = answer_buffer(request.actor->part());
  if (!request.actor->read_array(head.chunk, static_cast<size_t>(head.number), buffer.get())) return Result::busy;
  Head answer = Head::of(Said::done);
  answer.body_bytes = static_cast<uint32_t>(head.number == 0 ? chunk.value_bytes() : chunk.wide_bytes());
  connection_->send(request.id, answer, buffer.get(), buffer);
  return Result::over;
}

}  // namespace ringtrain
