// A worker's side of key-value stores that servers keep: what it shares with a server of its host it changes itself,
// all else goes by TCP.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/tensor.h"
#include "base/thread_annotations.h"
#include "kvstore/worker/client_store.h"
#include "kvstore/worker/direct_path.h"
#include "kvstore/worker/remote.h"
#include "kvstore/worker/store_handle.h"

namespace ringtrain {

struct StoreClientOptions {
  RemoteOptions remote;
  int workers = 1;   // at the beginning
  std::string node;  // see ServerOptions
};

// An array of a caller: dense, in host memory.
struct HostArray {
  void* address;
  DType dtype;
  uint64_t count;  // elements
};

// The push of one key.
struct Pushed {
  HostArray values;
  Rates rates;
  Quantizer quantizer;  // of a kind: the values are codes
};

// Throws invalid where the array cannot be so many elements of the key.
void require_fitting(const HostArray& array, const ClientKey& key, uint64_t count);

// Any thread, without the GIL: calls may wait. They throw what goes wrong: peer_lost where a server is lost, or, for
// stores in rounds, a worker.
class StoreClient {
 public:
  using Interrupt = DirectPath::Interrupt;

  // Dials all servers. `interrupt` is asked now and then by waiting threads, and throws if one should not wait any
  // longer.
  StoreClient(StoreClientOptions options, Interrupt interrupt);
  ~StoreClient();

  // Waits for all servers, as long as they are not lost. To be called once, before anything is asked of them; what
  // others have heard of them may come before.
  void meet();
  // The same at all workers.
  void open(uint32_t store, bool is_synchronous, int64_t max_staleness, bool is_atomic = false);
  // One worker makes keys and gives them their values; the others come to know them afterwards.
  void create_keys(uint32_t store, const std::vector<StoreKey>& keys, const std::vector<HostArray>& values);
  void attach_keys(uint32_t store, const std::vector<StoreKey>& keys);
  void assign(uint32_t store, const std::vector<uint32_t>& ids, const std::vector<HostArray>& values);
  // No name takes the rule away. One worker tells the servers, before the others say that they know.
  void set_rule(uint32_t store, const RuleWords& rule, bool tells_servers);

  using Ids = std::vector<uint32_t>;
  // `copies`: the values may change as soon as this has returned; else when the handle is done.
  std::shared_ptr<StoreHandle> push(uint32_t store, const Ids& ids, const std::vector<Pushed>& values, int priority,
                                    bool copies);
  std::shared_ptr<StoreHandle> pull(uint32_t store, const Ids& ids, const std::vector<HostArray>& outs, int priority);
  // The values must not change until the handle is done; each may be its own out.
  std::shared_ptr<StoreHandle> push_pull(uint32_t store, const Ids& ids, const std::vector<Pushed>& values,
                                         const std::vector<HostArray>& outs, int priority);

  // Some rows of a key, of so many elements each: in order, each once. Their values are one behind the other.
  struct Rows {
    std::vector<int64_t> numbers;
    uint64_t elements;
  };
  std::shared_ptr<StoreHandle> push_rows(uint32_t store, uint32_t id, const Rows& rows, const Pushed& values,
                                         int priority, bool copies);
  std::shared_ptr<StoreHandle> pull_rows(uint32_t store, uint32_t id, const Rows& rows, const HostArray& out,
                                         int priority);

  bool wait(StoreHandle& handle, double longest_s);
  // Goes on with what this worker can do; whether the handle is done.
  bool look(StoreHandle& handle);
  // Says what it waits for, for a message.
  std::string missing(StoreHandle& handle);
  // Returns the workers for whose pushes it waits, as far as shared memory or servers that answer soon show them.
  std::vector<size_t> awaited(const StoreHandle& handle);

  // Updates of each key by the rule, as far as this worker has heard; where it shares memory, as they are.
  std::vector<int64_t> num_updates(uint32_t store, const Ids& ids);
  // The same, having asked the servers.
  std::vector<int64_t> read_num_updates(uint32_t store, const Ids& ids);
  // "master", or a name of the rule's state_names, in the dtype in which the rule computes.
  void read_state(uint32_t store, uint32_t id, const std::string& name, const HostArray& out);
  void write_state(uint32_t store, uint32_t id, const std::string& name, const HostArray& values);
  void write_num_updates(uint32_t store, const Ids& ids, const std::vector<int64_t>& counts);

  // This worker has no more data: nobody waits for its pushes until resume(). Returns a number of this join.
  int64_t join(uint32_t store);
  // All workers have joined, and from now on push again: those of these joins are waited for. A worker that joined and
  // then died has another number in its next process.
  void resume(uint32_t store, const std::map<uint32_t, int64_t>& joins);
  // News from others. A lost worker holds up only rounds, which fail.
  // `first_term`: from now on only processes of this term or a later one act in its name, see WorkerPlace.
  void lost(int worker, const std::string& text, uint32_t first_term);
  void back(int worker);
  // A request to a lost server waits for return_s, and then fails. `keeps_memory`: the one in its place goes on
  // with the memory of the one before.
  void lost_server(int server, const std::string& text);
  void back_server(int server, std::vector<SocketAddress> addresses, bool keeps_memory);

