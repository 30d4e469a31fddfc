// A worker's side of key-value stores that servers keep.

#include "base/clock.h"
#include "base/fork.h"
#include "kvstore/server/server.h"
#include "kvstore/worker/client.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

using Piece = std::tuple<int, uint64_t, uint64_t>;
using Ids = StoreClient::Ids;

// An exception that Python has raised since, in the handler of a signal: it goes on from here.
void require_no_signal() {
  const TakenGil gil;
  if (has_signal_raised()) throw nb::python_error();
}

HostArray to_array(const nb::handle& handle) {
  const TensorView view = to_view(nb::cast<nb::tuple>(handle));
  if (view.device != TensorView::kHost) throw invalid("a server's store works on arrays in host memory, not on a GPU");
  return {view.address, view.spec.dtype, static_cast<uint64_t>(view.spec.count())};
}

std::vector<HostArray> to_arrays(const nb::list& views) {
  std::vector<HostArray> arrays;
  arrays.reserve(views.size());
  for (const nb::handle view : views) arrays.push_back(to_array(view));
  return arrays;
}

std::vector<Pushed> to_pushed(const nb::list& views, const std::vector<std::pair<double, double>>& rates,
                              const std::string& codes, double threshold) {
  if (rates.size() != views.size() && !rates.empty()) throw invalid("as many rates as arrays, or none");
  const Quantizer quantizer = codes.empty() ? Quantizer() : make_quantizer(codes, threshold);
  std::vector<Pushed> pushed;
  pushed.reserve(views.size());
  for (const nb::handle view : views) {
    const auto [lr, wd] = rates.empty() ? std::pair(0.0, 0.0) : rates[pushed.size()];
    pushed.push_back({to_array(view), {lr, wd}, quantizer});
  }
  return pushed;
}

std::vector<std::vector<SocketAddress>> to_addresses(
    const std::vector<std::vector<std::pair<std::string, int>>>& servers) {
  std::vector<std::vector<SocketAddress>> addresses;
  for (const auto& of_server : servers) {
    auto& own = addresses.emplace_back();
    for (const auto& [host, port] : of_server) own.push_back({host, port});
  }
  return addresses;
}

std::shared_ptr<StoreClient> make_client(int worker, uint32_t term, int workers, int capacity,
                                         const std::vector<std::vector<std::pair<std::string, int>>>& servers,
                                         const nb::bytes& secret, const std::string& token, bool is_sealed,
                                         const std::string& node, int threads, double timeout_s, double return_s,
                                         double outbox_mb, int verbose) {
  StoreClientOptions options;
  options.workers = workers;
  options.node = node;
  options.remote.worker = worker;
  options.remote.term = term;
  options.remote.capacity = capacity;
  options.remote.servers = to_addresses(servers);
  options.remote.secret.assign(secret.c_str(), secret.size());
  options.remote.token = token;
  options.remote.is_sealed = is_sealed;
  options.remote.threads = threads;
  options.remote.timeout_s = timeout_s;
  options.remote.return_s = return_s;
  options.remote.outbox_bytes = static_cast<size_t>(outbox_mb * (1 << 20));
  options.remote.verbose = verbose;
  ReleasedGil release;
  return owned_here(new StoreClient(std::move(options), &require_no_signal));
}

StoreKey make_key(uint32_t id, std::string name, int dtype, uint64_t count, const std::vector<Piece>& pieces) {
  if (dtype < 0 || dtype >= kDTypes) throw invalid("there is no dtype number " + std::to_string(dtype));
  StoreKey key = {id, std::move(name), static_cast<DType>(dtype), count, {}};
  for (const auto& [server, begin, of_piece] : pieces) key.pieces.push_back({server, begin, of_piece});
  return key;
}

// The part of an operation that Python keeps.
struct SharedStoreHandle {
  std::shared_ptr<StoreHandle> handle;
  StoreClient* client;
};

void create_keys(StoreClient& client, uint32_t store, const std::vector<StoreKey>& keys, const nb::list& values) {
  const std::vector<HostArray> arrays = to_arrays(values);
  ReleasedGil release;
  client.create_keys(store, keys, arrays);
}

void assign(StoreClient& client, uint32_t store, const Ids& ids, const nb::list& values) {
  const std::vector<HostArray> arrays = to_arrays(values);
  ReleasedGil release;
  client.assign(store, ids, arrays);
}

