#include "coordination/plan.h"

#include <algorithm>

namespace ringtrain {

void write(Writer& writer, const Agreement& agreement) {
  write(writer, agreement.operation);
  writer.put(agreement.priority);
  writer.put(agreement.error);
  writer.put(agreement.message);
  writer.put(static_cast<uint32_t>(agreement.rows.size()));
  for (const auto& rows : agreement.rows) writer.put(rows);
  writer.put(agreement.result);
  writer.put(agreement.unnamed);
  writer.put(agreement.joined);
}

namespace {

// The ranks give as many rows as their memory holds, so the sum of their sizes is one, too.
void require_rows(const Agreement& agreement) {
  constexpr int64_t kMostBytes = int64_t{1} << 50;
  const std::vector<TensorSpec>& tensors = agreement.operation.tensors;
  const bool has_rows = agreement.error == ErrorKind::none && agreement.operation.kind == OpKind::allgather;
  if (agreement.rows.size() != (has_rows ? tensors.size() : 0)) throw failure("rows are not those of the tensors");
  for (size_t t = 0; t < agreement.rows.size(); ++t) {
    auto left = kMostBytes / std::max<int64_t>(1, static_cast<int64_t>(tensors[t].row_bytes()));
    for (const int64_t rows : agreement.rows[t]) {
      if (rows < 0 || rows > left) throw failure("a rank gives " + std::to_string(rows) + " rows");
      left -= rows;
    }
  }
}

}  // namespace

Agreement read_agreement(Reader& reader, int world_size) {
  Agreement agreement;
  agreement.operation = read_operation(reader, world_size);
  reader.get(agreement.priority);
  reader.get_enum(agreement.error, kLastErrorKind, "kind of error");
  reader.get(agreement.message);
  agreement.rows.resize(reader.get_count(sizeof(uint64_t)));
  for (auto& rows : agreement.rows) reader.get(rows);
  reader.get(agreement.result);
  reader.get(agreement.unnamed);
  reader.get(agreement.joined);
  require_rows(agreement);
  return agreement;
}

}  // namespace ringtrain
