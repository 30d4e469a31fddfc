// Values as bytes, for what ranks of one job say to each other: same build, same byte order.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace ringtrain {

using Bytes = std::vector<char>;

class Writer {
 public:
  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const char* begin = reinterpret_cast<const char*>(&value);
    bytes_.insert(bytes_.end(), begin, begin + sizeof(T));
  }
  void put(const std::string& text) { put_all(text); }
  template <typename T>
  void put(const std::vector<T>& values) {
    put_all(values);
  }

  Bytes take() { return std::move(bytes_); }

 private:
  template <typename Sequence>
  void put_all(const Sequence& values) {
    put(static_cast<uint64_t>(values.size()));
    for (const auto& value : values) put(value);
  }

  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(const Bytes& bytes) : next_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  template <typename T>
  void get(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (bytes_left() < sizeof(T)) throw failure("a message between ranks ends too early");
    std::memcpy(&value, next_, sizeof(T));
    next_ += sizeof(T);
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
  // Where a message must be over.
  void require_end() const {
    if (!at_end()) throw failure("a message between ranks has " + std::to_string(bytes_left()) + " bytes too many");
  }

 private:
  size_t bytes_left() const { return static_cast<size_t>(end_ - next_); }

  template <typename Sequence>
  void get_all(Sequence& values) {
    const auto size = get<uint64_t>();
    if (size > bytes_left()) throw failure("a message between ranks ends too early");
    values.resize(size);
    for (auto& value : values) get(value);
  }

  const char* next_;
  const char* end_;
};

}  // namespace ringtrain
