// Who a rank is, for people.
#pragma once

#include <cstdint>
#include <string>

namespace ringtrain {

struct RankName {
  int rank = 0;
  std::string host;
  int64_t pid = 0;
};

inline std::string to_string(const RankName& name) {  // "rank 3 (host h2, pid 4711)"
  return "rank " + std::to_string(name.rank) + " (host " + name.host + ", pid " + std::to_string(name.pid) + ")";
}

// What the others say of a rank whose process has ended without shutdown().
inline std::string is_gone(const RankName& name) {
  return to_string(name) +
         " is gone: its process was killed or exited early, without shutdown(). Look at the end of its output for the "
         "reason.";
}

}  // namespace ringtrain
