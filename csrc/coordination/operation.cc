#include "coordination/operation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

namespace ringtrain {

const char* name_of(OpKind kind) {
  constexpr const char* kNames[] = {
      "allreduce", "allgather",       "broadcast",          "alltoall",         "reducescatter",     "barrier",
      "join",      "add_process_set", "remove_process_set", "open_process_set", "close_process_set", "transfer"};
  return kNames[static_cast<size_t>(kind)];
}

const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"Average", "Sum", "Min", "Max", "Product", "Adasum"};
  return kNames[static_cast<size_t>(op)];
}

bool Operation::operator==(const Operation& other) const {
  return holds_for_all_fields([&](const auto& field) { return this->*field.member == other.*field.member; });
}

bool Request::operator==(const Request& other) const {
  const auto are_same = [](const std::shared_ptr<const std::string>& a, const std::shared_ptr<const std::string>& b) {
    return a == b || (a && b && *a == *b);
  };
  return operation == other.operation && priority == other.priority && is_unordered == other.is_unordered &&
         are_same(site, other.site) && are_same(title, other.title);
}

size_t Operation::bytes() const {
  size_t total = 0;
  for (const TensorSpec& tensor : tensors) total += tensor.bytes();
  return total;
}

namespace {

std::string title_of_message(const std::vector<int64_t>& numbers) {
  const std::string source = numbers[0] == kAnySource ? "any rank" : "rank " + std::to_string(numbers[0]);
  return "transfer \"message from " + source + " to " + std::to_string(numbers[1]) + ", tag " +
         std::to_string(numbers[2]) + "\"";
}

}  // namespace

std::string title_of(const Operation& operation) {
  if (operation.kind == OpKind::transfer) return title_of_message(operation.numbers);
  const bool is_named = operation.kind < OpKind::join || operation.kind > OpKind::close_process_set;
  if (!is_named) return name_of(operation.kind);  // these have no name of the user
  return std::string(name_of(operation.kind)) + " \"" + operation.name + "\"";
}

std::string_view kind_of(const Request& request) {
  if (!request.title) return name_of(request.operation.kind);
  return std::string_view(*request.title).substr(0, request.title->find(' '));
}

std::string title_of(const Request& request) { return request.title ? *request.title : title_of(request.operation); }

std::string tensors_text(const std::vector<TensorSpec>& tensors) {
  if (tensors.empty()) return "sent nothing";
  std::string text = "sent ";
  for (size_t i = 0; i < tensors.size(); ++i) text += (i ? " and " : "") + to_string(tensors[i]);
  return text;
}

