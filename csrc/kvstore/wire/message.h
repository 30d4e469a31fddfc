// Messages of workers and servers over TCP: each is a Head, and perhaps a body behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "kvstore/store/layout.h"

namespace ringtrain {

enum class Said : uint16_t {
  // A worker, of the whole server or of a store. Answered by `done` or `refused`; one at a time from each worker, and
  // `number` is one that it has not used before, or 0: to be answered anew.
  hello,    // number: the term of the worker's process, see WorkerPlace -> ServerWords
  create,   // PartSpec, for `chunk` workers from the beginning -> PartWords
  attach,   // of a store, the parts from `part` on, with at least `chunk` pieces of keys -> a list of PartWords
  rule,     // RuleWords
  join,     // JoinWords: nobody waits for the pushes of this worker
  resume,   // EndedJoins: these workers push again
  awaited,  // numbers of its requests -> the workers for whose pushes these wait
  // Not answered: this worker waits, and pushes nothing before that has ended, see ServerStores::let_pass().
  waiting,
  // A worker, of one chunk of a Part. `number`: of its pushes of that key, with the one that this is.
  push,
  pull,
  push_pull,
  assign,
  read_state,  // `number`: which array, see Layout::array_at
  write_state,
  read_updates,   // -> `number`: the num_update
  write_updates,  // to `number`
  poke,           // others may wait for what has become of it; not answered
  // A server, of what has the same number in its frame.
  held,     // it has it, and the value comes when there is one
  done,     // of a chunk: `number` is the num_update. The body is what was asked for.
  refused,  // the body is a text
  // Of a push, or a pull after one: the server has counted only `number` pushes of this chunk by this worker, and does
  // nothing with the request.
  early,
  // Of a push of several chunks to an asynchronous store: the server has this chunk, and applies it with the others.
  staged,
};
constexpr auto kLastSaid = Said::staged;

constexpr const char* name_of(Said said) {
  constexpr const char* kNames[] = {"hello",      "create",      "attach",       "rule",          "join",      "resume",
                                    "awaited",    "waiting",     "push",         "pull",          "push_pull", "assign",
                                    "read_state", "write_state", "read_updates", "write_updates", "poke",      "held",
                                    "done",       "refused",     "early",        "staged"};
  return kNames[static_cast<size_t>(said)];
}
constexpr bool is_of_chunk(Said said) { return said >= Said::push && said <= Said::poke; }
constexpr bool is_of_store(Said said) { return said < Said::push; }
// Beside pushes, the requests that change a chunk.
constexpr bool is_change(Said said) {
  return said == Said::assign || said == Said::write_state || said == Said::write_updates;
}

struct Head {
  static constexpr uint32_t kAll = ~uint32_t{0};

  Said said = Said::hello;
  DType dtype = DType::float32;   // of the body
  DType wanted = DType::float32;  // of the answer's body
  uint32_t store = 0, part = 0, chunk = 0;
  uint32_t body_bytes = 0;
  uint32_t codes = 0;  // Quantizer::Kind, of the body
  float threshold = 0;
  uint32_t ranges = kAll;  // so many ElementRanges of the chunk begin the body, and it is about these
  int64_t number = 0;
  // Of a push of several chunks: the same in all of them, and more than in the pushes of the key before. Of a change:
  // more than in all that this process has asked of the chunk before, from 1 on.
  uint64_t push = 0;
  double lr = 0, wd = 0;

  static Head of(Said said, int64_t number = 0) {
    Head head;
    head.said = said;
    head.number = number;
    return head;
  }
  static Head of_store(Said said, uint32_t store, uint32_t part = 0, uint32_t chunk = 0) {
    Head head = of(said);
    head.store = store;
    head.part = part;
    head.chunk = chunk;
    return head;
  }
};
static_assert(sizeof(Head) == 64, "no bytes that nobody has set");

// Longer bodies are rejected, except the values of a chunk, whose size both sides know, and answers to questions: the
// Parts of a store have many keys together.
constexpr size_t kLongestBody = 16 << 20;

// -------------------------------------------------------------------------------------------- bodies of what is rare

// A server, as it is known to its workers.
struct ServerWords {
  uint64_t identity = 0;  // of this server of this process
  int64_t pid = 0;
  std::string node;  // equal in processes that may share memory; empty: it shares none

