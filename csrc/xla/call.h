// One call by XLA, read: its attributes and arrays, and what it is answered. Knows no engine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/tensor.h"
#include "xla/ffi.h"

namespace ringtrain::xla {

// An array of XLA's. A complex number is a pair of real ones, along a last dimension.
struct Array {
  void* data;
  TensorSpec spec;
};

// As long as the frame lives.
class Call {
 public:
  explicit Call(CallFrame& frame) : frame_(frame) {}

  // All throw invalid for what is not there, or is something else.
  int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  std::string text(std::string_view name) const;
  std::vector<int64_t> integers(std::string_view name) const;  // in a text, with commas

  int64_t arguments() const { return frame_.arguments.count; }
  int64_t results() const { return frame_.results.count; }
  Array argument(int64_t place) const { return array_of(buffer(frame_.arguments, place)); }
  Array result(int64_t place) const { return array_of(buffer(frame_.results, place)); }
  // Of an array of one uint32.
  uint32_t& argument_word(int64_t place) const { return word_of(buffer(frame_.arguments, place)); }
  uint32_t& result_word(int64_t place) const { return word_of(buffer(frame_.results, place)); }
  void* argument_address(int64_t place) const { return buffer(frame_.arguments, place).data; }
  void* result_address(int64_t place) const { return buffer(frame_.results, place).data; }

  const Api& api() const { return *frame_.api; }
  // XLA goes on when it is set; null where it cannot be made, and then `failure` says why.
  Future* promise(Failure*& failure) const;
  // In which a program for a GPU does its work; where there is none, `failure` says why.
  void* stream(Failure*& failure) const;

 private:
  const void* attribute(std::string_view name) const;
  static const Buffer& buffer(const Arguments& arguments, int64_t place);
  static Array array_of(const Buffer& buffer);
  static uint32_t& word_of(const Buffer& buffer);

  CallFrame& frame_;
};

// Its text begins with "ringtrain.", the name of the exception and ": ", by which Python finds the exception again.
Failure* failure_of(const Api& api, const Error& error);

// Whether XLA only wants to know for which version this was written; then it is told.
bool answers_metadata(CallFrame& frame, int minor_version);

}  // namespace ringtrain::xla
