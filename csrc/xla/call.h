// One call by XLA, read: its attributes and arrays, and what it is answered. Uses no engine.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
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
  std::string text(std::string_view name) const { return std::string(view(name)); }
  std::string_view view(std::string_view name) const;  // as long as the program
  // Quicker than one after the other where the names are in the order of the alphabet, as XLA has them.
  void read_integers(std::initializer_list<std::pair<std::string_view, int64_t*>> wanted) const;
  std::vector<int64_t> integers(std::string_view name) const;  // in a text, with commas

  int64_t arguments() const { return frame_.arguments.count; }
  int64_t results() const { return frame_.results.count; }
  Array argument(int64_t place) const { return array_of(buffer(frame_.arguments, place)); }
  Array result(int64_t place) const { return array_of(buffer(frame_.results, place)); }
  // The same without a list of dimensions, which lives as long as the frame. A complex number is a pair of `dtype`.
  struct Raw {
    void* data;
    DType dtype;
    bool is_complex;
    int64_t dimensions;
    const int64_t* shape;
  };
  Raw raw_argument(int64_t place) const { return raw_of(buffer(frame_.arguments, place)); }
  Raw raw_result(int64_t place) const { return raw_of(buffer(frame_.results, place)); }
  // Of all results together, of whatever dtype.
  int64_t result_elements() const;
  // Of an array of one uint32.
  uint32_t& argument_word(int64_t place) const { return word_of(buffer(frame_.arguments, place)); }
  uint32_t& result_word(int64_t place) const { return word_of(buffer(frame_.results, place)); }
  void* argument_address(int64_t place) const { return buffer(frame_.arguments, place).data; }
  void* result_address(int64_t place) const { return buffer(frame_.results, place).data; }

  // The device of the program among those of this process. Throws invalid where an older XLA does not say.
  int device_ordinal() const;
  const Api& api() const { return *frame_.api; }
  // XLA goes on when it is set; null where it cannot be made, and then `failure` says why.
  Future* promise(Failure*& failure) const;
  // In which a program for a GPU does its work; where there is none, `failure` says why.
  void* stream(Failure*& failure) const;

 private:
  const void* attribute(std::string_view name) const;
  static const Buffer& buffer(const Arguments& arguments, int64_t place);
  static Array array_of(const Buffer& buffer);
  static Raw raw_of(const Buffer& buffer);
  static uint32_t& word_of(const Buffer& buffer);

  CallFrame& frame_;
};

// Its text begins with "ringtrain.", the name of the exception and ": ", by which Python finds the exception again.
Failure* failure_of(const Api& api, const Error& error);

// Of the first so many results, calls visit(where it is to be, where its argument is, bytes) for those that are not
// in place, whose dtype need not be one that can be sent, and not empty.
template <typename Visit>
void for_each_moved(const Call& call, int64_t results, Visit visit) {
  for (int64_t i = 0; i < results; ++i) {
    if (call.argument_address(i) == call.result_address(i)) continue;
    const size_t bytes = call.result(i).spec.bytes();
    if (bytes > 0) visit(call.result_address(i), call.argument_address(i), bytes);
  }
}

// The version 0.minor that handlers tell XLA. Before they are registered.
void set_api_version(int minor);
// Answers XLA's question for the version that this was written for. Returns whether that was the question.
bool answers_metadata(CallFrame& frame);

// Runs a handler: calls execute(call), which returns a Failure or throws, if XLA asks for the work and nothing
// else.
template <typename Execute>
Failure* handle(CallFrame* frame, Execute execute) {
  if (answers_metadata(*frame) || frame->stage != CallFrame::kExecute) return nullptr;
  Failure* failure = nullptr;
  const auto error = error_of([&] { failure = execute(Call(*frame)); });
  return error ? failure_of(*frame->api, *error) : failure;
}

}  // namespace ringtrain::xla
