#include "coordination/plan.h"

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

Agreement read_agreement(Reader& reader) {
  Agreement agreement;
  agreement.operation = read_operation(reader);
  reader.get(agreement.priority);
  reader.get(agreement.error);
  reader.get(agreement.message);
  agreement.rows.resize(reader.get<uint32_t>());
  for (auto& rows : agreement.rows) reader.get(rows);
  reader.get(agreement.result);
  reader.get(agreement.unnamed);
  reader.get(agreement.joined);
  return agreement;
}

}  // namespace ringtrain