void set_rule(StoreClient& client, uint32_t store, const std::string& name, const std::string& form,
              const std::map<std::string, double>& numbers, int64_t begin_num_update, bool keeps_states,
              bool tells_servers) {
  RuleWords rule;
  rule.name = name;
  rule.form = form;
  rule.numbers.assign(numbers.begin(), numbers.end());
  rule.begin_num_update = begin_num_update;
  rule.keeps_states = keeps_states;
  client.set_rule(store, rule, tells_servers);
}

SharedStoreHandle push(StoreClient& client, uint32_t store, const Ids& ids, const nb::list& values,
                       const std::vector<std::pair<double, double>>& rates, int priority, bool copies,
                       const std::string& codes, double threshold) {
  const std::vector<Pushed> pushed = to_pushed(values, rates, codes, threshold);
  ReleasedGil release;
  return {client.push(store, ids, pushed, priority, copies), &client};
}

SharedStoreHandle pull(StoreClient& client, uint32_t store, const Ids& ids, const nb::list& outs, int priority) {
  const std::vector<HostArray> arrays = to_arrays(outs);
  ReleasedGil release;
  return {client.pull(store, ids, arrays, priority), &client};
}

SharedStoreHandle push_pull(StoreClient& client, uint32_t store, const Ids& ids, const nb::list& values,
                            const nb::list& outs, const std::vector<std::pair<double, double>>& rates, int priority,
                            const std::string& codes, double threshold) {
  const std::vector<Pushed> pushed = to_pushed(values, rates, codes, threshold);
  const std::vector<HostArray> arrays = to_arrays(outs);
  ReleasedGil release;
  return {client.push_pull(store, ids, pushed, arrays, priority), &client};
}

StoreClient::Rows to_rows(const nb::tuple& view, uint64_t elements) {
  const HostArray array = to_array(view);
  if (array.dtype != DType::int64) throw invalid("numbers of rows are int64");
  const auto* const first = static_cast<const int64_t*>(array.address);
  return {{first, first + array.count}, elements};
}

SharedStoreHandle push_rows(StoreClient& client, uint32_t store, uint32_t id, const nb::tuple& rows, uint64_t elements,
                            const nb::tuple& values, const std::pair<double, double>& rates, int priority,
                            bool copies) {
  const StoreClient::Rows numbers = to_rows(rows, elements);
  const Pushed pushed = {to_array(values), {rates.first, rates.second}, {}};
  ReleasedGil release;
  return {client.push_rows(store, id, numbers, pushed, priority, copies), &client};
}

SharedStoreHandle pull_rows(StoreClient& client, uint32_t store, uint32_t id, const nb::tuple& rows, uint64_t elements,
                            const nb::tuple& out, int priority) {
  const StoreClient::Rows numbers = to_rows(rows, elements);
  const HostArray array = to_array(out);
  ReleasedGil release;
  return {client.pull_rows(store, id, numbers, array, priority), &client};
}

void read_state(StoreClient& client, uint32_t store, uint32_t id, const std::string& name, const nb::tuple& out) {
  const HostArray array = to_array(out);
  ReleasedGil release;
  client.read_state(store, id, name, array);
}

void write_state(StoreClient& client, uint32_t store, uint32_t id, const std::string& name, const nb::tuple& values) {
  const HostArray array = to_array(values);
  ReleasedGil release;
  client.write_state(store, id, name, array);
}

void back_server(StoreClient& client, int server, const std::vector<std::pair<std::string, int>>& addresses,
                 bool keeps_memory) {
  client.back_server(server, to_addresses({addresses}).front(), keeps_memory);
}

// (server, store, number of the part, its spec, ticket) of each.
nb::list take_shared_parts(StoreClient& client) {
  nb::list parts;
  for (const StoreClient::SharedPart& part : client.take_shared_parts())
    parts.append(nb::make_tuple(part.server, part.store, part.number, nb::bytes(part.spec.data(), part.spec.size()),
                                part.ticket));
  return parts;
}

std::optional<SharedStoreHandle> take_abandoned(StoreClient& client) {
  auto requests = client.take_abandoned();
  if (!requests) return std::nullopt;
  return SharedStoreHandle{std::move(requests), &client};
}

