#include "base/fork.h"

#include <pthread.h>

namespace ringtrain {
namespace {

uint32_t forks = 0;  // between the first process and this one; changes while a child has only one thread

// When the library is loaded, and so before all other handlers of ringtrain.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

}  // namespace

OwnProcess::OwnProcess() : forks_(forks) {}

bool OwnProcess::is_this() const { return forks_ == forks; }

}  // namespace ringtrain
