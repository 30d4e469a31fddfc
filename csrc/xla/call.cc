#include "xla/call.h"

#include <atomic>
#include <functional>
#include <numeric>
#include <sstream>

namespace ringtrain::xla {
namespace {

std::atomic<int> api_minor{1};

DType dtype_of(Element element) {
  switch (element) {
    case Element::boolean:
      return DType::boolean;
    case Element::int8:
      return DType::int8;
    case Element::int16:
      return DType::int16;
    case Element::int32:
      return DType::int32;
    case Element::int64:
      return DType::int64;
    case Element::uint8:
      return DType::uint8;
    case Element::uint16:
      return DType::uint16;
    case Element::uint32:
      return DType::uint32;
    case Element::uint64:
      return DType::uint64;
    case Element::float16:
      return DType::float16;
    case Element::bfloat16:
      return DType::bfloat16;
    case Element::float32:
    case Element::complex64:
      return DType::float32;
    case Element::float64:
    case Element::complex128:
      return DType::float64;
    default:
      throw invalid("XLA's element type " + std::to_string(static_cast<int>(element)) + " cannot be sent");
  }
}

Code code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid:
    case ErrorKind::mismatch:
      return Code::invalid_argument;
    case ErrorKind::stalled:
      return Code::deadline_exceeded;
    case ErrorKind::peer_lost:
      return Code::unavailable;
    case ErrorKind::shut_down:
    case ErrorKind::remote:
    case ErrorKind::deadlock:
      return Code::aborted;
    default:
      return Code::internal;
  }
}

}  // namespace

const void* Call::attribute(std::string_view name) const {
  const Attributes& all = frame_.attributes;
  for (int64_t i = 0; i < all.count; ++i)
    if (std::string_view(all.names[i]->begin, all.names[i]->length) == name) return all.items[i];
  throw invalid("XLA's call lacks the attribute " + std::string(name));
}

int64_t Call::integer(std::string_view name) const {
  const auto& scalar = *static_cast<const Scalar*>(attribute(name));
  if (scalar.element != Element::int64) throw invalid(std::string(name) + " of XLA's call is no int64");
  return *static_cast<const int64_t*>(scalar.value);
}

double Call::number(std::string_view name) const {
  const auto& scalar = *static_cast<const Scalar*>(attribute(name));
  if (scalar.element != Element::float64) throw invalid(std::string(name) + " of XLA's call is no float64");
  return *static_cast<const double*>(scalar.value);
}

std::string_view Call::view(std::string_view name) const {
  const auto& bytes = *static_cast<const Bytes*>(attribute(name));
  return {bytes.begin, bytes.length};
}

void Call::read_integers(std::initializer_list<std::pair<std::string_view, int64_t*>> wanted) const {
  const Attributes& all = frame_.attributes;
  int64_t next = 0;
  for (const auto& [name, to] : wanted) {
    while (next < all.count && std::string_view(all.names[next]->begin, all.names[next]->length) != name) ++next;
    if (next == all.count) {
      next = 0;
      *to = integer(name);
      continue;
    }
    const auto& scalar = *static_cast<const Scalar*>(all.items[next]);
    *to = scalar.element == Element::int64 ? *static_cast<const int64_t*>(scalar.value) : integer(name);
  }
}

std::vector<int64_t> Call::integers(std::string_view name) const {
  std::vector<int64_t> numbers;
  std::istringstream list(text(name));
  for (std::string number; std::getline(list, number, ',');) numbers.push_back(std::stoll(number));
  return numbers;
}

int64_t Call::result_elements() const {
  int64_t elements = 0;
  for (int64_t i = 0; i < results(); ++i) {
    const Buffer& result = buffer(frame_.results, i);
    elements += std::accumulate(result.dimensions, result.dimensions + result.rank, int64_t{1}, std::multiplies<>());
  }
  return elements;
}

int Call::device_ordinal() const {
  DeviceOrdinalGet get = {sizeof(DeviceOrdinalGet), nullptr, frame_.context, 0};
  const bool has_it = api().size >= sizeof(Api);
  if (!has_it || api().get_device_ordinal(&get) != nullptr)
    throw invalid("the XLA of this jaxlib does not say on which of several devices it runs: install a newer one");
  return get.ordinal;
}

Future* Call::promise(Failure*& failure) const {
  FutureCreate create = {sizeof(FutureCreate), nullptr, nullptr};
  failure = api().create_future(&create);
  return frame_.future = failure ? nullptr : create.future;
}

void* Call::stream(Failure*& failure) const {
  StreamGet get = {sizeof(StreamGet), nullptr, frame_.context, nullptr};
  failure = api().get_stream(&get);
  return get.stream;
}

const Buffer& Call::buffer(const Arguments& arguments, int64_t place) {
  if (place >= arguments.count) throw invalid("XLA's call has too few arrays");
  return *static_cast<const Buffer*>(arguments.items[place]);
}

Array Call::array_of(const Buffer& buffer) {
  const Raw raw = raw_of(buffer);
  Array array = {raw.data, {raw.dtype, Shape(raw.shape, raw.shape + raw.dimensions)}};
  if (raw.is_complex) array.spec.shape.push_back(2);
  return array;
}

Call::Raw Call::raw_of(const Buffer& buffer) {
  const bool is_complex = buffer.element == Element::complex64 || buffer.element == Element::complex128;
  return {buffer.data, dtype_of(buffer.element), is_complex, buffer.rank, buffer.dimensions};
}

uint32_t& Call::word_of(const Buffer& buffer) {
  if (buffer.element != Element::uint32) throw invalid("XLA's call has something else where a ticket should be");
  return *static_cast<uint32_t*>(buffer.data);
}

Failure* failure_of(const Api& api, const Error& error) {
  const std::string message = std::string("ringtrain.") + name_of(error.kind()) + ": " + error.what();
  FailureCreate create = {sizeof(FailureCreate), nullptr, message.c_str(), code_of(error.kind())};
  return api.create_failure(&create);
}

void set_api_version(int minor) { api_minor = minor; }

bool answers_metadata(CallFrame& frame) {
  for (Extension* extension = frame.extension; extension; extension = extension->next) {
    if (extension->type != Extension::kMetadata) continue;
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(extension)->metadata;
    metadata.version.major = 0;
    metadata.version.minor = api_minor;
    metadata.traits = 0;
    return true;
  }
  return false;
}

}  // namespace ringtrain::xla