void bind_store_handle(nb::module_& module) {
  using Release = nb::call_guard<ReleasedGil>;
  nb::class_<SharedStoreHandle>(module, "StoreHandle",
                                "Completion of a push or pull; see csrc/kvstore/worker/store_handle.h.")
      .def(
          "is_done", [](const SharedStoreHandle& shared) { return shared.client->look(*shared.handle); }, Release())
      .def(
          "is_memory_free",
          [](const SharedStoreHandle& shared) {
            shared.client->look(*shared.handle);
            return shared.handle->is_memory_free();
          },
          Release(), "Whether nobody reads or writes its arrays any more, be it done or failed.")
      .def(
          "wait",
          [](const SharedStoreHandle& shared, double timeout_s) {
            return shared.client->wait(*shared.handle, timeout_s);
          },
          nb::arg("timeout_s"), Release(), "Whether it is done now; raises what it has failed with.")
      .def(
          "missing", [](const SharedStoreHandle& shared) { return shared.client->missing(*shared.handle); }, Release(),
          "The process it waits for, for a message.")
      .def(
          "awaited", [](const SharedStoreHandle& shared) { return shared.client->awaited(*shared.handle); }, Release(),
          "The workers for whose pushes it waits, as far as shared memory or servers show them; asks these.");
}

std::shared_ptr<StoreServer> make_server(int number, int capacity, const std::vector<int>& listeners,
                                         const nb::bytes& secret, const std::string& token, int threads,
                                         const std::string& node, double timeout_s, int verbose) {
  ServerOptions options;
  options.number = number;
  options.capacity = capacity;
  for (const int socket : listeners) options.listeners.emplace_back(socket);
  options.secret.assign(secret.c_str(), secret.size());
  options.token = token;
  options.threads = threads;
  options.node = node;
  options.timeout_s = timeout_s;
  options.verbose = verbose;
  return owned_here(new StoreServer(std::move(options)));
}

void start_timeline(StoreServer& server, const std::string& path, int number, const std::string& process,
                    double limit_mb) {
  server.start_timeline({path, number, process, now_s(), static_cast<size_t>(limit_mb * 1e6), false});
}

Bytes to_bytes(const nb::bytes& bytes) { return {bytes.c_str(), bytes.c_str() + bytes.size()}; }

template <typename Call>
nb::bytes bytes_from(Call call) {
  Bytes bytes;
  {
    const ReleasedGil release;
    bytes = call();
  }
  return nb::bytes(bytes.data(), bytes.size());
}

nb::bytes describe_part(StoreServer& server, size_t part) {
  return bytes_from([&] { return server.stores().describe(part); });
}

nb::bytes read_chunks(StoreServer& server, size_t part, size_t first, size_t last) {
  return bytes_from([&] { return server.stores().copy(part, first, last); });
}

// None, or (store, part, piece), (number of the key, first element, elements), number of the dtype in which it is
// updated, the gradient, the value.
nb::object take(StoreServer& server, double longest_s) {
  std::optional<ServerStores::Taken> taken;
  {
    const ReleasedGil release;
    taken = server.take(longest_s);
  }
  if (!taken) return nb::none();
  const auto bytes = [](const Bytes& from) { return nb::bytes(from.data(), from.size()); };
  return nb::make_tuple(nb::make_tuple(taken->store, taken->part, taken->piece),
                        nb::make_tuple(taken->of_key.key, taken->of_key.begin, taken->of_key.count),
                        static_cast<int>(wide(taken->of_key.dtype)), bytes(taken->gradient), bytes(taken->weight));
}

void finish(StoreServer& server, size_t part, size_t piece, const nb::bytes& weight) {
  const Bytes bytes = to_bytes(weight);
  const ReleasedGil release;
  server.finish(part, piece, bytes);
}

void restore_part(StoreServer& server, uint32_t store, const nb::bytes& description) {
  const Bytes bytes = to_bytes(description);
  const ReleasedGil release;
  server.stores().restore(store, bytes);
}

void adopt(StoreServer& server, const std::vector<std::tuple<uint32_t, uint32_t, nb::bytes, int64_t, uint64_t>>& all) {
  std::vector<ServerStores::Found> found;
  for (const auto& [store, number, spec, pid, ticket] : all)
    found.push_back({store, number, to_bytes(spec), pid, ticket});
  const ReleasedGil release;
  server.stores().adopt(found);
}

