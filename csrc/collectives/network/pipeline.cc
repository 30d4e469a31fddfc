#include "collectives/network/pipeline.h"

#include <algorithm>

namespace ringtrain {

Pipeline::Pipeline(size_t blocks, size_t first_step, size_t end_step, size_t width)
    : blocks_(blocks),
      first_step_(first_step),
      last_step_(end_step - 1),
      width_(width),
      firsts_(blocks * (end_step - first_step)) {
  const size_t steps = end_step - first_step;
  steps_.reserve(blocks * steps);
  for (size_t wave = 0; wave + 1 < blocks + steps; ++wave) {
    for (size_t block = wave < steps ? 0 : wave - steps + 1; block <= std::min(wave, blocks - 1); ++block) {
      const size_t step = wave - block;
      firsts_[block * steps + step] = steps_.size();
      steps_.push_back({block, first_step + step});
    }
  }
}

}  // namespace ringtrain
