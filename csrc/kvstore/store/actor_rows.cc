// Some elements of a chunk, as rows of a key want it.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kvstore/store/actor.h"
#include "kvstore/store/convert.h"

namespace ringtrain {

Outcome Actor::push_ranges(size_t chunk, uint64_t seq, const ElementRanges& ranges, const Source& source,
                           const Rates& rates) {
  const KeyChunk& place = part_->chunk(chunk);
  if (part_->spec().is_synchronous)
    return push(chunk, seq, {spread(place, ranges, source), wide(place.dtype), {}}, rates, nullptr);
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return Outcome::busy;
    require_term();
    const uint64_t before = part_->worker(chunk, number_).pushes;
    if (seq <= before) return Outcome::duplicate;
    if (seq != before + 1) return Outcome::early;
    const UpdateRule* rule = rule_of(chunk);
    if (!rule) throw invalid("an asynchronous store without an optimizer would replace weights by gradients");
    if (rule->is_program()) return leave(chunk, seq, {spread(place, ranges, source), wide(place.dtype), {}});
    convert(source.values, source.dtype, own_.get(), wide(place.dtype), count_of(ranges));
    ChunkChange change(*part_, chunk, number_, kept(arrays_of(place, rule)));
    apply_to(chunk, *rule, ranges, own_.get(), rates);
    part_->worker(chunk, number_).pushes = seq;
    change.commit(1);
  }
  if (part_->spec().max_staleness != PartSpec::kNoBound) part_->ring();
  return Outcome::applied;
}

// All of the chunk: zeros where nothing is pushed.
const void* Actor::spread(const KeyChunk& chunk, const ElementRanges& ranges, const Source& source) {
  if (!spread_) spread_.reset(new char[Layout::kChunkBytes]);
  std::memset(spread_.get(), 0, chunk.wide_bytes());
  const char* from = static_cast<const char*>(source.values);
  const size_t bytes = size_of(wide(chunk.dtype));
  for (const ElementRange& range : ranges) {
    convert(from, source.dtype, spread_.get() + range.begin * bytes, wide(chunk.dtype), range.count);
    from += range.count * size_of(source.dtype);
  }
  return spread_.get();
}

void Actor::apply_to(size_t chunk, const UpdateRule& rule, const ElementRanges& ranges, const void* gradient,
                     const Rates& rates) {
  const KeyChunk& place = part_->chunk(chunk);
  const bool has_master = is_half(place.dtype);
  const size_t bytes = size_of(wide(place.dtype));
  const UpdateRule::Step step = {static_cast<int64_t>(++part_->record(chunk).updates), rates.lr, rates.wd};
  const char* from = static_cast<const char*>(gradient);
  for (const ElementRange& range : ranges) {
    const size_t begin = range.begin * bytes;
    char* const value = part_->value(chunk) + range.begin * size_of(place.dtype);
    UpdateRule::Arrays arrays;
    arrays.dtype = wide(place.dtype);
    arrays.weight = has_master ? part_->master(chunk) + begin : value;
    arrays.grad = from;
    arrays.count = range.count;
    for (size_t i = 0; i < rule.state_names().size(); ++i) arrays.states.push_back(part_->state(i, chunk) + begin);
    rule.update(arrays, step);
    if (has_master) convert(arrays.weight, DType::float32, value, place.dtype, range.count);
    from += range.count * bytes;
  }
}

Reading Actor::read_ranges(size_t chunk, uint64_t pushes, const ElementRanges& ranges, Answer& answer) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return Reading::busy;
  if (!is_ready(chunk, pushes)) return Reading::not_yet;
  const KeyChunk& place = part_->chunk(chunk);
  char* to = static_cast<char*>(answer.place);
  for (const ElementRange& range : ranges) {
    convert(part_->value(chunk) + range.begin * size_of(place.dtype), place.dtype, to, answer.dtype, range.count);
    to += range.count * size_of(answer.dtype);
  }
  answer.num_update = num_update(chunk);
  answer.is_there = true;
  return Reading::done;
}

}  // namespace ringtrain
