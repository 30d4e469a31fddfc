#include "kvstore/worker/client.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "base/error.h"
#include "kvstore/store/part_table.h"
#include "runtime/current_timeline.h"

namespace ringtrain {
namespace {

constexpr double kBetweenLooks_s = 0.2;

bool can_be_of(DType given, DType kept) {
  return given == kept || (is_half(given) && kept == DType::float32) || (given == DType::float32 && is_half(kept));
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

}  // namespace

void require_fitting(const HostArray& array, const ClientKey& key, uint64_t count) {
  if (array.count != count)
    throw invalid("key \"" + *key.name + "\" has " + std::to_string(count) + " elements, but the array has " +
                  std::to_string(array.count));
  if (!can_be_of(array.dtype, key.dtype))
    throw invalid("key \"" + *key.name + "\" is " + name_of(key.dtype) + ", but the array is " + name_of(array.dtype));
  if (reinterpret_cast<uintptr_t>(array.address) % size_of(array.dtype) != 0)
    throw invalid("the array of key \"" + *key.name + "\" does not lie on a multiple of its element's bytes: copy it");
}

StoreClient::StoreClient(StoreClientOptions options, Interrupt interrupt)
    : options_(std::move(options)),
      interrupt_(interrupt),
      direct_(options_.remote.worker, options_.workers, options_.remote.timeout_s,
              [this](const DirectItem& item) {
                remote_.poke(item.server, item.store, item.part, static_cast<uint32_t>(item.chunk));
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
  direct_.fail_all(Error(ErrorKind::shut_down, "the store was closed before this operation was done"));
}

// ------------------------------------------------------------------------------------------------------ what there is

void StoreClient::meet() {
  std::optional<std::vector<ServerWords>> words;
  while (!(words = remote_.meet(kBetweenLooks_s))) interrupt_();
  servers_ = *words;
}

void StoreClient::open(uint32_t store, bool is_synchronous, int64_t max_staleness) {
  const Lock lock(mutex_);
  stores_.try_emplace(store, store, is_synchronous, max_staleness);
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
      const auto is_new = [&](const StoreKey& key) { return !own.has_key(key.id); };
      std::vector<StoreKey> unknown;
      std::copy_if(keys.begin(), keys.end(), std::back_inserter(unknown), is_new);
      if (!own.spec_of(server, unknown, options_.remote.capacity).pieces.empty())
        replies.emplace_back(server, remote_.attach(server, store, own.parts_of(server)));
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
  if (!tells_servers) return;
  std::vector<RemoteReplyPtr> replies;
  for (int server = 0; server < static_cast<int>(servers_.size()); ++server)
    replies.push_back(remote_.set_rule(server, store, rule));
  for (const RemoteReplyPtr& reply : replies) {
    await(*reply);
    reply->take();
  }
}

void StoreClient::join(uint32_t store) {
  std::vector<RemoteReplyPtr> replies;
  for (int server = 0; server < static_cast<int>(servers_.size()); ++server)
    replies.push_back(remote_.join(server, store));
  for (const RemoteReplyPtr& reply : replies) {
    await(*reply);
    reply->take();
  }
}

// ----------------------------------------------------------------------------------------------------- push and pull

std::shared_ptr<StoreHandle> StoreClient::push(uint32_t store, const Ids& ids, const std::vector<Pushed>& values,
                                               int priority, bool copies) {
  require_one_of_each(ids.size(), values.size());
  Work work;
  work.priority = priority;
  work.copies = copies;
  {
    const Lock lock(mutex_);
    begin(work, store, ids, "push");
    for (size_t i = 0; i < ids.size(); ++i) add(work, store, ids[i], &values[i], nullptr);
  }
  return carry_out(std::move(work), store, ids);
}

std::shared_ptr<StoreHandle> StoreClient::pull(uint32_t store, const Ids& ids, const std::vector<HostArray>& outs,
                                               int priority) {
  require_one_of_each(ids.size(), outs.size());
  Work work;
  work.priority = priority;
  {
    const Lock lock(mutex_);
    begin(work, store, ids, "pull");
    for (size_t i = 0; i < ids.size(); ++i) add(work, store, ids[i], nullptr, &outs[i]);
  }
  return carry_out(std::move(work), store, {});
}

std::shared_ptr<StoreHandle> StoreClient::push_pull(uint32_t store, const Ids& ids, const std::vector<Pushed>& values,
                                                    const std::vector<HostArray>& outs, int priority) {
  require_one_of_each(ids.size(), values.size());
  require_one_of_each(ids.size(), outs.size());
  Work work;
  work.priority = priority;
  {
    const Lock lock(mutex_);
    begin(work, store, ids, "pushpull");
    for (size_t i = 0; i < ids.size(); ++i) add(work, store, ids[i], &values[i], &outs[i]);
  }
  return carry_out(std::move(work), store, ids);
}

void StoreClient::begin(const Work& work, uint32_t store, const Ids& ids, const char* kind) {
  ClientStore& own = store_of(store);
  require_workers(own);
  if (own.is_synchronous()) note_round(work.handle);
  if (may_have_timeline() && !ids.empty()) {
    const std::string others = ids.size() == 1 ? "" : " and " + std::to_string(ids.size() - 1) + " more";
    work.handle->show(std::string(kind) + "." + *own.key(ids[0]).name + others, kind);
  }
}

void StoreClient::add(Work& work, uint32_t store, uint32_t id, const Pushed* pushed, const HostArray* out) {
  ClientStore& own = store_of(store);
  ClientKey& key = own.key(id);
  if (pushed && pushed->quantizer.kind == Quantizer::Kind::none) require_fitting(pushed->values, key, key.count);
  if (out) require_fitting(*out, key, key.count);
  if (pushed) ++key.pushes;
  for (const ClientPiece& piece : key.pieces)
    if (piece.part->actor)
      add_direct(work, store, key, piece, pushed, out);
    else
      add_remote(work, store, key, piece, pushed, out);
}

void StoreClient::add_direct(Work& work, uint32_t store, const ClientKey& key, const ClientPiece& piece,
                             const Pushed* pushed, const HostArray* out) {
  const Layout& layout = *piece.part->layout;
  std::shared_ptr<const RemoteOperation> other_way;
  if (options_.remote.return_s > 0) {
    add_remote(work, store, key, piece, pushed, out);
    other_way = take_other_way(work);
  }
  for (size_t chunk = layout.first_chunk(piece.number); chunk < layout.first_chunk(piece.number + 1); ++chunk) {
    const uint64_t begin = piece.begin + layout.chunks()[chunk].begin;
    DirectItem item = {piece.part->actor.get(), chunk, key.pushes,         {},      {},       {}, work.handle, key.name,
                       piece.part->server,      store, piece.part->number, nullptr, other_way};
    if (pushed) {
      item.source = {from(*pushed, begin), pushed->values.dtype, pushed->quantizer};
      item.rates = pushed->rates;
    }
    if (out) item.answer = {from(*out, begin), out->dtype};
    work.direct.push_back(std::move(item));
  }
}

std::shared_ptr<const RemoteOperation> StoreClient::take_other_way(Work& work) const {
  auto operation = std::make_shared<const RemoteOperation>(std::move(work.remote.back()));
  work.remote.pop_back();
  return operation;
}

void StoreClient::add_remote(Work& work, uint32_t store, const ClientKey& key, const ClientPiece& piece,
                             const Pushed* pushed, const HostArray* out) {
  RemoteOperation operation;
  operation.said = !out ? Said::push : pushed ? Said::push_pull : Said::pull;
  operation.server = piece.part->server;
  operation.store = store;
  operation.part = piece.part->number;
  operation.layout = piece.part->layout;
  operation.piece = piece.number;
  operation.number = static_cast<int64_t>(key.pushes);
  operation.priority = work.priority;
  operation.copies = work.copies;
  if (pushed) {
    operation.values = from(*pushed, piece.begin);
    operation.dtype = pushed->values.dtype;
    operation.quantizer = pushed->quantizer;
    operation.lr = pushed->rates.lr;
    operation.wd = pushed->rates.wd;
  }
  if (out) {
    operation.out = from(*out, piece.begin);
    operation.wanted = out->dtype;
  }
  operation.done = [handle = work.handle, known = key.num_update](const std::optional<Error>& error, int64_t updates) {
    if (!error && updates > known->load()) known->store(updates);
    handle->end_one(error);
  };
  work.remote.push_back(std::move(operation));
}

std::shared_ptr<StoreHandle> StoreClient::carry_out(Work work, uint32_t store, const Ids& pushed) {
  const std::shared_ptr<StoreHandle> handle = work.handle;
  handle->expect(static_cast<int>(work.direct.size() + work.remote.size()));
  bool has_begun_all = false;
  try {
    for (const RemoteOperation& operation : work.remote) start(operation);
    has_begun_all = true;
    if (!work.direct.empty()) start_instead(direct_.carry_out(std::move(work.direct), *handle, interrupt_));
  } catch (...) {
    const Lock lock(mutex_);
    for (const uint32_t id : pushed) count_again(store_of(store).key(id), has_begun_all);
    throw;
  }
  handle->end_one(std::nullopt);
  return handle;
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
// the others either, because it has none of that memory. What it has is not counted twice.
void StoreClient::start_instead(const std::vector<DirectItem>& left_behind) {
  std::set<const RemoteOperation*> pieces;
  for (const DirectItem& item : left_behind) {
    if (!item.by_tcp) throw Error(ErrorKind::peer_lost, "another server has taken the place of a lost one");
    if (pieces.insert(item.by_tcp.get()).second) {
      item.handle->expect(1);
      start(*item.by_tcp);
    }
    item.handle->end_one(std::nullopt);
  }
}

void StoreClient::start(const RemoteOperation& operation) {
  while (!remote_.start(operation, kBetweenLooks_s)) interrupt_();
}

bool StoreClient::wait(StoreHandle& handle, double longest_s) {
  if (!direct_.wait(handle, longest_s)) return false;
  handle.require_success();
  return true;
}

bool StoreClient::look(StoreHandle& handle) {
  if (!handle.is_done()) direct_.advance();
  return handle.is_done();
}

std::string StoreClient::missing(StoreHandle& handle) {
  const std::string text = direct_.missing(handle);
  return text.empty() && !handle.is_done() ? "a server has not answered" : text;
}

}  // namespace ringtrain
