// Parts of stores for tests, without a server: what Python calls by ctypes (test/harness/store_parts.py).
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/reduce.h"
#include "kvstore/store/actor.h"

using namespace ringtrain;

namespace {

std::string error_text;

// "" or what it has thrown.
template <typename Work>
const char* text_of(Work work) {
  const std::optional<Error> error = error_of(work);
  error_text = error ? std::string(name_of(error->kind())) + ": " + error->what() : "";
  return error ? error_text.c_str() : nullptr;
}

PartSpec make_spec(bool is_synchronous, int64_t max_staleness, int capacity, const int64_t* keys, size_t count) {
  PartSpec spec{is_synchronous, max_staleness, capacity, {}};
  for (size_t i = 0; i < count; ++i)
    spec.pieces.push_back(
        {static_cast<uint32_t>(i), static_cast<DType>(keys[2 * i]), 0, static_cast<uint64_t>(keys[2 * i + 1])});
  return spec;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

using PartPtr = std::shared_ptr<Part>;

EXPORTED const char* part_create(int is_synchronous, int64_t max_staleness, int workers, int capacity, int is_shared,
                                 const int64_t* keys, size_t count, PartPtr** part) {
  return text_of([&] {
    const PartSpec spec = make_spec(is_synchronous != 0, max_staleness, capacity, keys, count);
    *part = new PartPtr(Part::create(spec, workers, is_shared ? Part::Memory::shared : Part::Memory::of_process));
  });
}

EXPORTED const char* part_attach(int is_synchronous, int64_t max_staleness, int capacity, const int64_t* keys,
                                 size_t count, int64_t pid, uint64_t ticket, PartPtr** part) {
  return text_of([&] {
    *part =
        new PartPtr(Part::attach(make_spec(is_synchronous != 0, max_staleness, capacity, keys, count), pid, ticket));
  });
}

EXPORTED uint64_t part_ticket(PartPtr* part) { return (*part)->memory().ticket(); }
EXPORTED size_t part_chunks(PartPtr* part) { return (*part)->chunk_count(); }
EXPORTED size_t part_first_chunk(PartPtr* part, size_t piece) { return (*part)->layout().first_chunk(piece); }
EXPORTED uint64_t part_elements(PartPtr* part, size_t chunk) { return (*part)->chunk(chunk).count; }
EXPORTED void part_set_presence(PartPtr* part, size_t worker, uint32_t presence) {
  (*part)->presence(worker).store(static_cast<Presence>(presence));
}
EXPORTED uint64_t part_closed(PartPtr* part, size_t chunk) { return (*part)->record(chunk).closed.load(); }
EXPORTED uint32_t part_bell(PartPtr* part) { return (*part)->header().doorbell.value.load(); }

// In the manner of set_rule: by the server's actor, for all chunks.
EXPORTED const char* part_set_rule(PartPtr* part, const char* name, const char* form, const char* number,
                                   double value) {
  return text_of([&] {
    std::map<std::string, double> numbers;
    if (*number) numbers[number] = value;
    const uint32_t rule = (*part)->add_rule(name, form, numbers);
    Actor server(*part, (*part)->layout().actor_of_server(), 10);
    visit_all(**part, 0, (*part)->chunk_count(), 10, [&](size_t chunk) { return server.take_rule(chunk, rule, 0); });
  });
}

EXPORTED const char* part_settle(PartPtr* part, double timeout_s) {
  return text_of([&] {
    Actor server(*part, (*part)->layout().actor_of_server(), 10);
    visit_all(**part, 0, (*part)->chunk_count(), timeout_s, [&](size_t chunk) { return server.settle(chunk); });
  });
}

EXPORTED const char* part_let_in(PartPtr* part, size_t worker) {
  return text_of([&] {
    Actor server(*part, (*part)->layout().actor_of_server(), 10);
    visit_all(**part, 0, (*part)->chunk_count(), 10, [&](size_t chunk) { return server.let_in(chunk, worker); });
    (*part)->presence(worker).store(Presence::here);
  });
}

EXPORTED const char* actor_new(PartPtr* part, uint32_t number, double timeout_s, uint32_t term, Actor** actor) {
  return text_of([&] { *actor = new Actor(*part, number, timeout_s, term); });
}
EXPORTED void actor_delete(Actor* actor) { delete actor; }

EXPORTED const char* actor_push(Actor* actor, size_t chunk, uint64_t seq, const void* values, int dtype, int codes,
                                float threshold, double lr, double wd, void* answer, int answer_dtype, int* outcome,
                                int* answered) {
  return text_of([&] {
    const KeptDenormals kept;
    const Source source{values, static_cast<DType>(dtype), {static_cast<Quantizer::Kind>(codes), threshold}};
    Answer wanted{answer, static_cast<DType>(answer_dtype)};
    *outcome = static_cast<int>(actor->push(chunk, seq, source, {lr, wd}, answer ? &wanted : nullptr));
    *answered = wanted.is_there;
  });
}

EXPORTED const char* actor_read(Actor* actor, size_t chunk, uint64_t pushes, void* answer, int dtype, int* reading,
                                uint64_t* num_update) {
  return text_of([&] {
    Answer wanted{answer, static_cast<DType>(dtype)};
    *reading = static_cast<int>(actor->read(chunk, pushes, wanted));
    *num_update = wanted.num_update;
  });
}

EXPORTED int actor_assign(Actor* actor, size_t chunk, const void* values) { return actor->assign(chunk, values); }
EXPORTED uint64_t actor_pushes(Actor* actor, size_t chunk, size_t worker) { return actor->pushes_of(chunk, worker); }
EXPORTED uint64_t actor_fewest_pushes(Actor* actor, size_t piece, size_t worker) {
  return actor->fewest_pushes(piece, worker);
}

// Keeps a push to a piece, of these rows (none: all), and pushes it to every so many of its chunks, 0: to none.
// Without `publishes` only keeps it.
EXPORTED const char* actor_stage(Actor* actor, size_t piece, uint64_t seq, const char* values, int dtype, int codes,
                                 float threshold, const int64_t* rows, size_t count, size_t elements, int publishes,
                                 size_t every) {
  return text_of([&] {
    const Layout& layout = actor->part().layout();
    const Quantizer quantizer = {static_cast<Quantizer::Kind>(codes), threshold};
    const auto source = [&](uint64_t begin, const ElementRanges* ranges = nullptr) {
      const size_t bytes = codes ? quantized_bytes(quantizer.kind, begin) : begin * size_of(static_cast<DType>(dtype));
      return Source{values + bytes, static_cast<DType>(dtype), quantizer, ranges};
    };
    ChunkRows of_chunks;
    if (count > 0) of_chunks = rows_of_piece(layout, piece, {rows, rows + count}, elements, true);
    std::vector<const ElementRanges*> ranges;
    for (const RowsOfChunk& one : of_chunks) ranges.push_back(&one.ranges);
    actor->stage(piece, seq, source(0), {0.5, 0}, ranges);
    if (!publishes) return;
    actor->publish();
    const size_t first = layout.first_chunk(piece);
    for (size_t i = 0; every > 0 && first + i < layout.first_chunk(piece + 1); i += every) {
      const bool is_whole = count == 0;
      actor->push(first + i, seq,
                  is_whole ? source(layout.chunks()[first + i].begin) : source(of_chunks[i].begin, ranges[i]), {0.5, 0},
                  nullptr);
    }
  });
}

EXPORTED const char* actor_publish(Actor* actor) {
  return text_of([&] { actor->publish(); });
}

EXPORTED const char* actor_finish_push_of(Actor* actor, size_t worker, int* is_done) {
  return text_of([&] { *is_done = actor->finish_push_of(worker); });
}

// Pushes one number to all chunks for ever, each as soon as it may, until the process is killed.
EXPORTED const char* actor_push_for_ever(Actor* actor, size_t piece, float number) {
  return text_of([&] {
    Part& part = actor->part();
    const std::vector<float> values(Layout::kChunkBytes / sizeof(float), number);
    const size_t first = part.layout().first_chunk(piece), last = part.layout().first_chunk(piece + 1);
    for (uint64_t seq = actor->fewest_pushes(piece, actor->number()) + 1;; ++seq)
      visit_all(part, first, last, 10, [&](size_t chunk) {
        const Outcome outcome = actor->push(chunk, seq, {values.data(), DType::float32, {}}, {0, 0}, nullptr);
        return outcome != Outcome::busy && outcome != Outcome::full;
      });
  });
}
