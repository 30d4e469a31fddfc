#include "kvstore/worker/client.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <set>

#include "base/clock.h"
#include "base/error.h"
#include "kvstore/store/layout.h"
#include "kvstore/store/part.h"
#include "record/timeline.h"

namespace ringtrain {
namespace {

constexpr double kBetweenLooks_s = 0.2;
// A worker that has waited so long tells the servers, and again after as long.
constexpr double kLongWait_s = 1;

bool can_be_of(DType given, DType kept) {
  return given == kept || (is_half(given) && kept == DType::float32) || (given == DType::float32 && is_half(kept));
}

void raise(std::atomic<int64_t>& number, int64_t to) {
  int64_t before = number.load();
  while (before < to && !number.compare_exchange_weak(before, to)) {
  }
}

// From one element of the key on.
char* from(const HostArray& array, uint64_t element) {
  return static_cast<char*>(array.address) + element * size_of(array.dtype);
}

const char* from(const Pushed& pushed, uint64_t element) {
  if (pushed.quantizer.kind == Quantizer::Kind::none) return from(pushed.values, element);
  return static_cast<const char*>(pushed.values.address) + quantized_bytes(pushed.quantizer.kind, element);
}

void require_one_of_each(size_t ids, size_t others) {
  if (ids != others) throw invalid(std::to_string(ids) + " keys, but " + std::to_string(others) + " arrays");
}

RemoteOptions with_listener(RemoteOptions options, std::function<void(int, const Error&)> has_lost) {
  options.has_lost = std::move(has_lost);
  return options;
}

void require_rows(const StoreClient::Rows& rows, const ClientKey& key) {
  const std::string name = "key \"" + *key.name + "\"";
  if (rows.elements == 0 || key.count % rows.elements != 0)
    throw invalid(name + " has no rows of " + std::to_string(rows.elements) + " elements");
  const auto count = static_cast<int64_t>(key.count / rows.elements);
  for (size_t i = 0; i < rows.numbers.size(); ++i) {
    const int64_t row = rows.numbers[i];
    if (row < 0 || row >= count)
      throw invalid(name + " has " + std::to_string(count) + " rows, but row " + std::to_string(row) + " is asked for");
    if (i > 0 && row <= rows.numbers[i - 1]) throw invalid("rows of " + name + " must be in order, each once");
  }
}

DType dtype_of_array(const ClientKey& key, size_t array) { return array == 0 ? key.dtype : wide(key.dtype); }

void require_like(const ClientKey& key, const HostArray& array, DType dtype) {
  if (array.count != key.count || array.dtype != dtype)
    throw invalid("key \"" + *key.name + "\" needs an array of " + std::to_string(key.count) + " elements of " +
                  name_of(dtype) + " here, but it is one of " + std::to_string(array.count) + " of " +
                  name_of(array.dtype));
}

}  // namespace

void require_fitting(const HostArray& array, const ClientKey& key, uint64_t count) {
  if (array.count != count)
    throw invalid("key \"" + *key.name + "\" has " + std::to_string(count) + " elements, but the array has " +
                  std::to_string(array.count));
  if (!can_be_of(array.dtype, key.dtype))
    throw invalid("key \"" + *key.name + "\" is " + name_of(key.dtype) + ", but the array is " + name_of(array.dtype));
  if (reinterpret_cast<uintptr_t>(array.address) % size_of(array.dtype) != 0)
    throw invalid("the array of key \"" + *key.name + "\" is not on a multiple of its element's bytes: copy it");
}

StoreClient::StoreClient(StoreClientOptions options, Interrupt interrupt)
    : options_(std::move(options)),
      interrupt_(interrupt),
      direct_(options_.remote.worker, options_.workers, options_.remote.timeout_s,
              [this](const DirectItem& item) {
                const RemoteOperation& operation = *item.operation;
                remote_.poke(operation.server, operation.store, operation.part, static_cast<uint32_t>(item.chunk));
              }),
      remote_(with_listener(options_.remote,
                            [this](int server, const Error& error) { direct_.lose_server(server, error, 0); })) {}

StoreClient::~StoreClient() { close(); }

void StoreClient::end(const std::string& text, ErrorKind kind) {
  const Error error(kind, text);
  {
    const Lock lock(mutex_);
    if (ended_) return;
    ended_ = error;
  }
  direct_.end(error);
  remote_.end(error);
}

void StoreClient::close() {
  {
    const Lock lock(mutex_);
    if (!ended_) ended_ = Error(ErrorKind::shut_down, "this worker has left the store");
  }
  direct_.end(Error(ErrorKind::shut_down, "the store was closed before this operation was done"));
}

// ------------------------------------------------------------------------------------------------------ what there is

void StoreClient::meet() {
  std::optional<std::vector<ServerWords>> words;
  while (!(words = remote_.meet(kBetweenLooks_s))) interrupt_();
  servers_ = *words;
}

void StoreClient::open(uint32_t store, bool is_synchronous, int64_t max_staleness, bool is_atomic) {
  const Lock lock(mutex_);
  stores_.try_emplace(store, store, is_synchronous, max_staleness, is_atomic);
}

ClientStore& StoreClient::store_of(uint32_t store) {
  if (ended_) throw Error(*ended_);
  const auto found = stores_.find(store);
  if (found == stores_.end()) throw invalid("there is no store number " + std::to_string(store));
  return found->second;
}

void StoreClient::await(RemoteReply& reply) {
  while (!reply.wait(kBetweenLooks_s)) interrupt_();
}

// Asks each server, and waits until all have answered.
template <typename Ask>
void StoreClient::await_all(Ask ask) {
  std::vector<RemoteReplyPtr> replies;
  for (int server = 0; server < static_cast<int>(servers_.size()); ++server) replies.push_back(ask(server));
  for (const RemoteReplyPtr& reply : replies) {
    await(*reply);
    reply->take();
  }
}

void StoreClient::create_keys(uint32_t store, const std::vector<StoreKey>& keys, const std::vector<HostArray>& values) {
  require_one_of_each(keys.size(), values.size());
  std::vector<Reply> replies;
  {
    const Lock lock(mutex_);
    for (int server = 0; server < static_cast<int>(servers_.size()); ++server) {
      const PartSpec spec = store_of(store).spec_of(server, keys, options_.remote.capacity);
      if (!spec.pieces.empty()) replies.emplace_back(server, remote_.create(server, store, options_.workers, spec));
    }
  }
  for (const auto& [server, reply] : replies) {
    await(*reply);
    add_part(server, store, Remote::part_of(*reply));
  }
  add_keys(store, keys);
  Ids ids;
  for (const StoreKey& key : keys) ids.push_back(key.id);
  assign(store, ids, values);
}

void StoreClient::attach_keys(uint32_t store, const std::vector<StoreKey>& keys) {
  std::vector<Reply> replies;
  {
    const Lock lock(mutex_);
    const ClientStore& own = store_of(store);
    for (int server = 0; server < static_cast<int>(servers_.size()); ++server) {
      // the parts of other keys may have brought its pieces already
      const auto is_new = [&](const StoreKey& key) { return !own.has_piece(server, key.id); };
      std::vector<StoreKey> unknown;
      std::copy_if(keys.begin(), keys.end(), std::back_inserter(unknown), is_new);
      const size_t pieces = own.spec_of(server, unknown, options_.remote.capacity).pieces.size();
      if (pieces > 0) replies.emplace_back(server, remote_.attach(server, store, own.parts_of(server), pieces));
    }
  }
  for (const auto& [server, reply] : replies) {
    await(*reply);
    for (const PartWords& words : Remote::parts_of(*reply)) add_part(server, store, words);
  }
  add_keys(store, keys);
}

// In this process, or as shared memory; null where it is neither.
std::shared_ptr<Part> StoreClient::shared_part(int server, uint32_t store, const PartWords& words) {
  const ServerWords& there = servers_[static_cast<size_t>(server)];
  const std::shared_ptr<PartTable> table = PartTable::of_server(there.identity);
  // Within a process nothing has to be shared. A forked child has the tables of its parent as they were.
  if (table && there.pid == getpid()) return table->parts(store).at(words.number);
  if (options_.node.empty() || words.bytes == 0 || there.node != options_.node) return nullptr;
  std::shared_ptr<Part> part;
  // Where this process may not look into the other one, it asks it by TCP.
  const std::optional<Error> error = error_of([&] { part = Part::attach(words.spec, there.pid, words.ticket); });
  return error ? nullptr : part;
}

void StoreClient::add_part(int server, uint32_t store, const PartWords& words) {
  const auto part = std::make_shared<ClientPart>();
  part->server = server;
  part->number = words.number;
  part->layout = std::make_shared<Layout>(words.spec);
  std::vector<uint64_t> pushes = words.pushes;
  if (const std::shared_ptr<Part> shared = shared_part(server, store, words)) {
    const auto worker = static_cast<uint32_t>(options_.remote.worker);
    part->actor = std::make_unique<Actor>(shared, worker, options_.remote.timeout_s, options_.remote.term);
    for (size_t i = 0; i < pushes.size(); ++i) pushes[i] = part->actor->pushes_of(i, worker);
  }
  const Lock lock(mutex_);
  if (words.number < store_of(store).parts_of(server)) return;
  if (part->actor && part->actor->part().memory().is_shared()) {
    Writer writer;
    words.spec.put(writer);
    shared_parts_.push_back({server, store, words.number, writer.take(), part->actor->part().memory().ticket()});
  }
  store_of(store).add_part(part, pushes);
}

std::vector<StoreClient::SharedPart> StoreClient::take_shared_parts() {
  const Lock lock(mutex_);
  return std::exchange(shared_parts_, {});
}

void StoreClient::add_keys(uint32_t store, const std::vector<StoreKey>& keys) {
  const Lock lock(mutex_);
  for (const StoreKey& key : keys)
    if (!store_of(store).has_key(key.id)) store_of(store).add_key(key);
}

void StoreClient::set_rule(uint32_t store, const RuleWords& rule, bool tells_servers) {
  std::vector<std::string> names;
  if (!rule.name.empty())
    names = UpdateRule(rule.name, rule.form, {rule.numbers.begin(), rule.numbers.end()}).state_names();
  {
    const Lock lock(mutex_);
    store_of(store).set_state_names(std::move(names));
  }
  if (tells_servers) await_all([&](int server) { return remote_.set_rule(server, store, rule); });
}

int64_t StoreClient::join(uint32_t store) {
  const int64_t number = remote_.next_join();
  await_all([&](int server) { return remote_.join(server, store, number); });
  return number;
}

void StoreClient::resume(uint32_t store, const std::map<uint32_t, int64_t>& joins) {
  EndedJoins ended;
  for (const auto& [worker, number] : joins) ended.push_back({worker, number});
  await_all([&](int server) { return remote_.resume(server, store, ended); });
}

// ----------------------------------------------------------------------------------------------------- push and pull

std::shared_ptr<StoreHandle> StoreClient::push(uint32_t store, const Ids& ids, const std::vector<Pushed>& values,
                                               int priority, bool copies) {
  require_one_of_each(ids.size(), values.size());
  std::vector<Operands> operands;
  for (const Pushed& pushed : values) operands.push_back({&pushed, nullptr, nullptr});
  return carry_out({store, priority, copies}, ids, "push", operands);
}

std::shared_ptr<StoreHandle> StoreClient::pull(uint32_t store, const Ids& ids, const std::vector<HostArray>& outs,
                                               int priority) {
  require_one_of_each(ids.size(), outs.size());
  std::vector<Operands> operands;
  for (const HostArray& out : outs) operands.push_back({nullptr, &out, nullptr});
  return carry_out({store, priority}, ids, "pull", operands);
}

std::shared_ptr<StoreHandle> StoreClient::push_pull(uint32_t store, const Ids& ids, const std::vector<Pushed>& values,
                                                    const std::vector<HostArray>& outs, int priority) {
  require_one_of_each(ids.size(), values.size());
  require_one_of_each(ids.size(), outs.size());
  std::vector<Operands> operands;
  for (size_t i = 0; i < ids.size(); ++i) operands.push_back({&values[i], &outs[i], nullptr});
  return carry_out({store, priority}, ids, "pushpull", operands);
}

std::shared_ptr<StoreHandle> StoreClient::push_rows(uint32_t store, uint32_t id, const Rows& rows, const Pushed& values,
                                                    int priority, bool copies) {
  if (values.quantizer.kind != Quantizer::Kind::none) throw invalid("rows are pushed as they are, not as codes");
  return carry_out({store, priority, copies}, {id}, "push", {{&values, nullptr, &rows}});
}

std::shared_ptr<StoreHandle> StoreClient::pull_rows(uint32_t store, uint32_t id, const Rows& rows, const HostArray& out,
                                                    int priority) {
  return carry_out({store, priority}, {id}, "pull", {{nullptr, &out, &rows}});
}

std::shared_ptr<StoreHandle> StoreClient::carry_out(Work work, const Ids& ids, const char* kind,
                                                    const std::vector<Operands>& operands) {
  {
    const Lock lock(mutex_);
    begin(work, ids, kind);
    for (size_t i = 0; i < ids.size(); ++i) add(work, store_of(work.store).key(ids[i]), operands[i]);
  }
  const std::shared_ptr<StoreHandle> handle = work.handle;
  start_all(std::move(work), operands.empty() || operands.front().pushed ? ids : Ids());
  handle->end_one(std::nullopt);
  return handle;
}

void StoreClient::begin(const Work& work, const Ids& ids, const char* kind) {
  ClientStore& own = store_of(work.store);
  require_workers(own);
  if (own.is_synchronous()) note_round(work.handle);
  if (may_have_timeline() && !ids.empty()) {
    const std::string others = ids.size() == 1 ? "" : " and " + std::to_string(ids.size() - 1) + " more";
    work.handle->show(std::string(kind) + "." + *own.key(ids[0]).name + others, kind);
  }
}

void StoreClient::add(Work& work, ClientKey& key, const Operands& operands) {
  const auto& [pushed, out, rows] = operands;
  if (rows) require_rows(*rows, key);
  const uint64_t count = rows ? rows->numbers.size() * rows->elements : key.count;
  if (pushed && pushed->quantizer.kind == Quantizer::Kind::none) require_fitting(pushed->values, key, count);
  if (out) require_fitting(*out, key, count);
  if (pushed) ++key.pushes, ++key.begun;
  for (const ClientPiece& piece : key.pieces) {
    RemoteOperation operation = operation_of(work, key, piece, operands);
    if (piece.part->actor)
      add_direct(work, key, piece, std::move(operation));
    else
      work.remote.push_back(std::move(operation));
  }
}

RemoteOperation StoreClient::operation_on(uint32_t store, const ClientPiece& piece, Said said) {
  RemoteOperation operation;
  operation.said = said;
  operation.server = piece.part->server;
  operation.store = store;
  operation.part = piece.part->number;
  operation.layout = piece.part->layout;
  operation.piece = piece.number;
  return operation;
}

// A push of rows is one of every chunk, so that all of them count it; a pull is of those in which there are rows. The
// values of rows are one behind the other.
RemoteOperation StoreClient::operation_of(const Work& work, const ClientKey& key, const ClientPiece& piece,
                                          const Operands& operands) const {
  const auto& [pushed, out, rows] = operands;
  RemoteOperation operation = operation_on(work.store, piece,
                                           !out     ? Said::push
                                           : pushed ? Said::push_pull
                                                    : Said::pull);
  const uint64_t begin = rows ? 0 : piece.begin;
  if (rows)
    operation.rows = std::make_shared<const ChunkRows>(
        rows_of_piece(*piece.part->layout, piece.number, rows->numbers, rows->elements, pushed != nullptr));
  operation.number = static_cast<int64_t>(key.pushes);
  operation.push = key.begun;
  operation.priority = work.priority;
  operation.copies = work.copies;
  operation.call = work.handle.get();
  if (pushed) {
    operation.values = from(*pushed, begin);
    operation.dtype = pushed->values.dtype;
    operation.quantizer = pushed->quantizer;
    operation.lr = pushed->rates.lr;
    operation.wd = pushed->rates.wd;
  }
  if (out) {
    operation.out = from(*out, begin);
    operation.wanted = out->dtype;
  }
  if (!piece.part->actor || options_.remote.return_s > 0)
    operation.done = [handle = work.handle, known = key.num_update](const std::optional<Error>& error,
                                                                    int64_t updates) {
      if (!error) raise(*known, updates);
      handle->end_one(error);
    };
  return operation;
}

void StoreClient::add_direct(Work& work, const ClientKey& key, const ClientPiece& piece,
                             RemoteOperation operation) const {
  const auto shared = std::make_shared<const RemoteOperation>(std::move(operation));
  for (size_t i = 0; i < shared->legs(); ++i) {
    const RemoteOperation::Leg leg = shared->leg(i);
    DirectItem item = {piece.part->actor.get(), leg.chunk, {}, {}, work.handle, key.name, shared};
    if (shared->values)
      item.source = {shared->values + shared->bytes_up_to(leg.begin), shared->dtype, shared->quantizer, leg.ranges};
    if (shared->out) item.answer = {shared->out + leg.begin * size_of(shared->wanted), shared->wanted, leg.ranges};
    work.direct.push_back(std::move(item));
  }
}

// `pushed`: the keys, where this is a push.
void StoreClient::start_all(Work work, const Ids& pushed) {
  const auto requests = std::make_shared<StoreHandle>();
  work.handle->expect(static_cast<int>(work.direct.size() + work.remote.size()));
  bool has_begun_all = false;
  try {
    for (RemoteOperation& operation : work.remote) start(std::move(operation), requests);
    has_begun_all = true;
    if (!work.direct.empty())
      start_instead(direct_.carry_out(std::move(work.direct), *work.handle, interrupt_), requests);
  } catch (...) {
    const Lock lock(mutex_);
    for (const uint32_t id : pushed) count_again(store_of(work.store).key(id), has_begun_all);
    abandon(requests);
    throw;
  }
}

// After a push that not all of a key has: the next one has its number, and what has this one drops that.
void StoreClient::count_again(ClientKey& key, bool servers_have_it) {
  const auto worker = static_cast<size_t>(options_.remote.worker);
  if (!servers_have_it) --key.pushes;
  for (const ClientPiece& piece : key.pieces)
    if (piece.part->actor && piece.count > 0)
      key.pushes = std::min(key.pushes, piece.part->actor->fewest_pushes(piece.number, worker));
}

// Of a piece of which some chunks were not carried out all are, by the server that is there now: it does not know of
// the others either, because it has none of that memory. Pushes that it has are not counted twice.
void StoreClient::start_instead(const std::vector<DirectItem>& left_behind,
                                const std::shared_ptr<StoreHandle>& requests) {
  std::set<const RemoteOperation*> pieces;
  for (const DirectItem& item : left_behind) {
    if (!item.operation->done) throw Error(ErrorKind::peer_lost, "another server has taken the place of a lost one");
    if (pieces.insert(item.operation.get()).second) {
      item.handle->expect(1);
      start(*item.operation, requests);
    }
    item.handle->end_one(std::nullopt);
  }
}

// See Remote::start. `requests` gets a part for it, which ends when the request does.
void StoreClient::start(RemoteOperation operation, const std::shared_ptr<StoreHandle>& requests) {
  requests->expect(1);
  operation.done = [requests, done = std::move(operation.done)](const std::optional<Error>& error, int64_t updates) {
    done(error, updates);
    requests->end_one(std::nullopt);
  };
  try {
    while (!remote_.start(operation, kBetweenLooks_s)) interrupt_();
  } catch (...) {
    requests->end_one(std::nullopt);
    throw;
  }
}

void StoreClient::abandon(const std::shared_ptr<StoreHandle>& requests) {
  requests->end_one(std::nullopt);
  if (!requests->is_memory_free()) abandoned_[std::this_thread::get_id()] = requests;
}

std::shared_ptr<StoreHandle> StoreClient::take_abandoned() {
  const Lock lock(mutex_);
  const auto taken = abandoned_.extract(std::this_thread::get_id());
  return taken ? taken.mapped() : nullptr;
}

bool StoreClient::wait(StoreHandle& handle, double longest_s) {
  if (!direct_.wait(handle, longest_s)) {
    if (longest_s > 0 && handle.is_waited_for_again(now_s(), kLongWait_s)) tell_that_it_waits();
    return false;
  }
  handle.require_success();
  return true;
}

// After a worker or a server has come back, two workers may wait for each other in two chunks.
void StoreClient::tell_that_it_waits() {
  const Lock lock(mutex_);
  for (const auto& [number, store] : stores_)
    if (store.waits_for_others()) remote_.waits(number);
}

bool StoreClient::look(StoreHandle& handle) {
  if (!handle.is_done()) direct_.advance();
  return handle.is_done();
}

std::string StoreClient::missing(StoreHandle& handle) {
  const std::string text = direct_.missing(handle);
  if (!text.empty() || handle.is_done()) return text;
  std::string workers;
  for (const size_t worker : awaited(handle)) workers += (workers.empty() ? "" : ", ") + std::to_string(worker);
  return workers.empty() ? "a server has not answered" : "a server has no push of worker " + workers;
}

std::vector<size_t> StoreClient::awaited(const StoreHandle& handle) {
  constexpr double kSoon_s = 1;
  std::vector<size_t> workers = direct_.awaited(handle);
  if (!workers.empty() || handle.is_done()) return workers;
  std::vector<RemoteReplyPtr> replies;
  for (size_t server = 0; server < servers_.size(); ++server)
    replies.push_back(remote_.awaited(static_cast<int>(server), handle));
  const double end_s = now_s() + kSoon_s;
  std::set<size_t> named;
  for (const RemoteReplyPtr& reply : replies) {
    if (!reply->wait(std::max(0.0, end_s - now_s()))) continue;
    error_of([&] {  // a server that is lost names nobody
      for (const uint32_t worker : Remote::numbers_of(*reply)) named.insert(worker);
    });
  }
  return {named.begin(), named.end()};
}

// Of a StoreClient: what is there beside push and pull. Values and states as a whole, and who is there.

template <typename OnChunk>
void StoreClient::visit_key(uint32_t store, uint32_t id, Said said, int64_t number, const HostArray& array,
                            OnChunk on_chunk) {
  const auto handle = std::make_shared<StoreHandle>(), requests = std::make_shared<StoreHandle>();
  try {
    begin_visit(handle, requests, store, id, said, number, array, on_chunk);
    handle->end_one(std::nullopt);
    while (!wait(*handle, kBetweenLooks_s)) interrupt_();
  } catch (...) {
    const Lock lock(mutex_);
    abandon(requests);
    throw;
  }
}

template <typename OnChunk>
void StoreClient::begin_visit(const std::shared_ptr<StoreHandle>& handle, const std::shared_ptr<StoreHandle>& requests,
                              uint32_t store, uint32_t id, Said said, int64_t number, const HostArray& array,
                              OnChunk on_chunk) {
  std::vector<ClientPiece> pieces;
  std::shared_ptr<std::atomic<int64_t>> known;
  {
    const Lock lock(mutex_);
    const ClientKey& key = store_of(store).key(id);
    pieces = key.pieces;
    known = key.num_update;
  }
  for (const ClientPiece& piece : pieces) {
    Actor* const actor = piece.part->actor.get();
    if (actor) direct_.await_server(piece.part->server, interrupt_);
    const Layout& layout = *piece.part->layout;
    char* const there = static_cast<char*>(array.address) + piece.begin * size_of(array.dtype);
    if (actor) {
      const size_t first = layout.first_chunk(piece.number), last = layout.first_chunk(piece.number + 1);
      direct_.visit(*actor, first, last, [&](size_t chunk) {
        return on_chunk(*actor, chunk, there + layout.chunks()[chunk].begin * size_of(array.dtype));
      });
      continue;
    }
    RemoteOperation operation = operation_on(store, piece, said);
    operation.number = number;
    operation.dtype = operation.wanted = array.dtype;
    if (said == Said::read_state)
      operation.out = there;
    else if (said == Said::assign || said == Said::write_state)
      operation.values = there;
    operation.done = [handle, known, said](const std::optional<Error>& error, int64_t updates) {
      if (!error && said == Said::read_updates) known->store(updates);
      handle->end_one(error);
    };
    handle->expect(1);
    start({std::move(operation)}, requests);
  }
}

void StoreClient::assign(uint32_t store, const Ids& ids, const std::vector<HostArray>& values) {
  if (ids.size() != values.size()) throw invalid("a key or an array is missing");
  for (size_t i = 0; i < ids.size(); ++i) {
    {
      const Lock lock(mutex_);
      const ClientKey& key = store_of(store).key(ids[i]);
      require_like(key, values[i], key.dtype);
    }
    visit_key(store, ids[i], Said::assign, 0, values[i],
              [](Actor& actor, size_t chunk, const char* there) { return actor.assign(chunk, there); });
  }
}

size_t StoreClient::array_for(uint32_t store, uint32_t id, const std::string& name, const HostArray& like) {
  const Lock lock(mutex_);
  const size_t array = store_of(store).array_of(name);
  const ClientKey& key = store_of(store).key(id);
  require_like(key, like, dtype_of_array(key, array));
  return array;
}

void StoreClient::read_state(uint32_t store, uint32_t id, const std::string& name, const HostArray& out) {
  const size_t array = array_for(store, id, name, out);
  visit_key(store, id, Said::read_state, static_cast<int64_t>(array), out,
            [=](Actor& actor, size_t chunk, char* there) { return actor.read_array(chunk, array, there); });
}

void StoreClient::write_state(uint32_t store, uint32_t id, const std::string& name, const HostArray& values) {
  const size_t array = array_for(store, id, name, values);
  visit_key(store, id, Said::write_state, static_cast<int64_t>(array), values,
            [=](Actor& actor, size_t chunk, const char* there) { return actor.write_array(chunk, array, there); });
}

void StoreClient::write_num_updates(uint32_t store, const Ids& ids, const std::vector<int64_t>& counts) {
  if (ids.size() != counts.size()) throw invalid("a key or a number is missing");
  for (size_t i = 0; i < ids.size(); ++i)
    visit_key(store, ids[i], Said::write_updates, counts[i], {nullptr, DType::float32, 0},
              [&](Actor& actor, size_t chunk, const char*) {
                return actor.set_num_update(chunk, static_cast<uint64_t>(counts[i]));
              });
}

std::vector<int64_t> StoreClient::read_num_updates(uint32_t store, const Ids& ids) {
  for (const uint32_t id : ids)
    visit_key(store, id, Said::read_updates, 0, {nullptr, DType::float32, 0},
              [](const Actor&, size_t, const char*) { return true; });
  return num_updates(store, ids);
}

// A key of several servers is as far as the last of them.
std::vector<int64_t> StoreClient::num_updates(uint32_t store, const Ids& ids) {
  const Lock lock(mutex_);
  std::vector<int64_t> all;
  for (const uint32_t id : ids) {
    const ClientKey& key = store_of(store).key(id);
    int64_t most = key.num_update->load();
    for (const ClientPiece& piece : key.pieces)
      if (piece.part->actor && piece.count > 0)
        most = std::max(
            most, static_cast<int64_t>(piece.part->actor->num_update(piece.part->layout->first_chunk(piece.number))));
    all.push_back(most);
  }
  return all;
}

// ------------------------------------------------------------------------------------------------------- who is there

void StoreClient::require_workers(const ClientStore& store) {
  if (store.is_synchronous() && !lost_.empty()) throw Error(ErrorKind::peer_lost, lost_.begin()->second);
}

void StoreClient::note_round(const std::shared_ptr<StoreHandle>& handle) {
  const auto is_over = [](const std::weak_ptr<StoreHandle>& one) {
    const std::shared_ptr<StoreHandle> there = one.lock();
    return !there || there->is_done();
  };
  in_rounds_.erase(std::remove_if(in_rounds_.begin(), in_rounds_.end(), is_over), in_rounds_.end());
  in_rounds_.push_back(handle);
}

// Its server, which would tell the others, may be dead, too.
void StoreClient::lost(int worker, const std::string& text, uint32_t first_term) {
  const Error error(ErrorKind::peer_lost, text);
  {
    const Lock lock(mutex_);
    lost_[worker] = text;
    for (const std::weak_ptr<StoreHandle>& one : in_rounds_)
      if (const std::shared_ptr<StoreHandle> handle = one.lock()) handle->fail(error);
    for (auto& [number, store] : stores_)
      for (const std::shared_ptr<ClientPart>& known : store.parts()) {
        if (!known->actor || static_cast<size_t>(worker) >= known->layout->capacity()) continue;
        Part& part = known->actor->part();
        part.raise_first_term(static_cast<size_t>(worker), first_term);
        Presence here = Presence::here;
        part.presence(static_cast<size_t>(worker)).compare_exchange_strong(here, Presence::gone);
        part.ring();
      }
  }
  direct_.fail_rounds(error);
}

void StoreClient::back(int worker) {
  const Lock lock(mutex_);
  lost_.erase(worker);
  if (lost_.empty()) direct_.resume_rounds();
}

// Memory that this process shares with it outlives it. But nobody makes snapshots of that any more, workers of other
// hosts do not reach it, and no worker can come to it: so what is asked of it waits for another server, and then fails.
void StoreClient::lost_server(int server, const std::string& text) {
  const double return_s = options_.remote.return_s;
  std::string whole = text;
  if (return_s > 0) whole += "; no other server has taken its place within kv_rejoin_s";
  direct_.lose_server(server, Error(ErrorKind::peer_lost, whole), return_s > 0 ? now_s() + return_s : 0);
  remote_.lost(server, text);
}

// Where the new one does not keep what is in the memory of the one before, it is asked by TCP from now on.
void StoreClient::back_server(int server, std::vector<SocketAddress> addresses, bool keeps_memory) {
  if (!keeps_memory) leave_memory(server);
  remote_.back(server, std::move(addresses));
  direct_.resume_server(server);
}

void StoreClient::leave_memory(int server) {
  const Error error(ErrorKind::peer_lost, "another server has taken the place of server " + std::to_string(server));
  std::vector<Actor*> left;
  {
    const Lock lock(mutex_);
    for (auto& [number, store] : stores_)
      for (const std::shared_ptr<ClientPart>& part : store.parts()) {
        if (part->server != server || !part->actor) continue;
        left.push_back(part->actor.get());
        former_.push_back(std::move(part->actor));
      }
  }
  for (const Actor* const actor : left) direct_.leave(*actor, error);
}

}  // namespace ringtrain
