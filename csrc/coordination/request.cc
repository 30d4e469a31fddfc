#include "coordination/request.h"

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

bool Request::operator==(const Request& other) const {
  return kind == other.kind && op == other.op && root == other.root && process_set == other.process_set &&
         prescale == other.prescale && postscale == other.postscale && is_in_arena == other.is_in_arena &&
         is_on_gpu == other.is_on_gpu && name == other.name && tensors == other.tensors && numbers == other.numbers;
}

size_t Request::bytes() const {
  size_t total = 0;
  for (const TensorSpec& tensor : tensors) total += tensor.bytes();
  return total;
}

std::string title_of(const Request& request) {
  if (request.kind >= OpKind::join) return name_of(request.kind);  // these have no name of the user
  return std::string(name_of(request.kind)) + " \"" + request.name + "\"";
}

void write(Writer& writer, const Request& request) {
  writer.put(request.kind);
  writer.put(request.op);
  writer.put(request.root);
  writer.put(request.process_set);
  writer.put(request.priority);
  writer.put(request.prescale);
  writer.put(request.postscale);
  writer.put(request.is_in_arena);
  writer.put(request.is_on_gpu);
  writer.put(request.name);
  writer.put(static_cast<uint32_t>(request.tensors.size()));
  for (const TensorSpec& tensor : request.tensors) {
    writer.put(tensor.dtype);
    writer.put(tensor.shape);
  }
  writer.put(request.numbers);
  writer.put(request.site ? *request.site : std::string());
}

Request read_request(Reader& reader) {
  Request request;
  reader.get(request.kind);
  reader.get(request.op);
  reader.get(request.root);
  reader.get(request.process_set);
  reader.get(request.priority);
  reader.get(request.prescale);
  reader.get(request.postscale);
  reader.get(request.is_in_arena);
  reader.get(request.is_on_gpu);
  reader.get(request.name);
  request.tensors.resize(reader.get<uint32_t>());
  for (TensorSpec& tensor : request.tensors) {
    reader.get(tensor.dtype);
    reader.get(tensor.shape);
  }
  reader.get(request.numbers);
  std::string site;
  reader.get(site);
  if (!site.empty()) request.site = std::make_shared<const std::string>(std::move(site));
  return request;
}

}  // namespace ringtrain
