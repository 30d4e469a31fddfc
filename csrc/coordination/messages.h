// Messages of a round with something new: the announcements of all ranks, and the decision of rank 0.
//
// Everything that arrives is checked here, and in read_operation() and read_agreement(): numbers of enums, counts,
// lengths, shapes, ranks and process sets. So a rank of another version, or one whose memory is damaged, ends the
// engine with an error that names it, and all code behind this may rely on what it is given.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/options.h"
#include "coordination/membership.h"
#include "coordination/plan.h"

namespace ringtrain {

struct Announced {
  Request request;
  double age_s;  // since the rank has submitted it
};

struct Announcement {
  std::vector<Announced> requests;
  bool is_leaving = false;
  bool has_been_blocked = false;  // without a break since the round began
  std::string whereabouts;        // the answer to the last question; empty: none
};

// First what is the same on most ranks, which travels once: see joined(). The ages are nearly always one.
class AnnouncementWriter {
 public:
  void add(const Request& request, double age_s);
  Bytes take(bool is_leaving, bool has_been_blocked, const std::string& whereabouts);

 private:
  Writer writer_;
  std::vector<std::pair<double, uint32_t>> ages_;  // and for how many requests, one after the other
};
// Throws failure, naming `rank`, for what no rank of this version sends.
Announcement read_announcement(const Bytes& bytes, int rank, int world_size, const Membership& membership);

struct Joined {
  int32_t process_set, rank;
};

// The message from rank 0 to all.
struct Decision {
  std::vector<Key> evicted;
  std::vector<Joined> joined;
  std::vector<Agreement> agreements;
  std::vector<int> left;
  std::optional<Tuning> tuning;
  std::string question;  // where the threads of all ranks are, and why; empty: none
};
Bytes to_bytes(const Decision& decision);
// Throws failure, naming rank 0, for what no rank of this version sends.
Decision read_decision(const Bytes& bytes, int world_size, const Membership& membership);

// Throws failure, naming rank 0, unless the agreement is about what this rank has asked for. `own`: null if `rank`,
// this one, has not announced it.
void require_own(const Agreement& agreement, const Request* own, int rank, const Membership& membership);

}  // namespace ringtrain