size_t write_chunks(StoreServer& server, size_t part, size_t first, const nb::bytes& chunks) {
  const Bytes bytes = to_bytes(chunks);
  const ReleasedGil release;
  return server.stores().put(part, first, bytes);
}

}  // namespace

void bind_store_client(nb::module_& module) {
  using Release = nb::call_guard<ReleasedGil>;
  nb::class_<StoreKey>(module, "StoreKey", "A key of a store; see csrc/kvstore/worker/client_store.h.")
      .def(nb::new_(&make_key), nb::arg("id"), nb::arg("name"), nb::arg("dtype"), nb::arg("count"), nb::arg("pieces"))
      .def_ro("id", &StoreKey::id)
      .def_ro("name", &StoreKey::name);
  bind_store_handle(module);
  module.attr("LARGEST_ATOMIC_BYTES") = Layout::kLargestAtomicBytes;
  nb::class_<StoreClient>(module, "StoreClient", "A worker's side of stores; see csrc/kvstore/worker/client.h.")
      .def(nb::new_(&make_client), nb::kw_only(), nb::arg("worker"), nb::arg("term") = 0, nb::arg("workers"),
           nb::arg("capacity"), nb::arg("servers"), nb::arg("secret"), nb::arg("token"), nb::arg("is_sealed") = false,
           nb::arg("node"), nb::arg("threads") = 1, nb::arg("timeout_s"), nb::arg("return_s"), nb::arg("outbox_mb"),
           nb::arg("verbose"))
      .def(
          "open",
          [](StoreClient& client, uint32_t store, bool is_synchronous, std::optional<int64_t> max_staleness,
             bool is_atomic) {
            client.open(store, is_synchronous, max_staleness.value_or(PartSpec::kNoBound), is_atomic);
          },
          nb::arg("store"), nb::arg("is_synchronous"), nb::arg("max_staleness").none(), nb::arg("is_atomic") = false)
      .def("meet", &StoreClient::meet, Release(), "Waits for all servers.")
      .def("create_keys", &create_keys, nb::arg("store"), nb::arg("keys"), nb::arg("values"))
      .def("attach_keys", &StoreClient::attach_keys, nb::arg("store"), nb::arg("keys"), Release())
      .def("assign", &assign, nb::arg("store"), nb::arg("ids"), nb::arg("values"))
      .def("set_rule", &set_rule, nb::arg("store"), nb::arg("name"), nb::arg("form"), nb::arg("numbers"),
           nb::arg("begin_num_update"), nb::arg("keeps_states"), nb::arg("tells_servers"), Release())
      .def("push", &push, nb::arg("store"), nb::arg("ids"), nb::arg("values"), nb::arg("rates"), nb::arg("priority"),
           nb::arg("copies"), nb::arg("codes") = "", nb::arg("threshold") = 0.0, nb::keep_alive<0, 1>())
      .def("pull", &pull, nb::arg("store"), nb::arg("ids"), nb::arg("outs"), nb::arg("priority"),
           nb::keep_alive<0, 1>())
      .def("push_pull", &push_pull, nb::arg("store"), nb::arg("ids"), nb::arg("values"), nb::arg("outs"),
           nb::arg("rates"), nb::arg("priority"), nb::arg("codes") = "", nb::arg("threshold") = 0.0,
           nb::keep_alive<0, 1>())
      .def("push_rows", &push_rows, nb::arg("store"), nb::arg("id"), nb::arg("rows"), nb::arg("elements"),
           nb::arg("values"), nb::arg("rates"), nb::arg("priority"), nb::arg("copies"), nb::keep_alive<0, 1>(),
           "Rows of a key, in order and each once, of so many elements each.")
      .def("pull_rows", &pull_rows, nb::arg("store"), nb::arg("id"), nb::arg("rows"), nb::arg("elements"),
           nb::arg("out"), nb::arg("priority"), nb::keep_alive<0, 1>())
      .def("num_updates", &StoreClient::num_updates, nb::arg("store"), nb::arg("ids"), Release())
      .def("read_num_updates", &StoreClient::read_num_updates, nb::arg("store"), nb::arg("ids"), Release())
      .def("write_num_updates", &StoreClient::write_num_updates, nb::arg("store"), nb::arg("ids"), nb::arg("counts"),
           Release())
      .def("read_state", &read_state, nb::arg("store"), nb::arg("id"), nb::arg("name"), nb::arg("out"))
      .def("write_state", &write_state, nb::arg("store"), nb::arg("id"), nb::arg("name"), nb::arg("values"))
      .def("join", &StoreClient::join, nb::arg("store"), Release())
      .def("resume", &StoreClient::resume, nb::arg("store"), nb::arg("joins"), Release())
      .def("lost", &StoreClient::lost, nb::arg("worker"), nb::arg("text"), nb::arg("first_term") = 0, Release())
      .def("back", &StoreClient::back, nb::arg("worker"), Release())
      .def("lost_server", &StoreClient::lost_server, nb::arg("server"), nb::arg("text"), Release())
      .def("back_server", &back_server, nb::arg("server"), nb::arg("addresses"), nb::arg("keeps_memory") = false,
           Release())
      .def("take_shared_parts", &take_shared_parts,
           "Memory that this process shares with servers: what has come since the last call.")
      .def("take_abandoned", &take_abandoned, nb::keep_alive<0, 1>(),
           "After a call in this thread that raised: requests of it that servers still carry out on its arrays, or "
           "None.")
      .def("metrics", &StoreClient::metrics, Release())
      .def(
          "end",
          [](StoreClient& client, const std::string& text, bool is_lost) {
            client.end(text, is_lost ? ErrorKind::peer_lost : ErrorKind::shut_down);
          },
          nb::arg("text"), nb::arg("is_lost"), Release(),
          "This process has no part in its job any more: all fails, with PeerLostError or ShutDownError.")
      .def("close", &StoreClient::close, Release());
}