std::vector<int> participants_of(const Operation& operation) {
  const std::vector<int64_t>& numbers = operation.numbers;
  std::vector<int> ranks;
  if (operation.kind == OpKind::open_process_set) ranks.assign(numbers.begin(), numbers.end());
  if (operation.kind == OpKind::close_process_set) ranks.assign(numbers.begin() + 1, numbers.end());
  if (operation.kind == OpKind::transfer)
    ranks.assign(numbers.begin() + (numbers[0] == kAnySource ? 1 : 0), numbers.begin() + 2);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
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

void read_value(Reader& reader, OpKind& kind) { reader.get_enum(kind, kLastOpKind, "kind of operation"); }
void read_value(Reader& reader, ReduceOp& op) { reader.get_enum(op, kLastReduceOp, "op"); }

void read_value(Reader& reader, Quantizer& quantizer) {
  reader.get(quantizer);
  if (quantizer.kind > Quantizer::Kind::one_bit)
    throw failure("compression " + std::to_string(static_cast<uint32_t>(quantizer.kind)) + " does not exist");
  const bool is_valid = std::isfinite(quantizer.threshold) && quantizer.threshold >= 0;
  if (quantizer.kind != Quantizer::Kind::none && !is_valid) throw failure("a threshold is not a number from 0 on");
}

// Throws for more bytes than any memory has: sums of accepted sizes stay exact.
void require_size(const TensorSpec& tensor) {
  constexpr int64_t kMostBytes = int64_t{1} << 50;
  auto left = kMostBytes / static_cast<int64_t>(size_of(tensor.dtype));
  for (const int64_t length : tensor.shape) {
    if (length < 0 || length > left) throw failure("the shape of a tensor is " + to_string(tensor));
    if (length > 0) left /= length;
  }
}

void read_value(Reader& reader, std::vector<TensorSpec>& tensors) {
  tensors.resize(reader.get_count(sizeof(DType) + sizeof(uint64_t)));
  for (TensorSpec& tensor : tensors) {
    reader.get_enum(tensor.dtype, static_cast<DType>(kDTypes - 1), "dtype");
    reader.get(tensor.shape);
    require_size(tensor);
  }
}

bool can_be_weighted(const Operation& operation) {
  return (operation.kind == OpKind::allreduce || operation.kind == OpKind::reducescatter) &&
         operation.op == ReduceOp::average &&
         std::all_of(operation.tensors.begin(), operation.tensors.end(),
                     [](const TensorSpec& tensor) { return is_float(tensor.dtype); });
}

bool has_rows(const TensorSpec& tensor) { return !tensor.shape.empty(); }

// Throws if fields that depend on each other do not fit.
void require_valid(const Operation& operation, int world_size) {
  const auto require = [&](bool holds, const char* what) {
    if (!holds) throw failure(std::string(name_of(operation.kind)) + " has " + what);
  };
  const auto is_rank = [&](int64_t number) { return number >= 0 && number < world_size; };
  const std::vector<int64_t>& numbers = operation.numbers;
  require((operation.name == kJoinName) == (operation.kind == OpKind::join), "the name of another kind of operation");
  require(!operation.is_weighted || can_be_weighted(operation), "a weight, which is for averages of floats");
  require(operation.name != kEndName || operation.kind == OpKind::barrier, "the name of the barrier at the end");
  switch (operation.kind) {
    case OpKind::allgather:
    case OpKind::alltoall:
    case OpKind::reducescatter:
      return require(std::all_of(operation.tensors.begin(), operation.tensors.end(), &has_rows),
                     "a tensor without a first dimension");
    case OpKind::broadcast:
      return require(is_rank(operation.root), "a root that is not a rank of the job");
    case OpKind::join:
      return require(numbers.size() == 1 && numbers.front() >= 0, "no count of operations without a name");
    case OpKind::open_process_set:
    case OpKind::add_process_set: {
      const bool are_ranks = std::all_of(numbers.begin(), numbers.end(), is_rank);
      const bool differ = std::set<int64_t>(numbers.begin(), numbers.end()).size() == numbers.size();
      const bool has_enough = operation.kind == OpKind::add_process_set || !numbers.empty();
      return require(are_ranks && differ && has_enough && operation.process_set == 0, "no list of different ranks");
    }
    case OpKind::remove_process_set: {
      const bool is_one = numbers.size() == 1 && numbers.front() > 0 && numbers.front() <= INT32_MAX;
      return require(is_one && operation.process_set == 0, "no id of a process set");
    }
    case OpKind::close_process_set: {
      const bool is_one = numbers.size() > 1 && numbers.front() > 0 && numbers.front() <= INT32_MAX;
      const bool are_ranks = is_one && std::all_of(numbers.begin() + 1, numbers.end(), is_rank);
      return require(are_ranks && operation.process_set == 0, "no id and ranks of a process set");
    }
    case OpKind::transfer:
      require(operation.tensors.size() == 1 && !operation.is_on_gpu, "other tensors than one in host memory");
      return require(numbers.size() == 4 && (is_rank(numbers[0]) || numbers[0] == kAnySource) && is_rank(numbers[1]) &&
                         numbers[0] != numbers[1] && numbers[3] >= -1,
                     "no two ranks, tag and number");
    default:
      return;
  }
}

}  // namespace

void write(Writer& writer, const Operation& operation) {
  for_each_field([&](const auto& field) { write_value(writer, operation.*field.member); });
}

Operation read_operation(Reader& reader, int world_size) {
  Operation operation;
  for_each_field([&](const auto& field) { read_value(reader, operation.*field.member); });
  require_valid(operation, world_size);
  return operation;
}

void write(Writer& writer, const Request& request) {
  write(writer, request.operation);
  writer.put(request.priority);
  for (const auto& text : {request.site, request.title}) writer.put(text ? *text : std::string());
  writer.put(request.is_unordered);
}

Request read_request(Reader& reader, int world_size) {
  Request request;
  request.operation = read_operation(reader, world_size);
  reader.get(request.priority);
  for (auto* const place : {&request.site, &request.title}) {
    std::string text;
    reader.get(text);
    if (!text.empty()) *place = std::make_shared<const std::string>(std::move(text));
  }
  reader.get(request.is_unordered);
  return request;
}

}  // namespace ringtrain
