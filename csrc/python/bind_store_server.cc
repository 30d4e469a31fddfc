// Servers of key-value stores.
#include <nanobind/stl/vector.h>

#include "base/clock.h"
#include "base/fork.h"
#include "kvstore/server/server.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

std::shared_ptr<StoreServer> make_server(int number, int capacity, std::vector<int> listeners, const nb::bytes& secret,
                                         const std::string& token, int threads, const std::string& node,
                                         double timeout_s, double drop_percent, int verbose) {
  ServerOptions options;
  options.number = number;
  options.capacity = capacity;
  options.listeners = std::move(listeners);
  options.secret.assign(secret.c_str(), secret.size());
  options.token = token;
  options.threads = threads;
  options.node = node;
  options.timeout_s = timeout_s;
  options.drop_percent = drop_percent;
  options.verbose = verbose;
  return owned_here(new StoreServer(options));
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

void bind_store_server(nb::module_& module) {
  using Release = nb::call_guard<ReleasedGil>;
  nb::class_<StoreServer>(module, "StoreServer", "A server of key-value stores; see csrc/kvstore/server.h.")
      .def(nb::new_(&make_server), nb::kw_only(), nb::arg("number"), nb::arg("capacity"), nb::arg("listeners"),
           nb::arg("secret"), nb::arg("token"), nb::arg("threads"), nb::arg("node"), nb::arg("timeout_s"),
           nb::arg("drop_percent"), nb::arg("verbose"))
      .def("start_timeline", &start_timeline, nb::arg("path"), nb::arg("number"), nb::arg("process"),
           nb::arg("limit_mb"), Release(), "A file of what its threads do, until close().")
      .def("lost", &StoreServer::lost, nb::arg("worker"), nb::arg("first_term") = 0, Release(),
           "A worker is dead: nobody waits for it, and earlier processes in its place are refused.")
      .def("back", &StoreServer::back, nb::arg("worker"), nb::arg("first_term") = 0, Release(),
           "A worker that was dead is there again.")
      .def(
          "parts", [](StoreServer& server) { return server.stores().parts(); }, Release(),
          "(store, number of chunks) of all that it keeps.")
      .def("describe", &describe_part, nb::arg("part"), "What one of the parts is.")
      .def("read", &read_chunks, nb::arg("part"), nb::arg("first"), nb::arg("last"),
           "Chunks first to last - 1 of a part.")
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
      .def("metrics", &StoreServer::metrics, "What has gone over its connections, and how many requests wait.")
      .def("close", &StoreServer::close, Release(), "Ends its threads and connections.");
}

}  // namespace ringtrain
