#include "coordination/plan.h"

#include <functional>
#include <numeric>
#include <unordered_map>

namespace ringtrain {
namespace {

// The ranks give as many rows as their memory holds, so the sum of their sizes is one, too.
void require_rows(const Agreement& agreement) {
  constexpr int64_t kMostBytes = int64_t{1} << 50;
  const std::vector<TensorSpec>& tensors = agreement.operation.tensors;
  const bool has_rows = agreement.error == ErrorKind::none && agreement.operation.kind == OpKind::allgather;
  if (agreement.rows.size() != (has_rows ? tensors.size() : 0)) throw failure("the rows do not match the tensors");
  for (size_t t = 0; t < agreement.rows.size(); ++t) {
    auto left = kMostBytes / std::max<int64_t>(1, static_cast<int64_t>(tensors[t].row_bytes()));
    for (const int64_t rows : agreement.rows[t]) {
      if (rows < 0 || rows > left) throw failure("a rank gives " + std::to_string(rows) + " rows");
      left -= rows;
    }
  }
}

// Whatever their dtypes. An alltoall does so, too, but no rank knows what the others send.
bool only_moves_bytes(const Operation& operation) {
  return operation.kind == OpKind::broadcast || operation.kind == OpKind::allgather;
}

bool reduces(const Operation& operation) {
  return operation.kind == OpKind::allreduce || operation.kind == OpKind::reducescatter;
}

bool is_fusable(const Agreement& agreement) {
  const std::vector<TensorSpec>& tensors = agreement.operation.tensors;
  if (agreement.error != ErrorKind::none || tensors.empty()) return false;
  if (only_moves_bytes(agreement.operation)) return true;
  return reduces(agreement.operation) && std::all_of(tensors.begin(), tensors.end(), [&](const TensorSpec& tensor) {
           return tensor.dtype == tensors.front().dtype;
         });
}

// Returns the same for two operations that can be joined, and something else for most that cannot: in a round each
// operation may be of a kind of its own, such as by its factors.
size_t hash_of_kind(const Operation& operation) {
  constexpr size_t kSpread = 0x9E3779B97F4A7C15;
  const auto op = static_cast<size_t>(operation.op), kind = static_cast<size_t>(operation.kind);
  const std::hash<double> hash;
  size_t sum = static_cast<size_t>(operation.process_set);
  for (const size_t part : {kind, op, static_cast<size_t>(operation.root), hash(operation.factors.prescale),
                            hash(operation.factors.postscale)})
    sum = (sum ^ (sum >> 32)) * kSpread + part;
  return sum;
}

// Whether two such operations can be done as one.
bool can_be_joined(const Operation& a, const Operation& b) {
  const bool are_alike = only_moves_bytes(a) || a.tensors.front().dtype == b.tensors.front().dtype;
  return are_alike && holds_for_all_fields(
                          [&](const auto& field) { return !field.splits_plans || a.*field.member == b.*field.member; });
}

// The same on all ranks, whatever rows each of them gives.
size_t bytes_of(const Agreement& agreement) {
  if (agreement.operation.kind != OpKind::allgather) return agreement.operation.bytes();
  size_t bytes = 0;
  for (size_t t = 0; t < agreement.rows.size(); ++t) {
    const std::vector<int64_t>& rows = agreement.rows[t];
    bytes += static_cast<size_t>(std::accumulate(rows.begin(), rows.end(), int64_t{0})) *
             agreement.operation.tensors[t].row_bytes();
  }
  return bytes;
}

struct OpenPlan {
  const Operation* like;  // what can be joined to this one
  size_t index, bytes;
};

std::string title_of(const std::vector<AgreementPtr>& parts) {
  const std::string first = title_of(parts.front()->operation);
  return parts.size() == 1 ? first : first + " and " + std::to_string(parts.size() - 1) + " more";
}

}  // namespace

void write(Writer& writer, const Agreement& agreement, const Agreement& before) {
  write(writer, agreement.operation);
  writer.put(agreement.priority);
  writer.put(agreement.error);
  writer.put(agreement.result);
  writer.put(agreement.unnamed);
  writer.put(agreement.message == before.message);
  if (agreement.message != before.message) writer.put(agreement.message);
  writer.put(agreement.joined == before.joined);
  if (agreement.joined != before.joined) writer.put(agreement.joined);
  writer.put(agreement.rows == before.rows);
  if (agreement.rows == before.rows) return;
  writer.put(static_cast<uint32_t>(agreement.rows.size()));
  for (const auto& rows : agreement.rows) writer.put(rows);
}

Agreement read_agreement(Reader& reader, int world_size, const Agreement& before) {
  Agreement agreement;
  agreement.operation = read_operation(reader, world_size);
  reader.get(agreement.priority);
  reader.get_enum(agreement.error, kLastErrorKind, "kind of error");
  reader.get(agreement.result);
  reader.get(agreement.unnamed);
  agreement.message = reader.get<bool>() ? before.message : reader.get<std::string>();
  agreement.joined = reader.get<bool>() ? before.joined : reader.get<std::vector<int>>();
  if (reader.get<bool>()) {
    agreement.rows = before.rows;
  } else {
    agreement.rows.resize(reader.get_count(sizeof(uint64_t)));
    for (auto& rows : agreement.rows) reader.get(rows);
  }
  require_rows(agreement);
  return agreement;
}

std::vector<PlanPtr> fuse(std::vector<AgreementPtr> agreements, size_t threshold_bytes) {
  std::stable_sort(agreements.begin(), agreements.end(),
                   [](const AgreementPtr& a, const AgreementPtr& b) { return a->priority > b->priority; });
  std::vector<std::vector<AgreementPtr>> parts;
  std::unordered_multimap<size_t, OpenPlan> open;
  for (AgreementPtr& agreement : agreements) {
    if (is_fusable(*agreement)) {
      const Operation& operation = agreement->operation;
      const size_t bytes = bytes_of(*agreement);
      const size_t hash = hash_of_kind(operation);
      const auto [first, end] = open.equal_range(hash);
      const auto it =
          std::find_if(first, end, [&](const auto& entry) { return can_be_joined(*entry.second.like, operation); });
      if (it != end && it->second.bytes + bytes <= threshold_bytes) {
        it->second.bytes += bytes;
        parts[it->second.index].push_back(std::move(agreement));
        continue;
      }
      if (it != end) open.erase(it);
      open.emplace(hash, OpenPlan{&operation, parts.size(), bytes});
    }
    parts.emplace_back().push_back(std::move(agreement));
  }
  std::vector<PlanPtr> plans;
  for (std::vector<AgreementPtr>& of_plan : parts) {
    std::string title = title_of(of_plan);
    plans.push_back(std::make_shared<const Plan>(Plan{std::move(of_plan), std::move(title)}));
  }
  return plans;
}

}  // namespace ringtrain