  // Memory that this process shares with a server: another server may find it here, whatever becomes of the first one.
  struct SharedPart {
    int server;
    uint32_t store, number;
    Bytes spec;
    uint64_t ticket;
  };
  // Those that have come since the last call.
  std::vector<SharedPart> take_shared_parts();

  // After a call in this thread that has thrown: requests of it that servers still carry out, or null. The caller keeps
  // the arrays of the call until is_memory_free().
  std::shared_ptr<StoreHandle> take_abandoned();

  std::map<std::string, double> metrics() const { return remote_.metrics(); }
  // This process has no part in its job any more: what is under way fails, and all that comes.
  void end(const std::string& text, ErrorKind kind);
  // Work that this process would do itself fails; requests by TCP go on.
  void close();

 private:
  // One operation on some keys, as it is put together.
  struct Work {
    uint32_t store;
    int priority;
    bool copies = false;
    std::shared_ptr<StoreHandle> handle = std::make_shared<StoreHandle>();
    std::vector<DirectItem> direct = {};
    std::vector<RemoteOperation> remote = {};
  };
  // The array that is pushed of a key, and the one it is pulled to. Null: nothing; no rows: all of the key.
  struct Operands {
    const Pushed* pushed;
    const HostArray* out;
    const Rows* rows;
  };
  using Reply = std::pair<int, RemoteReplyPtr>;  // of which server

  ClientStore& store_of(uint32_t store) REQUIRES(mutex_);
  void require_workers(const ClientStore& store) REQUIRES(mutex_);
  void note_round(const std::shared_ptr<StoreHandle>& handle) REQUIRES(mutex_);
  void await(RemoteReply& reply);
  template <typename Ask>
  void await_all(Ask ask);
  std::shared_ptr<Part> shared_part(int server, uint32_t store, const PartWords& words);
  void add_part(int server, uint32_t store, const PartWords& words) EXCLUDES(mutex_);
  void add_keys(uint32_t store, const std::vector<StoreKey>& keys) EXCLUDES(mutex_);
  // `operands`: of each key, from the first on.
  std::shared_ptr<StoreHandle> carry_out(Work work, const Ids& ids, const char* kind,
                                         const std::vector<Operands>& operands);
  void begin(const Work& work, const Ids& ids, const char* kind) REQUIRES(mutex_);
  void add(Work& work, ClientKey& key, const Operands& operands);
  static RemoteOperation operation_on(uint32_t store, const ClientPiece& piece, Said said);
  RemoteOperation operation_of(const Work& work, const ClientKey& key, const ClientPiece& piece,
                               const Operands& operands) const;
  void add_direct(Work& work, const ClientKey& key, const ClientPiece& piece, RemoteOperation operation) const;
  void start_all(Work work, const Ids& pushed);
  void count_again(ClientKey& key, bool servers_have_it) REQUIRES(mutex_);
  void start(RemoteOperation operation, const std::shared_ptr<StoreHandle>& requests);
  void start_instead(const std::vector<DirectItem>& left_behind, const std::shared_ptr<StoreHandle>& requests);
  void abandon(const std::shared_ptr<StoreHandle>& requests) REQUIRES(mutex_);
  void tell_that_it_waits() EXCLUDES(mutex_);
  // From now on the server is asked by TCP for all of its Parts.
  void leave_memory(int server) EXCLUDES(mutex_);
  // The number of a key's array, which `like` fits.
  size_t array_for(uint32_t store, uint32_t id, const std::string& name, const HostArray& like) EXCLUDES(mutex_);
  // Something else with all of a key, until it is done: on_chunk(actor, chunk, place in the array), or by TCP.
  template <typename OnChunk>
  void visit_key(uint32_t store, uint32_t id, Said said, int64_t number, const HostArray& array, OnChunk on_chunk);
  template <typename OnChunk>
  void begin_visit(const std::shared_ptr<StoreHandle>& handle, const std::shared_ptr<StoreHandle>& requests,
                   uint32_t store, uint32_t id, Said said, int64_t number, const HostArray& array, OnChunk on_chunk);

  const StoreClientOptions options_;
  const Interrupt interrupt_;
  DirectPath direct_;
  Remote remote_;                     // tells direct_ of servers that it has lost
  std::vector<ServerWords> servers_;  // since meet()
  Mutex mutex_;
  std::map<uint32_t, ClientStore> stores_ GUARDED_BY(mutex_);
  std::map<int, std::string> lost_ GUARDED_BY(mutex_);  // workers, and what is known of each
  // Of rounds, by TCP: they fail when a worker is lost.
  std::vector<std::weak_ptr<StoreHandle>> in_rounds_ GUARDED_BY(mutex_);
  std::vector<SharedPart> shared_parts_ GUARDED_BY(mutex_);
  std::map<std::thread::id, std::shared_ptr<StoreHandle>> abandoned_ GUARDED_BY(mutex_);
  // Of servers that are gone: something may still be at work with them.
  std::vector<std::unique_ptr<Actor>> former_ GUARDED_BY(mutex_);
  std::optional<Error> ended_ GUARDED_BY(mutex_);  // why it cannot be used any more
};

}  // namespace ringtrain
