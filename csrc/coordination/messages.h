// Messages of a round with something new: the announcements of all ranks, and the decision of rank 0.
//
// Everything that arrives is checked here, and in read_operation() and read_agreement(): numbers of enums, counts,
// lengths, shapes, ranks and process sets. So a rank of another version, or one whose memory is damaged, ends the
// engine with an error that names it, and all code behind this may rely on what it is given.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/options.h"
#include "coordination/channel.h"
#include "coordination/gathered.h"
#include "coordination/membership.h"
#include "coordination/plan.h"
#include "coordination/rank_set.h"

namespace ringtrain {

// Begins with the requests, which are the same on most ranks and so travel once: see Gathered. Ends with what differs.
// The ages are nearly always one.
class AnnouncementWriter {
 public:
  // `age_s`: since the rank has submitted it.
  void add(const Request& request, double age_s);
  // The last part. `has_been_blocked`: without a break since the round began. `on_their_way`: words of messages that
  // this rank has sent, less those that it has received. `withdrawn`: announced ends of messages whose other ends have
  // come. `whereabouts`: the answer to the last question; empty: none.
  Bytes take(bool is_leaving, bool has_been_blocked, int64_t on_their_way, const std::vector<Key>& withdrawn,
             const std::string& whereabouts);

 private:
  Writer writer_;
  std::vector<std::pair<double, uint32_t>> ages_;  // and for how many requests, one after the other
};

// A request that is the same on some ranks.
struct Announced {
  Request request;
  RankSet ranks;
  double oldest_s, youngest_s;  // ages
};

// The announcements of all ranks. N ranks that announce the same K requests are K entries, which are read once.
struct Announcements {
  std::vector<Announced> requests;
  std::vector<int> leaving;
  bool have_been_blocked = true;  // all of them
  int64_t on_their_way = 0;       // words of messages that have been sent and not received
  std::vector<Key> withdrawn;
  std::vector<std::pair<int, std::string>> whereabouts;  // of ranks that have answered
};
// `ranks`: of each place in `gathered`. Throws failure, naming the rank, for what no rank of this version sends.
Announcements read_announcements(const Gathered& gathered, const std::vector<int>& ranks, const Membership& membership);

struct Joined {
  int32_t process_set, rank;
};

// The message from rank 0 to all.
struct Decision {
  Words evicted;  // bits of slots of the cache, so that its size does not grow with the ranks
  std::vector<Joined> joined;
  std::vector<Agreement> agreements;
  std::vector<int> left;
  std::optional<Tuning> tuning;
  std::string question;  // where the threads of all ranks are, and why; empty: none
};
Bytes to_bytes(const Decision& decision);
// Throws failure, naming rank 0, for what no rank of this version sends.
Decision read_decision(const Bytes& bytes, const Membership& membership);

// Throws failure, naming rank 0, unless the agreement is about what this rank has asked for. `own`: null if `rank`,
// this one, has not announced it.
void require_own(const Agreement& agreement, const Request* own, int rank, const Membership& membership);

}  // namespace ringtrain
