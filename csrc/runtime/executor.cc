#include "runtime/executor.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>

#include "collectives/group.h"

namespace ringtrain {
namespace {

Reduce reduce_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return Reduce::min;
    case ReduceOp::max:
      return Reduce::max;
    case ReduceOp::product:
      return Reduce::product;
    default:
      return Reduce::sum;
  }
}

// Sums of floats, adaptive ones too, take all factors at once, when the sum is rounded. What is not linear in them, or
// is rounded in between, needs the prescale factor first.
bool takes_prescale_at_the_end(const Request& request, DType dtype) {
  return is_float(dtype) && reduce_of(request.op) == Reduce::sum;
}

Reduction reduction_of(const Request& request, DType dtype, int ranks) {
  Reduction reduction{dtype, reduce_of(request.op), request.postscale};
  if (takes_prescale_at_the_end(request, dtype)) reduction.scale *= request.prescale;
  if (request.op == ReduceOp::average) reduction.scale /= ranks;
  return reduction;
}

// Where the reduction reads from: `source`, or `destination` after the prescale factor was applied there.
const void* prescaled(const Request& request, DType dtype, const void* source, void* destination, size_t count) {
  if (request.prescale == 1.0 || takes_prescale_at_the_end(request, dtype)) return source;
  scale(dtype, request.prescale, destination, source, count);
  return destination;
}

OwnedTensor allocate(const TensorSpec& spec) {
  constexpr size_t kLine = 64;
  const size_t bytes = (spec.bytes() + kLine) / kLine * kLine;  // never none
  auto* memory = static_cast<char*>(std::aligned_alloc(kLine, bytes));
  if (!memory)
    throw failure("out of memory: " + std::to_string(bytes >> 20) + " MB for a result of " + to_string(spec));
  return {spec, std::shared_ptr<char>(memory, std::free)};
}

// Bytes of one index of the first dimension.
size_t row_bytes(const TensorSpec& spec) {
  TensorSpec row = spec;
  row.shape[0] = 1;
  return row.bytes();
}

Counts to_bytes(const std::vector<int64_t>& rows, size_t bytes_per_row) {
  Counts bytes;
  for (const int64_t row : rows) bytes.push_back(static_cast<size_t>(row) * bytes_per_row);
  return bytes;
}

}  // namespace

void Executor::run(const Plan& plan, double agreed_s) {
  const Agreement& first = *plan.parts.front();
  const std::vector<SubmissionPtr> submissions = inbox_.find(plan, agreed_s, name_of_group(first));
  if (first.error != ErrorKind::none) return fail(first, submissions.front());
  if (first.request.kind == OpKind::add_process_set) return add_process_set(first, submissions.front());
  if (first.request.kind == OpKind::remove_process_set) return remove_process_set(first, submissions.front());
  if (!sets_.contains_this_rank(first.request.process_set)) return;
  if (first.request.kind == OpKind::allreduce) return allreduce(plan, submissions);
  run_one(first, submissions.front());
}

const char* Executor::name_of_group(const Agreement& agreement) const {
  const bool moves_data = agreement.error == ErrorKind::none && agreement.request.kind <= OpKind::reducescatter;
  const int id = agreement.request.process_set;
  return moves_data && sets_.contains_this_rank(id) ? sets_.group(id).name() : "";
}

void Executor::fail(const Agreement& agreement, const SubmissionPtr& submission) {
  if (!submission) return;
  inbox_.remove(std::vector{submission}, agreement.error);
  submission->handle->fail(agreement.error, agreement.message);
}

// The history keeps the submission, but not its result.
void Executor::finish(const SubmissionPtr& submission, Result result) {
  inbox_.remove(std::vector{submission});
  const std::shared_ptr<Handle> handle = std::move(submission->handle);
  handle->finish(std::move(result));
}

void Executor::allreduce(const Plan& plan, const std::vector<SubmissionPtr>& submissions) {
  const Request& common = plan.parts.front()->request;
  Group& group = sets_.group(common.process_set);
  std::map<DType, std::vector<Piece>> pieces;

  size_t joined_bytes = 0;  // of tensors for which this rank, having joined, contributes zeros
  for (size_t i = 0; i < submissions.size(); ++i)
    if (!submissions[i]) joined_bytes += plan.parts[i]->request.bytes();
  char* zeros = zeros_.get(joined_bytes);
  std::memset(zeros, 0, joined_bytes);

  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const Request& request = plan.parts[i]->request;
    for (size_t t = 0; t < request.tensors.size(); ++t) {
      const TensorSpec& spec = request.tensors[t];
      const auto count = static_cast<size_t>(spec.count());
      if (const auto& submission = submissions[i]) {
        void* destination = submission->outputs[t];
        const void* source = prescaled(request, spec.dtype, submission->inputs[t], destination, count);
        pieces[spec.dtype].push_back({source, destination, count});
      } else {
        pieces[spec.dtype].push_back({zeros, zeros, count});
        zeros += spec.bytes();
      }
    }
  }
  for (const auto& [dtype, list] : pieces) {
    const Reduction reduction = reduction_of(common, dtype, group.size());
    if (common.op == ReduceOp::adasum)
      adasum_.allreduce(group, dtype, reduction.scale, list);
    else if (common.is_in_arena)
      group.allreduce_in_arena(reduction, list);
    else
      group.allreduce(reduction, list);
  }
  inbox_.remove(submissions);
  for (const SubmissionPtr& submission : submissions)
    if (submission) submission->handle->finish({});
}

