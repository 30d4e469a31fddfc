#include "coordination/messages.h"

#include <algorithm>

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

std::vector<double> read_ages(Reader& reader, size_t requests) {
  constexpr double kLongest_s = 1e9;
  std::vector<double> ages;
  while (ages.size() < requests) {
    const auto age = reader.get<double>();
    const auto count = reader.get<uint32_t>();
    require(age >= 0 && age < kLongest_s, "an age is not a number of seconds");
    require(count > 0 && count <= requests - ages.size(), "the ages do not match the requests");
    ages.insert(ages.end(), count, age);
  }
  return ages;
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

}  // namespace

void AnnouncementWriter::add(const Request& request, double age_s) {
  writer_.put(true);
  write(writer_, request);
  if (ages_.empty() || ages_.back().first != age_s) ages_.emplace_back(age_s, 0);
  ++ages_.back().second;
}

Bytes AnnouncementWriter::take(bool is_leaving, bool has_been_blocked, const std::string& whereabouts) {
  writer_.put(false);
  writer_.put(is_leaving);
  writer_.put(has_been_blocked);
  writer_.put(whereabouts);
  for (const auto& [age, count] : ages_) {
    writer_.put(age);
    writer_.put(count);
  }
  return writer_.take();
}

Announcement read_announcement(const Bytes& bytes, int rank, int world_size, const Membership& membership) {
  return read_from(rank, "an announcement", [&] {
    Reader reader(bytes);
    Announcement announcement;
    while (reader.get<bool>()) {
      announcement.requests.push_back({read_request(reader, world_size), 0});
      // A set that was removed meanwhile has no members any more.
      const int set = announcement.requests.back().request.operation.process_set;
      require(!membership.has(set) || membership.contains(set, rank),
              "the rank does not belong to process set " + std::to_string(set));
      const Operation& operation = announcement.requests.back().request.operation;
      const std::vector<int> participants = participants_of(operation);
      require(!is_of_participants(operation.kind) || std::binary_search(participants.begin(), participants.end(), rank),
              title_of(operation) + " is not for this rank");
    }
    reader.get(announcement.is_leaving);
    reader.get(announcement.has_been_blocked);
    reader.get(announcement.whereabouts);
    const std::vector<double> ages = read_ages(reader, announcement.requests.size());
    for (size_t i = 0; i < ages.size(); ++i) announcement.requests[i].age_s = ages[i];
    reader.require_end();
    return announcement;
  });
}

Bytes to_bytes(const Decision& decision) {
  Writer writer;
  writer.put(static_cast<uint32_t>(decision.evicted.size()));
  for (const auto& [process_set, name] : decision.evicted) {
    writer.put(process_set);
    writer.put(name);
  }
  writer.put(decision.joined);
  writer.put(static_cast<uint32_t>(decision.agreements.size()));
  for (const Agreement& agreement : decision.agreements) write(writer, agreement);
  writer.put(decision.left);
  writer.put(decision.tuning.has_value());
  if (decision.tuning) writer.put(*decision.tuning);
  writer.put(decision.question);
  return writer.take();
}

Decision read_decision(const Bytes& bytes, int world_size, const Membership& membership) {
  return read_from(0, "a decision", [&] {
    Reader reader(bytes);
    Decision decision;
    decision.evicted.resize(reader.get_count(sizeof(int32_t) + sizeof(uint64_t)));
    for (auto& [process_set, name] : decision.evicted) {
      reader.get(process_set);
      reader.get(name);
    }
    reader.get(decision.joined);
    for (const Joined& joined : decision.joined) require_rank(joined.rank, world_size);
    for (auto count = reader.get_count(1); count > 0; --count) {
      decision.agreements.push_back(read_agreement(reader, world_size));
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
