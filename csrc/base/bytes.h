// Values as bytes, for what ranks of one job say to each other: same build, same byte order.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace ringtrain {

using Bytes = std::vector<char>;

class Writer {
 public:
  Writer() = default;
  // Writes behind these.
  explicit Writer(Bytes bytes) : bytes_(std::move(bytes)) {}

  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    put_bytes(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void put_bytes(const char* begin, size_t count) { bytes_.insert(bytes_.end(), begin, begin + count); }
  void put(const std::string& text) { put_all(text); }
  template <typename T>
  void put(const std::vector<T>& values) {
    put_all(values);
  }

  Bytes take() { return std::move(bytes_); }

 private:
  template <typename Sequence>
  void put_all(const Sequence& values) {
    static_assert(std::is_trivially_copyable_v<typename Sequence::value_type>);
    put(static_cast<uint64_t>(values.size()));
    put_bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(typename Sequence::value_type));
  }

  Bytes bytes_;
};

class Reader {
 public:
  // From this byte on.
  explicit Reader(const Bytes& bytes, size_t from = 0)
      : begin_(bytes.data()), next_(begin_ + from), end_(begin_ + bytes.size()) {}

  // Where the next ones are, which count as read.
  const char* take(size_t count) {
    if (count > bytes_left()) throw failure("a message between ranks ends too early");
    return std::exchange(next_, next_ + count);
  }
  template <typename T>
  void get(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
  }
  void get(bool& value) {
    const auto byte = get<uint8_t>();
    if (byte > 1) throw failure("a truth value is " + std::to_string(byte));
    value = byte == 1;
  }
  // An enum of which `last` has the highest number; `what` it is, for messages.
  template <typename Enum>
  void get_enum(Enum& value, Enum last, const char* what) {
    const auto number = get<std::underlying_type_t<Enum>>();
    if (number > static_cast<std::underlying_type_t<Enum>>(last))
      throw failure(std::string(what) + " " + std::to_string(number) + " does not exist");
    value = static_cast<Enum>(number);
  }
  // How many items follow, each of at least so many bytes, so that nobody reserves memory for what has not been sent.
  uint32_t get_count(size_t least_bytes) {
    const auto count = get<uint32_t>();
    if (count > bytes_left() / least_bytes) throw failure("a message between ranks ends too early");
    return count;
  }
  void get(std::string& text) { get_all(text); }
  template <typename T>
  void get(std::vector<T>& values) {
    get_all(values);
  }
  template <typename T>
  T get() {
    T value{};
    get(value);
    return value;
  }

  bool at_end() const { return next_ == end_; }
  size_t bytes_read() const { return static_cast<size_t>(next_ - begin_); }
  // Where a message must be over.
  void require_end() const {
    if (!at_end()) throw failure("a message between ranks has " + std::to_string(bytes_left()) + " bytes too many");
  }

 private:
  size_t bytes_left() const { return static_cast<size_t>(end_ - next_); }

  template <typename Sequence>
  void get_all(Sequence& values) {
    using Value = typename Sequence::value_type;
    static_assert(std::is_trivially_copyable_v<Value>);
    const auto size = get<uint64_t>();
    if (size > bytes_left() / sizeof(Value)) throw failure("a message between ranks ends too early");
    values.resize(size);
    if (size > 0) std::memcpy(values.data(), take(size * sizeof(Value)), size * sizeof(Value));
  }

  const char* begin_;
  const char* next_;
  const char* end_;
};

}  // namespace ringtrain
