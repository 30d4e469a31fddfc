#include "kvstore/store/chunk_copies.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"

namespace ringtrain {
namespace {

// How much there is of a chunk, array by array; 0 for those that nobody uses.
std::vector<size_t> array_bytes(Part& part, const KeyChunk& chunk) {
  const auto rule = part.rule(part.header().rule.load());
  std::vector<size_t> bytes = {chunk.value_bytes()};
  if (!rule) return bytes;
  bytes.push_back(is_half(chunk.dtype) ? chunk.wide_bytes() : 0);
  bytes.insert(bytes.end(), rule->state_names().size(), chunk.wide_bytes());
  return bytes;
}

size_t counts_bytes(Part& part) { return (2 + 2 * part.layout().capacity()) * sizeof(uint64_t); }

size_t total_bytes(Part& part, size_t number) {
  size_t total = counts_bytes(part);
  for (const size_t bytes : array_bytes(part, part.chunk(number))) total += bytes;
  return total;
}

void copy_counts(Part& part, size_t number, char* place) {
  const ChunkRecord& record = part.record(number);
  std::vector<uint64_t> counts = {record.closed.load(), record.updates};
  for (size_t i = 0; i < part.layout().capacity(); ++i) {
    const WorkerRecord& worker = part.worker(number, i);
    const bool has_open = worker.first_slot != kNoSlot;
    const bool is_pending = record.pending == i + 1;  // its gradient is not kept
    counts.push_back(has_open ? record.closed.load() - worker.offset : worker.pushes - is_pending);
    counts.push_back(worker.offset);
  }
  std::memcpy(place, counts.data(), counts_bytes(part));
}

void put_counts(Part& part, size_t number, const char* from) {
  std::vector<uint64_t> counts(counts_bytes(part) / sizeof(uint64_t));
  std::memcpy(counts.data(), from, counts_bytes(part));
  ChunkRecord& record = part.record(number);
  record.closed.store(counts[0]);
  record.updates = counts[1];
  for (size_t i = 0; i < part.layout().capacity(); ++i) {
    part.worker(number, i).pushes = counts[2 + 2 * i];
    part.worker(number, i).offset = counts[3 + 2 * i];
  }
}

// Calls move(place in the Part, bytes) for each array in use.
template <typename Move>
void for_arrays(Part& part, size_t number, Move move) {
  const std::vector<size_t> bytes = array_bytes(part, part.chunk(number));
  for (size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] > 0) move(part.array(i, number), bytes[i]);
}

}  // namespace

Bytes copy_chunks(Actor& actor, size_t first, size_t last, double timeout_s) {
  Part& part = actor.part();
  last = std::min(last, part.chunk_count());
  std::vector<size_t> begins;
  size_t total = 0;
  for (size_t i = first; i < last; ++i) {
    begins.push_back(total);
    total += total_bytes(part, i);
  }
  Bytes bytes(total);
  visit_all(part, first, last, timeout_s, [&](size_t number) {
    const HeldChunk held(part, number, actor.number());
    if (!held) return false;
    char* place = bytes.data() + begins[number - first];
    copy_counts(part, number, place);
    place += counts_bytes(part);
    for_arrays(part, number, [&](const char* array, size_t count) {
      std::memcpy(place, array, count);
      place += count;
    });
    return true;
  });
  return bytes;
}

size_t put_chunks(Actor& actor, size_t first, const Bytes& bytes, double timeout_s) {
  Part& part = actor.part();
  std::vector<size_t> begins;
  size_t total = 0, last = first;
  for (; last < part.chunk_count() && total < bytes.size(); ++last) {
    begins.push_back(total);
    total += total_bytes(part, last);
  }
  if (total != bytes.size()) throw failure("these bytes are not those of chunks of this store with this optimizer");
  visit_all(part, first, last, timeout_s, [&](size_t number) {
    const HeldChunk held(part, number, actor.number());
    if (!held) return false;
    const char* place = bytes.data() + begins[number - first];
    put_counts(part, number, place);
    place += counts_bytes(part);
    for_arrays(part, number, [&](char* array, size_t count) {
      std::memcpy(array, place, count);
      place += count;
    });
    return true;
  });
  return last;
}

}  // namespace ringtrain