void Executor::run_one(const Agreement& agreement, const SubmissionPtr& submission) {
  const Request& request = agreement.request;
  Group& group = sets_.group(request.process_set);
  // Join and barrier move no data: that all ranks have come is what was agreed.
  if (request.kind == OpKind::join) inbox_.set_unnamed(request.process_set, agreement.unnamed);
  if (!submission) return;  // a barrier of the others, after this rank has joined
  Result result;
  switch (request.kind) {
    case OpKind::allgather:
      result = allgather(agreement, *submission, group);
      break;
    case OpKind::broadcast:
      broadcast(agreement, *submission, group);
      break;
    case OpKind::alltoall:
      result = alltoall(*submission, group);
      break;
    case OpKind::reducescatter:
      result = reducescatter(*submission, group);
      break;
    default:
      result.number = agreement.result;
      break;
  }
  finish(submission, std::move(result));
}

Result Executor::allgather(const Agreement& agreement, const Submission& submission, Group& group) {
  Result result;
  for (size_t t = 0; t < submission.inputs.size(); ++t) {
    const std::vector<int64_t>& rows = agreement.rows[t];
    TensorSpec spec = submission.request.tensors[t];
    const size_t row = row_bytes(spec);
    spec.shape[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    const OwnedTensor& output = result.tensors.emplace_back(allocate(spec));
    group.allgather(submission.inputs[t], output.memory.get(), to_bytes(rows, row));
  }
  return result;
}

void Executor::broadcast(const Agreement& agreement, const Submission& submission, Group& group) {
  const int root = sets_.membership().place(agreement.request.process_set, agreement.request.root);
  for (size_t t = 0; t < submission.inputs.size(); ++t) {
    void *input = submission.inputs[t], *output = submission.outputs[t];
    const size_t bytes = submission.request.tensors[t].bytes();
    if (group.rank() == root && input != output && bytes > 0) std::memcpy(output, input, bytes);
    group.broadcast(output, bytes, root);
  }
}

Result Executor::alltoall(const Submission& submission, Group& group) {
  Result result;
  const auto ranks = static_cast<size_t>(group.size());
  const Counts one(ranks, sizeof(int64_t));
  for (size_t t = 0; t < submission.inputs.size(); ++t) {
    const int64_t* first = submission.splits.data() + t * ranks;
    const std::vector<int64_t> sent(first, first + ranks);
    std::vector<int64_t> received(ranks);
    group.alltoall(sent.data(), one, received.data(), one);

    TensorSpec spec = submission.request.tensors[t];
    const size_t row = row_bytes(spec);
    spec.shape[0] = std::accumulate(received.begin(), received.end(), int64_t{0});
    const OwnedTensor& output = result.tensors.emplace_back(allocate(spec));
    group.alltoall(submission.inputs[t], to_bytes(sent, row), output.memory.get(), to_bytes(received, row));
    result.received_splits.insert(result.received_splits.end(), received.begin(), received.end());
  }
  return result;
}

// The first dimension is split as evenly as possible; the first ranks get one row more, as in Horovod.
Result Executor::reducescatter(const Submission& submission, Group& group) {
  Result result;
  const int64_t ranks = group.size();
  const Request& request = submission.request;
  for (size_t t = 0; t < submission.inputs.size(); ++t) {
    TensorSpec spec = request.tensors[t];
    const int64_t rows = spec.shape[0];
    const size_t row = row_bytes(spec) / size_of(spec.dtype);
    Counts counts;
    for (int64_t r = 0; r < ranks; ++r) counts.push_back(static_cast<size_t>(rows / ranks + (r < rows % ranks)) * row);
    spec.shape[0] = rows / ranks + (group.rank() < rows % ranks);
    const OwnedTensor& output = result.tensors.emplace_back(allocate(spec));

    const void* source = submission.inputs[t];
    OwnedTensor scaled;
    if (request.prescale != 1.0 && !takes_prescale_at_the_end(request, spec.dtype)) {
      scaled = allocate(request.tensors[t]);
      source = prescaled(request, spec.dtype, source, scaled.memory.get(), total_of(counts));
    }
    group.reduce_scatter(reduction_of(request, spec.dtype, group.size()), source, output.memory.get(), counts);
  }
  return result;
}

void Executor::add_process_set(const Agreement& agreement, const SubmissionPtr& submission) {
  const int id = static_cast<int>(agreement.result);
  sets_.open(id);
  if (sets_.contains_this_rank(id)) inbox_.allow(id);
  Result result;
  result.number = id;
  if (submission) finish(submission, std::move(result));
}

void Executor::remove_process_set(const Agreement& agreement, const SubmissionPtr& submission) {
  const int id = static_cast<int>(agreement.request.numbers.front());
  inbox_.forbid(id);
  sets_.close(id);
  if (submission) finish(submission, {});
}

}  // namespace ringtrain
