#include "kvstore/wire/message.h"

#include <utility>

namespace ringtrain {

void ServerWords::write(Writer& writer) const {
  writer.put(identity);
  writer.put(pid);
  writer.put(node);
}

ServerWords ServerWords::read(Reader& reader) {
  ServerWords words;
  reader.get(words.identity);
  reader.get(words.pid);
  reader.get(words.node);
  return words;
}

void PartWords::write(Writer& writer) const {
  writer.put(number);
  writer.put(ticket);
  writer.put(bytes);
  spec.put(writer);
  writer.put(pushes);
}

PartWords PartWords::read(Reader& reader) {
  PartWords words;
  reader.get(words.number);
  reader.get(words.ticket);
  reader.get(words.bytes);
  words.spec = PartSpec::get(reader);
  for (auto left = reader.get<uint64_t>(); left > 0; --left) words.pushes.push_back(reader.get<uint64_t>());
  return words;
}

void JoinWords::write(Writer& writer) const {
  writer.put(worker);
  writer.put(number);
}

JoinWords JoinWords::read(Reader& reader) {
  JoinWords words;
  reader.get(words.worker);
  reader.get(words.number);
  return words;
}

void NumberWords::write(Writer& writer) const { writer.put(numbers); }

NumberWords NumberWords::read(Reader& reader) { return {reader.get<std::vector<uint32_t>>()}; }

void EndedJoins::write(Writer& writer) const { write_list(writer, joins); }

EndedJoins EndedJoins::read(Reader& reader) { return {read_list<JoinWords>(reader)}; }

void RuleWords::write(Writer& writer) const {
  writer.put(name);
  writer.put(form);
  writer.put(static_cast<uint64_t>(numbers.size()));
  for (const auto& [number_name, value] : numbers) {
    writer.put(number_name);
    writer.put(value);
  }
  writer.put(keeps_states);
  writer.put(begin_num_update);
}

RuleWords RuleWords::read(Reader& reader) {
  RuleWords words;
  reader.get(words.name);
  reader.get(words.form);
  for (auto left = reader.get<uint64_t>(); left > 0; --left) {
    std::string number_name;
    reader.get(number_name);
    words.numbers.emplace_back(std::move(number_name), reader.get<double>());
  }
  reader.get(words.keeps_states);
  reader.get(words.begin_num_update);
  return words;
}

}  // namespace ringtrain
