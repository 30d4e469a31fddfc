// Resources that a forked child must leave alone. It has copies of its parent's objects, but what is behind some of
// them (memory that ranks share, a GPU) is still the parent's, and a lock that another thread held at the fork is never
// released.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace ringtrain {

// The process in which it was made.
class OwnProcess {
 public:
  OwnProcess();
  // Whether that is this one, and not one that it was forked to.
  bool is_this() const;

 private:
  const uint32_t forks_;  // that lay behind it
};

// A resource that `release` gives back in this process when nobody holds it. A forked child never gives it back.
template <typename Object, typename Release>
std::shared_ptr<Object> owned_here(Object* object, Release release) {
  return {object, [release = std::move(release), process = OwnProcess()](Object* own) {
            if (process.is_this()) release(own);
          }};
}

template <typename Object>
std::shared_ptr<Object> owned_here(Object* object) {
  return owned_here(object, std::default_delete<Object>());
}

// Keeps memory that others may use for ever: it is never destroyed, since nobody can tell when they have stopped
// writing to it.
template <typename Value>
const Value& keep_for_ever(Value value) {
  return *new Value(std::move(value));
}

}  // namespace ringtrain
