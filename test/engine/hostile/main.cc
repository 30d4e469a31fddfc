// Strangers and ranks that lie, against the real code: test/engine/test_hostile.py.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/descriptor.h"
#include "ranks.h"

using namespace ringtrain;

namespace {

// Its destructor is the last one: those of objects of other files, which are made later, have run.
class LastToGo {
 public:
  ~LastToGo() {
    if (!works_) return;
    for (int i = 0; i < 100; ++i) {
      const Descriptor one(dup(STDOUT_FILENO));
      require(one.number() > STDERR_FILENO, "there are no descriptors");
    }
  }
  void work() { works_ = true; }

 private:
  bool works_ = false;
} last_to_go;

}  // namespace

int main(int count, char** words) {
  const auto is = [&](const char* word) { return count > 1 && std::strcmp(words[1], word) == 0; };
  const auto number = [&](int place) { return place < count ? std::atoi(words[place]) : 0; };
  if (is("dialling"))
    for (int seed = number(2); seed < number(3); ++seed) try_dialling(static_cast<uint64_t>(seed));
  else if (is("dials"))
    try_dials(number(2), number(3));
  else if (is("two-addresses"))
    try_two_addresses(number(2) != 0, number(3));
  else if (is("late-proof"))
    try_late_proof();
  else if (is("full-rank"))
    try_full_rank();
  else if (is("frames"))
    try_frames(std::atof(words[2]), static_cast<uint64_t>(number(3)));
  else if (is("negotiation"))
    try_negotiation(number(2), static_cast<uint64_t>(number(3)));
  else if (is("exit"))
    last_to_go.work();
  else
    fail("no such trial");
  std::puts("well");
}
