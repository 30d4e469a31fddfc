// What one rank announces: "I am ready to do this."
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/tensor.h"

namespace ringtrain {

enum class OpKind : uint8_t {
  allreduce,
  allgather,
  broadcast,
  alltoall,
  reducescatter,
  barrier,
  join,
  add_process_set,
  remove_process_set,
};
const char* name_of(OpKind kind);

// An average is a sum divided by the number of ranks; for adasum see collectives/adasum.h.
enum class ReduceOp : uint8_t { average, sum, min, max, product, adasum };
const char* name_of(ReduceOp op);

struct Request {
  OpKind kind = OpKind::allreduce;
  ReduceOp op = ReduceOp::sum;
  int32_t root = 0;  // rank of the world, for broadcast
  int32_t process_set = 0;
  int32_t priority = 0;  // higher goes first; need not be the same on all ranks
  double prescale = 1.0, postscale = 1.0;
  // All tensors lie in the node's Arena, or on a GPU in memory of NCCL, and are worked on in place; agreed if all
  // ranks' do.
  bool is_in_arena = false;
  bool is_on_gpu = false;  // all tensors lie on a GPU; the same on all ranks
  std::string name;
  std::vector<TensorSpec> tensors;  // more than one for a group that is done together or not at all
  std::vector<int64_t> numbers;  // add_process_set: its ranks; remove_process_set: its id; join: operations without a
                                 // name that this rank has submitted
  std::shared_ptr<const std::string> site;  // "train.py:31": where it was submitted, for messages; may be null

  // Whether they ask for the same; the site does not count.
  bool operator==(const Request& other) const;
  size_t bytes() const;
};
using RequestPtr = std::shared_ptr<const Request>;

// Names that ringtrain itself gives begin with "<", which names of users may not.
constexpr const char* kJoinName = "<join>";

// What identifies an operation among all that are pending.
using Key = std::pair<int32_t, std::string>;  // process set, name
inline Key key_of(const Request& request) { return {request.process_set, request.name}; }

// The same for looking things up without copying the name, which lives in a Request.
struct KeyView {
  int32_t process_set;
  std::string_view name;

  bool operator==(const KeyView& other) const { return process_set == other.process_set && name == other.name; }
};
inline KeyView view_of(const Request& request) { return {request.process_set, request.name}; }
inline KeyView view_of(const Key& key) { return {key.first, key.second}; }

struct HashOfKey {
  size_t operator()(const KeyView& key) const {
    constexpr size_t kSpread = 0x9E3779B97F4A7C15;
    return std::hash<std::string_view>()(key.name) ^ (static_cast<size_t>(key.process_set) * kSpread);
  }
};

// "allreduce \"layer1.weight\""
std::string title_of(const Request& request);

void write(Writer& writer, const Request& request);
Request read_request(Reader& reader);

}  // namespace ringtrain
