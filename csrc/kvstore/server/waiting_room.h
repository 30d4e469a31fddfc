// Requests that wait at a server: for a round to close, for slow workers to come nearer, or for a chunk that somebody
// holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "kvstore/store/part.h"

namespace ringtrain {

// One thread of a server, whose Parts outlive this. Who is told of a change tries again, and stays if it was in vain.
class WaitingRoom {
 public:
  struct Name {
    uint64_t session;  // number of the connection that has asked
    uint32_t id;       // of its request
    bool operator<(const Name& other) const {
      return session != other.session ? session < other.session : id < other.id;
    }
  };
  // Whether it has its answer now. Does not throw.
  using Attempt = std::function<bool()>;

  // Whether it is here already.
  bool has(const Name& name) const { return names_.count(name) != 0; }
  // It is tried once more before this returns: what it waits for may just have happened.
  void enter(const Name& name, Part& part, size_t chunk, Attempt attempt);
  void leave(uint64_t session);

  void try_chunk(Part& part, size_t chunk);
  void try_all();
  size_t size() const { return names_.size(); }

 private:
  struct Guest {
    Name name;
    Attempt attempt;
  };
  using Place = std::pair<Part*, size_t>;
  using Tables = std::map<Place, std::vector<Guest>>;

  void try_table(Tables::value_type& table);
  void note_left(Part& part, const Name& name);

  Tables tables_;
  std::set<Name> names_;
};

}  // namespace ringtrain
