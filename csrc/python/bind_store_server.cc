// Servers of key-value stores.
#include <nanobind/stl/vector.h>

#include "kvstore/server.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

void make_server(StoreServer* place, int number, int capacity, std::vector<int> listeners, const nb::bytes& secret,
                 const std::string& token, int threads, bool shares_memory, double timeout_s, double drop_percent,
                 int verbose) {
  ServerOptions options;
  options.number = number;
  options.capacity = capacity;
  options.listeners = std::move(listeners);
  options.secret.assign(secret.c_str(), secret.size());
  options.token = token;
  options.threads = threads;
  options.shares_memory = shares_memory;
  options.timeout_s = timeout_s;
  options.drop_percent = drop_percent;
  options.verbose = verbose;
  new (place) StoreServer(options);
}

}  // namespace

void bind_store_server(nb::module_& module) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<StoreServer>(module, "StoreServer", "A server of key-value stores; see csrc/kvstore/server.h.")
      .def("__init__", &make_server, nb::kw_only(), nb::arg("number"), nb::arg("capacity"), nb::arg("listeners"),
           nb::arg("secret"), nb::arg("token"), nb::arg("threads"), nb::arg("shares_memory"), nb::arg("timeout_s"),
           nb::arg("drop_percent"), nb::arg("verbose"))
      .def("lost", &StoreServer::lost, nb::arg("worker"), Release(), "A worker is dead: nobody waits for it.")
      .def("back", &StoreServer::back, nb::arg("worker"), Release(), "A worker that was dead is there again.")
      .def("metrics", &StoreServer::metrics, "What has gone over its connections, and how many requests wait.")
      .def("close", &StoreServer::close, Release(), "Ends its threads and connections.");
}

}  // namespace ringtrain
