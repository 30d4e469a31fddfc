#include "record/step_log.h"

#include <array>
#include <cstddef>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace ringtrain {
namespace {

constexpr size_t kKept = 64;
constexpr double kRecent_s = 10;

Mutex mutex;
int64_t last GUARDED_BY(mutex) = 0;
uint64_t noted GUARDED_BY(mutex) = 0;
std::array<double, kKept> begun_s GUARDED_BY(mutex) = {};  // the step noted as n-th at n % kKept

}  // namespace

void note_step(int64_t count) {
  const double now = now_s();
  const Lock lock(mutex);
  last = count;
  if (count == 0) noted = 0;
  if (count > 0) begun_s[noted++ % kKept] = now;
}

Steps steps_until_now() {
  const Lock lock(mutex);
  Steps steps = {last, 0, 0};
  if (noted == 0) return steps;
  steps.begun_s = begun_s[(noted - 1) % kKept];
  uint64_t intervals = 0;
  for (uint64_t back = 1; back < kKept && back < noted; ++back) {
    const double length_s = steps.begun_s - begun_s[(noted - 1 - back) % kKept];
    if (length_s > kRecent_s && intervals > 0) break;
    intervals = back;
    steps.per_s = length_s > 0 ? static_cast<double>(back) / length_s : 0;
  }
  return steps;
}

}  // namespace ringtrain
