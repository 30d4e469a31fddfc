#include "coordination/messages.h"

#include <algorithm>
#include <functional>

#include "coordination/ledger.h"
#include "coordination/wire.h"

namespace ringtrain {
namespace {

// Returns what read() returns. Adds the name of the rank to errors.
template <typename Read>
auto read_from(int rank, const char* what, Read read) {
  try {
    return read();
  } catch (const std::exception& error) {
    throw invalid_from(rank, std::string(what) + " that is invalid: " + error.what());
  }
}

void require(bool holds, const std::string& what) {
  if (!holds) throw failure(what);
}

void require_rank(int rank, int world_size) {
  require(rank >= 0 && rank < world_size, "rank " + std::to_string(rank) + " does not exist");
}

void require_agreed_by_ranks(const Agreement& agreement, int world_size, const Membership& membership) {
  const Operation& operation = agreement.operation;
  const std::vector<int>& joined = agreement.joined;
  for (const int rank : joined) require_rank(rank, world_size);
  require(std::adjacent_find(joined.begin(), joined.end(), std::greater_equal<>()) == joined.end(),
          "the joined ranks are not in ascending order");
  if (agreement.error != ErrorKind::none) return;
  require(joined.empty() || (Ledger::can_join(operation) && !operation.is_registered),
          "joined ranks cannot take part in this operation");
  require(agreement.unnamed >= 0, "a count of operations without a name is negative");
  if (!membership.has(operation.process_set)) return;
  const size_t ranks = membership.ranks(operation.process_set).size();
  for (const std::vector<int64_t>& rows : agreement.rows)
    require(rows.size() == ranks, "the rows do not match the ranks");
}

void require_usable(const Tuning& tuning) {
  constexpr size_t kLeast = 64, kMost = size_t{1} << 40;
  for (const size_t bytes : {tuning.mailbox_bytes, tuning.ring_chunk_bytes})
    require(bytes >= kLeast && bytes <= kMost, "a size is " + std::to_string(bytes) + " bytes");
}

void require_may_announce(const Operation& operation, int rank, const Membership& membership) {
  const int set = operation.process_set;
  // A set that was removed meanwhile has no members any more.
  require(!membership.has(set) || membership.contains(set, rank),
          "the rank does not belong to process set " + std::to_string(set));
  if (!is_of_participants(operation.kind)) return;
  const std::vector<int> participants = participants_of(operation);
  require(std::binary_search(participants.begin(), participants.end(), rank),
          title_of(operation) + " is not for this rank");
}

// Reads one announcement after the other. A request within the bytes that are alike is one that was read before.
class AnnouncementsReader {
 public:
  AnnouncementsReader(const std::vector<int>& ranks, const Membership& membership)
      : ranks_(ranks), membership_(membership) {}

  void read(const Bytes& message, size_t kind, size_t alike) {
    if (kind == of_kind_.size()) of_kind_.emplace_back();
    std::vector<Known>& requests = of_kind_[kind];
    while (!requests.empty() && requests.back().end > alike) requests.pop_back();
    const int rank = ranks_[place_++];
    read_from(rank, "an announcement", [&] {
      Reader reader(message, requests.empty() ? 0 : requests.back().end);
      while (reader.get<bool>()) {
        all_.requests.push_back({read_request(reader, membership_.world_size()), {}, 0, kLongest_s});
        requests.push_back({all_.requests.size() - 1, reader.bytes_read()});
      }
      if (reader.get<bool>()) all_.leaving.push_back(rank);
      all_.have_been_blocked &= reader.get<bool>();
      all_.on_their_way += reader.get<int64_t>();
      for (auto count = reader.get_count(sizeof(int32_t) + sizeof(uint64_t)); count > 0; --count) {
        const auto process_set = reader.get<int32_t>();
        all_.withdrawn.emplace_back(process_set, reader.get<std::string>());
      }
      if (auto whereabouts = reader.get<std::string>(); !whereabouts.empty())
        all_.whereabouts.emplace_back(rank, std::move(whereabouts));
      read_ages(reader, requests, rank);
      reader.require_end();
    });
  }

  Announcements take() { return std::move(all_); }

 private:
  static constexpr double kLongest_s = 1e9;

  struct Known {
    size_t index;  // in all_.requests
    size_t end;    // in the message, behind it
  };

  void read_ages(Reader& reader, const std::vector<Known>& requests, int rank) {
    for (size_t i = 0; i < requests.size();) {
      const auto age = reader.get<double>();
      const auto count = reader.get<uint32_t>();
      require(age >= 0 && age < kLongest_s, "an age is not a number of seconds");
      require(count > 0 && count <= requests.size() - i, "the ages do not match the requests");
      for (const size_t end = i + count; i < end; ++i) note(all_.requests[requests[i].index], rank, age);
    }
  }

