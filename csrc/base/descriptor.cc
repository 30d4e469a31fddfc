#include "base/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <set>

#include "base/thread_annotations.h"

namespace ringtrain {
namespace {

Mutex mutex;
// Never destroyed: threads that the process does not wait for open and close descriptors until it has ended.
std::set<int>& all GUARDED_BY(mutex) = *new std::set<int>;

void close_in_child() RELEASE(mutex) {
  for (const int number : all) close(number);
  all.clear();
  mutex.unlock();
}

[[maybe_unused]] const int registered =
    pthread_atfork([]() ACQUIRE(mutex) { mutex.lock(); }, []() RELEASE(mutex) { mutex.unlock(); }, &close_in_child);

}  // namespace

Descriptor::Descriptor(int number) : number_(number) {
  if (number < 0) return;
  const Lock lock(mutex);
  all.insert(number);
}

// In a child, a copy of its parent's has been closed, and its number may be that of another file.
Descriptor::~Descriptor() {
  if (number_ < 0) return;
  const Lock lock(mutex);
  if (all.erase(number_) == 1) close(number_);
}

}  // namespace ringtrain
