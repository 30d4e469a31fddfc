#include "coordination/operation.h"

#include <cstdio>

namespace ringtrain {

const char* name_of(OpKind kind) {
  constexpr const char* kNames[] = {"allreduce", "allgather", "broadcast",       "alltoall",          "reducescatter",
                                    "barrier",   "join",      "add_process_set", "remove_process_set"};
  return kNames[static_cast<size_t>(kind)];
}

const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"Average", "Sum", "Min", "Max", "Product", "Adasum"};
  return kNames[static_cast<size_t>(op)];
}

bool Operation::operator==(const Operation& other) const {
  return holds_for_all_fields([&](const auto& field) { return this->*field.member == other.*field.member; });
}

size_t Operation::bytes() const {
  size_t total = 0;
  for (const TensorSpec& tensor : tensors) total += tensor.bytes();
  return total;
}

std::string title_of(const Operation& operation) {
  if (operation.kind >= OpKind::join) return name_of(operation.kind);  // these have no name of the user
  return std::string(name_of(operation.kind)) + " \"" + operation.name + "\"";
}

std::string tensors_text(const std::vector<TensorSpec>& tensors) {
  if (tensors.empty()) return "sent nothing";
  std::string text = "sent ";
  for (size_t i = 0; i < tensors.size(); ++i) text += (i ? " and " : "") + to_string(tensors[i]);
  return text;
}

std::string process_sets_text(const std::vector<int64_t>& numbers) {
  std::string text = "asked for process sets [";
  for (size_t i = 0; i < numbers.size(); ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + "]";
}

std::string factors_text(const Factors& factors) {
  char text[96];
  std::snprintf(text, sizeof(text), "used prescale_factor=%.9g and postscale_factor=%.9g", factors.prescale,
                factors.postscale);
  return text;
}

std::string quantizer_text(const Quantizer& quantizer) {
  if (quantizer.kind == Quantizer::Kind::none) return "sent all bits";
  const char* name = quantizer.kind == Quantizer::Kind::two_bit ? "two_bit" : "one_bit";
  char text[64];
  std::snprintf(text, sizeof(text), "used Compression.%s(%.9g)", name, static_cast<double>(quantizer.threshold));
  return text;
}

namespace {

template <typename Value>
void write_value(Writer& writer, const Value& value) {
  writer.put(value);
}

void write_value(Writer& writer, const std::vector<TensorSpec>& tensors) {
  writer.put(static_cast<uint32_t>(tensors.size()));
  for (const TensorSpec& tensor : tensors) {
    writer.put(tensor.dtype);
    writer.put(tensor.shape);
  }
}

template <typename Value>
void read_value(Reader& reader, Value& value) {
  reader.get(value);
}

void read_value(Reader& reader, std::vector<TensorSpec>& tensors) {
  tensors.resize(reader.get<uint32_t>());
  for (TensorSpec& tensor : tensors) {
    reader.get(tensor.dtype);
    reader.get(tensor.shape);
  }
}

}  // namespace

void write(Writer& writer, const Operation& operation) {
  for_each_field([&](const auto& field) { write_value(writer, operation.*field.member); });
}

Operation read_operation(Reader& reader) {
  Operation operation;
  for_each_field([&](const auto& field) { read_value(reader, operation.*field.member); });
  return operation;
}

void write(Writer& writer, const Request& request) {
  write(writer, request.operation);
  writer.put(request.priority);
  writer.put(request.site ? *request.site : std::string());
  writer.put(request.is_unordered);
}

Request read_request(Reader& reader) {
  Request request;
  request.operation = read_operation(reader);
  reader.get(request.priority);
  std::string site;
  reader.get(site);
  if (!site.empty()) request.site = std::make_shared<const std::string>(std::move(site));
  reader.get(request.is_unordered);
  return request;
}

}  // namespace ringtrain