  void note(Announced& announced, int rank, double age) {
    const Operation& operation = announced.request.operation;
    if (operation.process_set != 0 || is_of_participants(operation.kind))
      require_may_announce(operation, rank, membership_);
    announced.ranks.add(rank);
    announced.oldest_s = std::max(announced.oldest_s, age);
    announced.youngest_s = std::min(announced.youngest_s, age);
  }

  const std::vector<int>& ranks_;
  const Membership& membership_;
  size_t place_ = 0;
  std::vector<std::vector<Known>> of_kind_;  // the requests of the last announcement of each kind
  Announcements all_;
};

}  // namespace

void AnnouncementWriter::add(const Request& request, double age_s) {
  writer_.put(true);
  write(writer_, request);
  if (ages_.empty() || ages_.back().first != age_s) ages_.emplace_back(age_s, 0);
  ++ages_.back().second;
}

Bytes AnnouncementWriter::take(bool is_leaving, bool has_been_blocked, int64_t on_their_way,
                               const std::vector<Key>& withdrawn, const std::string& whereabouts) {
  writer_.put(false);
  writer_.put(is_leaving);
  writer_.put(has_been_blocked);
  writer_.put(on_their_way);
  writer_.put(static_cast<uint32_t>(withdrawn.size()));
  for (const auto& [process_set, name] : withdrawn) {
    writer_.put(process_set);
    writer_.put(name);
  }
  writer_.put(whereabouts);
  for (const auto& [age, count] : ages_) {
    writer_.put(age);
    writer_.put(count);
  }
  return writer_.take();
}

Announcements read_announcements(const Gathered& gathered, const std::vector<int>& ranks,
                                 const Membership& membership) {
  AnnouncementsReader reader(ranks, membership);
  gathered.for_each([&](const Bytes& message, size_t kind, size_t alike) { reader.read(message, kind, alike); });
  return reader.take();
}

Bytes to_bytes(const Decision& decision) {
  Writer writer;
  writer.put(decision.evicted);
  writer.put(decision.joined);
  writer.put(static_cast<uint32_t>(decision.agreements.size()));
  const Agreement none;
  const Agreement* before = &none;
  for (const Agreement& agreement : decision.agreements) write(writer, agreement, *std::exchange(before, &agreement));
  writer.put(decision.left);
  writer.put(decision.tuning.has_value());
  if (decision.tuning) writer.put(*decision.tuning);
  writer.put(decision.question);
  return writer.take();
}

Decision read_decision(const Bytes& bytes, const Membership& membership) {
  const int world_size = membership.world_size();
  return read_from(0, "a decision", [&] {
    Reader reader(bytes);
    Decision decision;
    reader.get(decision.evicted);
    reader.get(decision.joined);
    for (const Joined& joined : decision.joined) require_rank(joined.rank, world_size);
    const Agreement none;
    for (auto count = reader.get_count(1); count > 0; --count) {
      const Agreement& before = decision.agreements.empty() ? none : decision.agreements.back();
      decision.agreements.push_back(read_agreement(reader, world_size, before));
      require_agreed_by_ranks(decision.agreements.back(), world_size, membership);
    }
    reader.get(decision.left);
    for (const int rank : decision.left) require_rank(rank, world_size);
    if (reader.get<bool>()) {
      decision.tuning = reader.get<Tuning>();
      require_usable(*decision.tuning);
    }
    reader.get(decision.question);
    reader.require_end();
    return decision;
  });
}

void require_own(const Agreement& agreement, const Request* own, int rank, const Membership& membership) {
  const Operation& agreed = agreement.operation;
  if (agreement.error != ErrorKind::none || !own) return;
  const int place = membership.place(agreed.process_set, rank);
  bool has_own_rows = true;
  for (size_t t = 0; t < agreement.rows.size() && place >= 0; ++t)
    has_own_rows &= t < own->operation.tensors.size() &&
                    agreement.rows[t][static_cast<size_t>(place)] == own->operation.tensors[t].shape.front();
  // How many operations without a name a rank has submitted is its own affair.
  const bool is_alike =
      agreed.kind == OpKind::join ? own->operation.kind == OpKind::join : are_alike(agreed, own->operation);
  const bool is_own = is_alike && has_own_rows && !agreement.has_joined(rank) &&
                      (own->operation.is_registered || !agreed.is_registered);
  if (!is_own)
    throw invalid_from(0, "a decision about " + title_of(agreed) + " that is not what rank " + std::to_string(rank) +
                              " has asked for");
}

}  // namespace ringtrain
