// The Parts that a process has: a server those that it keeps, a worker those that it shares with servers of its host.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "kvstore/store/part.h"

namespace ringtrain {

// Any thread.
class PartTable {
 public:
  // Where a server keeps its piece of a key.
  struct Place {
    std::shared_ptr<Part> part;  // null: it has none
    size_t piece = 0;
  };

  // Throws invalid where a key of the store is there already.
  void add(uint32_t store, const std::shared_ptr<Part>& part);
  Place find(uint32_t store, uint32_t key) const;
  // In the order in which they were added.
  std::vector<std::shared_ptr<Part>> parts(uint32_t store) const;

  // Makes the table of a server known to the workers of this process until withdraw(). `identity`: of the server.
  static void announce(uint64_t identity, const std::shared_ptr<PartTable>& table);
  static void withdraw(uint64_t identity);
  // Returns the table of this server if it is one of this process, else null.
  static std::shared_ptr<PartTable> of_server(uint64_t identity);

 private:
  mutable Mutex mutex_;
  std::map<std::pair<uint32_t, uint32_t>, Place> places_ GUARDED_BY(mutex_);
  std::map<uint32_t, std::vector<std::shared_ptr<Part>>> parts_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
