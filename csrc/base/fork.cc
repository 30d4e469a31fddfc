#include "base/fork.h"

#include <pthread.h>

namespace ringtrain {
namespace {

uint32_t forks = 0;  // between the first process and this one; changes while a child has only one thread

// When the library is loaded, before any static object of it is made: handlers in a child run in the order of their
// registration, and the other ones of ringtrain may ask OwnProcess.
[[gnu::constructor(101)]] void count_forks() {
  pthread_atfork(nullptr, nullptr, [] { ++forks; });
}

}  // namespace

OwnProcess::OwnProcess() : forks_(forks) {}

bool OwnProcess::is_this() const { return forks_ == forks; }

}  // namespace ringtrain
