#include "record/submission.h"

#include "coordination/channel.h"

namespace ringtrain {

const void* Submission::small_value() const {
  const Operation& one = operation();
  const bool is_plain = one.kind == OpKind::allreduce && one.op != ReduceOp::adasum && !one.is_on_gpu &&
                        one.quantizer.kind == Quantizer::Kind::none && one.factors.prescale == 1.0;
  if (!is_plain || inputs.size() != 1) return nullptr;
  const size_t bytes = one.bytes();
  return bytes > 0 && bytes <= SmallValue::kMostBytes ? inputs[0] : nullptr;
}

}  // namespace ringtrain