  template <typename Words, typename Visit>
  static void fields(Words& words, Visit visit) {
    visit(words.identity), visit(words.pid), visit(words.node);
  }
};

// A Part, as a process has to know it before it attaches to it. `bytes` 0: it is not in shared memory.
struct PartWords {
  uint32_t number = 0;  // in its store, from 0
  uint64_t ticket = 0, bytes = 0;
  PartSpec spec;
  std::vector<uint64_t> pushes;  // of each chunk, by the worker that asks

  template <typename Words, typename Visit>
  static void fields(Words& words, Visit visit) {
    visit(words.number), visit(words.ticket), visit(words.bytes), visit(words.spec), visit(words.pushes);
  }
};

// One join of a worker; its number is one that this worker has given to no other join of the store.
struct JoinWords {
  uint32_t worker = 0;
  int64_t number = 0;

  template <typename Words, typename Visit>
  static void fields(Words& words, Visit visit) {
    visit(words.worker), visit(words.number);
  }
};
using EndedJoins = std::vector<JoinWords>;  // those of a round that is over
using NumberWords = std::vector<uint32_t>;  // of requests, or of workers

struct RuleWords {
  std::string name, form;  // no name: none
  std::vector<std::pair<std::string, double>> numbers;
  uint8_t keeps_states = 0;  // only the numbers of the same rule are others
  int64_t begin_num_update = 0;

  template <typename Words, typename Visit>
  static void fields(Words& words, Visit visit) {
    visit(words.name), visit(words.form), visit(words.numbers), visit(words.keeps_states);
    visit(words.begin_num_update);
  }
};

// Bodies are made of numbers, texts, pairs, lists, and structs that name their fields.
inline void put_words(Writer& writer, const PartSpec& spec) { spec.put(writer); }
inline void get_words(Reader& reader, PartSpec& spec) { spec = PartSpec::get(reader); }

template <typename Value>
void put_words(Writer& writer, const Value& value) {
  if constexpr (std::is_arithmetic_v<Value> || std::is_same_v<Value, std::string>)
    writer.put(value);
  else
    Value::fields(value, [&](const auto& field) { put_words(writer, field); });
}
template <typename Value>
void get_words(Reader& reader, Value& value) {
  if constexpr (std::is_arithmetic_v<Value> || std::is_same_v<Value, std::string>)
    reader.get(value);
  else
    Value::fields(value, [&](auto& field) { get_words(reader, field); });
}

inline void put_words(Writer& writer, const std::pair<std::string, double>& named) {
  writer.put(named.first), writer.put(named.second);
}
inline void get_words(Reader& reader, std::pair<std::string, double>& named) {
  reader.get(named.first), reader.get(named.second);
}

template <typename Value>
void put_words(Writer& writer, const std::vector<Value>& list) {
  writer.put(static_cast<uint64_t>(list.size()));
  for (const Value& one : list) put_words(writer, one);
}
// Grows with what is there, whatever number stands before it.
template <typename Value>
void get_words(Reader& reader, std::vector<Value>& list) {
  for (auto left = reader.get<uint64_t>(); left > 0; --left) get_words(reader, list.emplace_back());
}

template <typename Words>
Bytes bytes_of(const Words& words) {
  Writer writer;
  put_words(writer, words);
  return writer.take();
}

template <typename Words>
Words words_of(const Bytes& bytes) {
  Reader reader(bytes);
  Words words;
  get_words(reader, words);
  return words;
}

}  // namespace ringtrain
