// An operation that the ranks agree on, the same on all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/tensor.h"
#include "kernels/quantize.h"

namespace ringtrain {

// How many fields a plain struct has, so that a list of them can be checked to be complete.

namespace detail {

struct Anything {
  template <typename Value>
  operator Value() const;  // never called
};

template <typename Struct, typename... Values>
auto takes(int) -> decltype(Struct{Values()...}, std::true_type());
template <typename Struct, typename... Values>
std::false_type takes(...);

}  // namespace detail

// Of a struct without constructors and bases: how many values its braces take.
template <typename Struct, typename... Values>
constexpr size_t count_of_fields() {
  if constexpr (decltype(detail::takes<Struct, Values..., detail::Anything>(0))::value)
    return count_of_fields<Struct, Values..., detail::Anything>();
  else
    return sizeof...(Values);
}

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
  // Of the ranks in `numbers` alone:
  open_process_set,   // those that belong to the new set
  close_process_set,  // those that belong to the set, once all of them have said so
  // One tensor from one rank to another. The two do it without a round (runtime/pair_messages.h). Each announces its
  // end only where the other one's does not come.
  transfer,
};
constexpr OpKind kLastOpKind = OpKind::transfer;
const char* name_of(OpKind kind);

// An average is a sum divided by the number of ranks; for adasum see collectives/adasum.h.
enum class ReduceOp : uint8_t { average, sum, min, max, product, adasum };
constexpr ReduceOp kLastReduceOp = ReduceOp::adasum;
const char* name_of(ReduceOp op);

// Factors of the values before and after they are reduced.
struct Factors {
  double prescale = 1.0, postscale = 1.0;

  bool operator==(const Factors& other) const { return prescale == other.prescale && postscale == other.postscale; }
};

struct Operation {
  OpKind kind = OpKind::allreduce;
  int32_t process_set = 0;
  std::string name;
  std::vector<TensorSpec> tensors;  // more than one for a group that is done together or not at all
  // add_process_set, open_process_set: its ranks; remove_process_set: its id; join: operations without a name that this
  // rank has submitted; close_process_set: its id and its ranks; transfer: source, which is kAnySource where any rank
  // may send it, destination, tag and, in an announcement, its number among those of this way, or -1. Ranks of the
  // world.
  std::vector<int64_t> numbers;
  bool is_on_gpu = false;  // all tensors are on a GPU
  ReduceOp op = ReduceOp::sum;
  int32_t root = 0;  // rank of the world, for broadcast
  Factors factors;
  // All tensors are in the node's Arena, or on a GPU in memory of NCCL, and are worked on in place; agreed if all
  // ranks' do.
  bool is_registered = false;
  Quantizer quantizer;  // of an allreduce whose sums travel between the nodes as codes
  // An average to which each rank's tensors contribute by a weight of their own: see runtime/weights.h.
  bool is_weighted = false;

  bool operator==(const Operation& other) const;
  size_t bytes() const;
};

// One of its fields, and what follows from it.
template <typename Value>
struct Field {
  Value Operation::* member;
  // Whether operations that are joined into one plan must have the same.
  bool splits_plans;
  // Words for the choice of a rank, such as "used op=Sum", and what to do if another rank has done something else. Null
  // where the ranks may differ, or cannot.
  std::string (*says)(const Value&);
  const char* remedy;
};

std::string tensors_text(const std::vector<TensorSpec>& tensors);
std::string process_sets_text(const std::vector<int64_t>& numbers);
std::string factors_text(const Factors& factors);
std::string quantizer_text(const Quantizer& quantizer);

