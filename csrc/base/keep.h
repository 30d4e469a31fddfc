// For memory that others may use for ever.
#pragma once

#include <utility>

namespace ringtrain {

// It is never destroyed: nobody can tell when others have stopped writing to it.
template <typename Value>
const Value& keep_for_ever(Value value) {
  return *new Value(std::move(value));
}

}  // namespace ringtrain
