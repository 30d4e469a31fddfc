// For what somebody else may use for ever.
#pragma once

#include <utility>

namespace ringtrain {

// It is never destroyed: who may still write to it cannot be asked whether he is through.
template <typename Value>
const Value& keep_for_ever(Value value) {
  return *new Value(std::move(value));
}

}  // namespace ringtrain
