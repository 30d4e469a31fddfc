#include "coordination/mismatch.h"

#include <algorithm>
#include <cstdio>

namespace ringtrain {
namespace {

std::string plain(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

bool may_differ_in_rows(OpKind kind) { return kind == OpKind::allgather || kind == OpKind::alltoall; }

std::string tensors_text(const Request& request) {
  if (request.kind == OpKind::join) return "";
  if (!request.numbers.empty()) {
    std::string text = "asked for process sets [";
    for (size_t i = 0; i < request.numbers.size(); ++i) text += (i ? ", " : "") + std::to_string(request.numbers[i]);
    return text + "]";
  }
  if (request.tensors.empty()) return "sent nothing";
  std::string text = "sent ";
  for (size_t i = 0; i < request.tensors.size(); ++i) text += (i ? " and " : "") + to_string(request.tensors[i]);
  return text;
}

// The same with "*" for a first dimension that may differ.
std::string comparable_tensors_text(const Request& request) {
  if (!may_differ_in_rows(request.kind)) return tensors_text(request);
  std::string text;
  for (const TensorSpec& tensor : request.tensors) {
    TensorSpec rest = tensor;
    if (!rest.shape.empty()) rest.shape[0] = 0;
    text += to_string(rest) + " ";
  }
  return text;
}

std::string place_text(const Request& request) {
  if (request.tensors.empty()) return "sent nothing";
  return request.is_on_gpu ? "sent tensors on a GPU" : "sent tensors in host memory";
}

std::string kind_text(const Request& request) { return std::string("called ") + name_of(request.kind); }

std::string op_text(const Request& request) {
  const bool reduces = request.kind == OpKind::allreduce || request.kind == OpKind::reducescatter;
  return reduces ? std::string("used op=") + name_of(request.op) : "";
}

std::string root_text(const Request& request) {
  return request.kind == OpKind::broadcast ? "used root_rank=" + std::to_string(request.root) : "";
}

std::string scale_text(const Request& request) {
  return "used prescale_factor=" + plain(request.prescale) + " and postscale_factor=" + plain(request.postscale);
}

std::vector<int> ranks_like(const std::map<int, Request>& requests, std::string (*text)(const Request&),
                            const std::string& wanted) {
  std::vector<int> ranks;
  for (const auto& [rank, request] : requests)
    if (text(request) == wanted) ranks.push_back(rank);
  return ranks;
}

// Who did what, each variant once; `compare` decides what is a variant, `show` says it.
std::string who_did_what(const std::map<int, Request>& requests, std::string (*compare)(const Request&),
                         std::string (*show)(const Request&)) {
  std::string text;
  std::vector<std::string> seen;
  for (const auto& [rank, request] : requests) {
    const std::string variant = compare(request);
    if (std::find(seen.begin(), seen.end(), variant) != seen.end()) continue;
    seen.push_back(variant);
    text += (text.empty() ? "" : ", ") + ranks_text(ranks_like(requests, compare, variant)) + " " + show(request);
  }
  return text;
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (first ? ", " : "") + std::to_string(ranks[first]);
    if (last > first) text += "-" + std::to_string(ranks[last]);
    first = last + 1;
  }
  return text;
}

std::string find_mismatch(const std::map<int, Request>& requests) {
  // What ranks may differ in where they must not: equal texts fit together.
  struct Check {
    std::string (*compare)(const Request&);
    std::string (*show)(const Request&);
    const char* remedy;
  };
  constexpr Check kChecks[] = {
      {kind_text, kind_text, "Do all ranks call the same operations in the same order, or with the same names?"},
      {comparable_tensors_text, tensors_text, "Do all ranks build the same model?"},
      {place_text, place_text, "Put the tensors on a GPU on all ranks, or on none."},
      {op_text, op_text, "Give the same op on all ranks."},
      {root_text, root_text, "Give the same root_rank on all ranks."},
      {scale_text, scale_text, "Give the same scale factors on all ranks."},
  };
  const Request& first = requests.begin()->second;
  for (const Check& check : kChecks) {
    const std::string expected = check.compare(first);
    const bool agree = std::all_of(requests.begin(), requests.end(),
                                   [&](const auto& entry) { return check.compare(entry.second) == expected; });
    if (!agree) return title_of(first) + ": " + who_did_what(requests, check.compare, check.show) + ". " + check.remedy;
  }
  return "";
}

}  // namespace ringtrain