// Servers of key-value stores.

void bind_store_server(nb::module_& module) {
  using Release = nb::call_guard<ReleasedGil>;
  nb::class_<StoreServer>(module, "StoreServer", "A server of key-value stores; see csrc/kvstore/server/server.h.")
      .def(nb::new_(&make_server), nb::kw_only(), nb::arg("number"), nb::arg("capacity"), nb::arg("listeners"),
           nb::arg("secret"), nb::arg("token"), nb::arg("threads"), nb::arg("node"), nb::arg("timeout_s"),
           nb::arg("verbose"))
      .def("start_timeline", &start_timeline, nb::arg("path"), nb::arg("number"), nb::arg("process"),
           nb::arg("limit_mb"), Release(), "A file of what its threads do, until close().")
      .def("lost", &StoreServer::lost, nb::arg("worker"), nb::arg("first_term") = 0, Release(),
           "A worker is dead: nobody waits for it, and earlier processes in its place are refused.")
      .def("left", &StoreServer::left, nb::arg("worker"), Release(), "A worker is done.")
      .def("back", &StoreServer::back, nb::arg("worker"), nb::arg("first_term") = 0, Release(),
           "A worker has another process.")
      .def(
          "parts", [](StoreServer& server) { return server.stores().parts(); }, Release(),
          "(store, number of chunks) of all that it keeps.")
      .def("describe", &describe_part, nb::arg("part"), "The description of one part.")
      .def("read", &read_chunks, nb::arg("part"), nb::arg("first"), nb::arg("last"),
           "Chunks first to last - 1 of a part.")
      .def("begin_recovery", [](StoreServer& server) { server.stores().begin_recovery(); })
      .def("restore", &restore_part, nb::arg("store"), nb::arg("description"),
           "Make the next part as it was described.")
      .def("adopt", &adopt, nb::arg("parts"),
           "Go on with the memory of a server before: (store, number of the part, its spec, pid of a worker that has "
           "it, ticket) of each, by store in order.")
      .def("write", &write_chunks, nb::arg("part"), nb::arg("first"), nb::arg("chunks"),
           "Give a part chunks that were read; returns the number of the next one.")
      .def("take", &take, nb::arg("longest_s"), "The next gradient of a value that a program updates.")
      .def("finish", &finish, nb::arg("part"), nb::arg("piece"), nb::arg("weight"),
           "The value that the program has made of it.")
      .def("metrics", &StoreServer::metrics, "Bytes and messages of its connections, and how many requests wait.")
      .def("close", &StoreServer::close, Release(), "Ends its threads and connections.");
}

}  // namespace ringtrain
