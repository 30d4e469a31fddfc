// Of a StoreClient: what is there beside push and pull. Values and states as a whole, and who is there.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "kvstore/worker/client.h"

namespace ringtrain {
namespace {

constexpr double kBetweenLooks_s = 0.2;

DType dtype_of_array(const ClientKey& key, size_t array) { return array == 0 ? key.dtype : wide(key.dtype); }

void require_like(const ClientKey& key, const HostArray& array, DType dtype) {
  if (array.count != key.count || array.dtype != dtype)
    throw invalid("key \"" + *key.name + "\" wants an array of " + std::to_string(key.count) + " elements of " +
                  name_of(dtype) + " here, but it is one of " + std::to_string(array.count) + " of " +
                  name_of(array.dtype));
}

}  // namespace

template <typename OnChunk>
void StoreClient::visit_key(uint32_t store, uint32_t id, Said said, int64_t number, const HostArray& array,
                            OnChunk on_chunk) {
  const auto handle = std::make_shared<StoreHandle>();
  std::vector<ClientPiece> pieces;
  std::shared_ptr<std::atomic<int64_t>> known;
  {
    const Lock lock(mutex_);
    pieces = store_of(store).key(id).pieces;
    known = store_of(store).key(id).num_update;
  }
  for (const ClientPiece& piece : pieces) {
    if (piece.part->actor) direct_.await_server(piece.part->server, interrupt_);
    const Layout& layout = *piece.part->layout;
    char* const there = static_cast<char*>(array.address) + piece.begin * size_of(array.dtype);
    if (Actor* const actor = piece.part->actor.get()) {
      const size_t first = layout.first_chunk(piece.number), last = layout.first_chunk(piece.number + 1);
      direct_.visit(*actor, first, last, [&](size_t chunk) {
        return on_chunk(*actor, chunk, there + layout.chunks()[chunk].begin * size_of(array.dtype));
      });
      continue;
    }
    RemoteOperation operation;
    operation.said = said;
    operation.server = piece.part->server;
    operation.store = store;
    operation.part = piece.part->number;
    operation.layout = piece.part->layout;
    operation.piece = piece.number;
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
    start(operation);
  }
  handle->end_one(std::nullopt);
  while (!wait(*handle, kBetweenLooks_s)) interrupt_();
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

// Where the new one does not keep what lies in the memory of the one before, it is asked by TCP from now on.
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
  for (const Actor* const actor : left) {
    direct_.leave(*actor);
    direct_.fail_of(*actor, error);
  }
}

}  // namespace ringtrain
