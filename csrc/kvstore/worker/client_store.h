// A store as a worker knows it: its keys, where their pieces are, and how often it has pushed each.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "kvstore/store/actor.h"

namespace ringtrain {

// As the directory of the job has it: the same at all workers.
struct StoreKey {
  struct Piece {
    int server;
    uint64_t begin, count;  // elements
  };

  uint32_t id;  // unique in its store
  std::string name;
  DType dtype;
  uint64_t count;  // elements
  std::vector<Piece> pieces;
};

struct ClientPart {
  int server;
  uint32_t number;  // among those of the store at this server
  std::shared_ptr<const Layout> layout;
  std::unique_ptr<Actor> actor;  // null: it is reached by TCP
};

struct ClientPiece {
  std::shared_ptr<ClientPart> part;
  size_t number;  // among those of the Part
  uint64_t begin, count;
};

struct ClientKey {
  std::shared_ptr<const std::string> name;
  DType dtype;
  uint64_t count;
  std::vector<ClientPiece> pieces;
  uint64_t pushes = 0;  // of this worker
  uint64_t begun = 0;   // likewise, also failed ones
  std::shared_ptr<std::atomic<int64_t>> num_update = std::make_shared<std::atomic<int64_t>>(0);  // as far as is known
};

// Not shared between threads.
class ClientStore {
 public:
  ClientStore(uint32_t number, bool is_synchronous, int64_t max_staleness, bool is_atomic)
      : number_(number), is_synchronous_(is_synchronous), is_atomic_(is_atomic), max_staleness_(max_staleness) {}

  bool is_synchronous() const { return is_synchronous_; }
  bool waits_for_others() const { return is_synchronous_ || max_staleness_ != PartSpec::kNoBound; }
  // The part of new keys that a server keeps.
  PartSpec spec_of(int server, const std::vector<StoreKey>& keys, int capacity) const;

  // `pushes`: what the server has counted, by chunk, of this worker.
  void add_part(std::shared_ptr<ClientPart> part, const std::vector<uint64_t>& pushes);
  uint32_t parts_of(int server) const;
  std::vector<std::shared_ptr<ClientPart>> parts() const { return parts_; }
  // All parts of the keys are there. Throws failure where one is not, and invalid where a key is not as it was.
  void add_key(const StoreKey& key);
  bool has_key(uint32_t id) const { return keys_.count(id) != 0; }
  bool has_piece(int server, uint32_t key) const { return pieces_.count({server, key}) != 0; }
  ClientKey& key(uint32_t id);

  // The index of an array of a rule in a Part, by its name.
  size_t array_of(const std::string& name) const;
  void set_state_names(std::vector<std::string> names) { state_names_ = std::move(names); }

 private:
  const uint32_t number_;
  const bool is_synchronous_, is_atomic_;
  const int64_t max_staleness_;
  std::vector<std::shared_ptr<ClientPart>> parts_;
  std::map<std::pair<int, uint32_t>, std::pair<ClientPiece, uint64_t>> pieces_;  // by server and key; with its pushes
  std::map<uint32_t, ClientKey> keys_;
  std::vector<std::string> state_names_;  // of the rule
};

}  // namespace ringtrain