// The one list of the fields: comparing, sending, joining and the search for mismatches all go over it. A new field of
// Operation is a line there and a line here, or this does not compile. Ranks that differ in several are told the first.
constexpr auto kFields = std::make_tuple(
    Field<OpKind>{&Operation::kind, true, [](const OpKind& kind) { return std::string("called ") + name_of(kind); },
                  "Do all ranks call the same operations in the same order, or with the same names?"},
    Field<int32_t>{&Operation::process_set, true, nullptr, nullptr},
    Field<std::string>{&Operation::name, false, nullptr, nullptr},
    Field<std::vector<TensorSpec>>{&Operation::tensors, false, tensors_text, "Do all ranks build the same model?"},
    Field<std::vector<int64_t>>{&Operation::numbers, true, process_sets_text,
                                "Give the same process sets on all ranks."},
    Field<bool>{
        &Operation::is_on_gpu, true,
        [](const bool& on_gpu) { return std::string("sent tensors ") + (on_gpu ? "on a GPU" : "in host memory"); },
        "Put the tensors on a GPU on all ranks, or on none."},
    Field<ReduceOp>{&Operation::op, true, [](const ReduceOp& op) { return std::string("used op=") + name_of(op); },
                    "Give the same op on all ranks."},
    Field<int32_t>{&Operation::root, true, [](const int32_t& root) { return "used root_rank=" + std::to_string(root); },
                   "Give the same root_rank on all ranks."},
    Field<Factors>{&Operation::factors, true, factors_text, "Give the same scale factors on all ranks."},
    Field<bool>{&Operation::is_registered, true, nullptr, nullptr},
    Field<Quantizer>{&Operation::quantizer, true, quantizer_text, "Give the same compression on all ranks."},
    Field<bool>{&Operation::is_weighted, true,
                [](const bool& is_weighted) { return std::string(is_weighted ? "gave a weight" : "gave no weight"); },
                "Give weight= on all ranks or on none: 0 on a rank without samples."});
static_assert(std::tuple_size_v<decltype(kFields)> == count_of_fields<Operation>());

// Calls visit(field) for each of them, in this order.
template <typename Visit>
void for_each_field(Visit visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, kFields);
}
// Whether is_true(field) holds for all of them.
template <typename Predicate>
bool holds_for_all_fields(Predicate is_true) {
  return std::apply([&](const auto&... field) { return (is_true(field) && ...); }, kFields);
}

// The ranks of the world that such an operation is for, ascending; nothing for what all ranks of a process set do.
std::vector<int> participants_of(const Operation& operation);
inline bool is_of_participants(OpKind kind) { return kind >= OpKind::open_process_set; }
constexpr int kAnySource = -1;

// Names that ringtrain itself gives begin with "<", which names of users may not.
constexpr const char* kJoinName = "<join>";
// The barrier of ranks that submit nothing more. It has no time limit: some rank may work on for as long as it likes.
constexpr const char* kEndName = "<end>";

// Identifies an operation among all that are pending.
using Key = std::pair<int32_t, std::string>;  // process set, name
inline Key key_of(const Operation& operation) { return {operation.process_set, operation.name}; }

// The same for looking things up without copying the name, which lives in an Operation.
struct KeyView {
  int32_t process_set;
  std::string_view name;

  bool operator==(const KeyView& other) const { return process_set == other.process_set && name == other.name; }
};
inline KeyView view_of(const Operation& operation) { return {operation.process_set, operation.name}; }
inline KeyView view_of(const Key& key) { return {key.first, key.second}; }

struct HashOfKey {
  size_t operator()(const KeyView& key) const {
    constexpr size_t kSpread = 0x9E3779B97F4A7C15;
    return std::hash<std::string_view>()(key.name) ^ (static_cast<size_t>(key.process_set) * kSpread);
  }
};

// "allreduce \"layer1.weight\""
std::string title_of(const Operation& operation);

void write(Writer& writer, const Operation& operation);
// Throws where the bytes are no operation that a rank of this version could have sent in a world of so many ranks: all
// code behind this may rely on it.
Operation read_operation(Reader& reader, int world_size);

// The announcement of one rank: "I am ready to do this." All but the operation is this rank's own, and need not be the
// same on the others.
struct Request {
  Operation operation;
  int32_t priority = 0;                     // higher goes first
  std::shared_ptr<const std::string> site;  // "train.py:31": where it was submitted, for messages; may be null
  // "all_reduce #17 of group \"0\"": what users know it as, for messages, where that is not its name; its first word is
  // the kind. May be null.
  std::shared_ptr<const std::string> title;
  // It has no name of the user, and was submitted while another thread of this rank waited for such a one: its place in
  // the order is chance. Fails on all ranks.
  bool is_unordered = false;

  bool operator==(const Request& other) const;
};
using RequestPtr = std::shared_ptr<const Request>;

std::string title_of(const Request& request);
// The kind of operation that users know it as: of its title, if it has one.
std::string_view kind_of(const Request& request);

void write(Writer& writer, const Request& request);
Request read_request(Reader& reader, int world_size);

}  // namespace ringtrain
