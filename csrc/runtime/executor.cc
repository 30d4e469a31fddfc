#include "runtime/executor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "base/fork.h"
#include "collectives/group.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

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

// Sums of floats, adaptive ones too, take all factors at once, when the sum is rounded. An operation that is not linear
// in them, or is rounded in between, needs the prescale factor first.
bool takes_prescale_at_the_end(const Operation& operation, DType dtype) {
  return is_float(dtype) && reduce_of(operation.op) == Reduce::sum;
}

// `divisor`: of an average.
Reduction reduction_of(const Operation& operation, DType dtype, double divisor) {
  Reduction reduction{dtype, reduce_of(operation.op), operation.factors.postscale};
  if (takes_prescale_at_the_end(operation, dtype)) reduction.scale *= operation.factors.prescale;
  if (operation.op == ReduceOp::average) reduction.scale /= divisor;
  return reduction;
}

// `pieces` and `residuals`: one for each tensor of a plan.
void quantized_sum(const Operation& common, Group& host, const std::vector<Piece>& pieces,
                   const std::vector<float*>& residuals, Quantized& quantized) {
  std::vector<Quantized::Tensor> tensors;
  for (size_t t = 0; t < pieces.size(); ++t) tensors.push_back({pieces[t], residuals[t]});
  const double ranks = common.op == ReduceOp::average ? host.size() : 1;
  quantized.allreduce(host, common.quantizer, {common.factors.prescale, common.factors.postscale / ranks}, tensors);
}

// The factor of the operation that multiplies the values of each rank before they are reduced.
double prescale_of(const Operation& operation, DType dtype) {
  return takes_prescale_at_the_end(operation, dtype) ? 1.0 : operation.factors.prescale;
}

// Where the reduction reads from: `source`, or `destination` after the factor was applied there.
const void* scaled(Memory& memory, DType dtype, double factor, const void* source, void* destination, size_t count) {
  if (factor == 1.0) return source;
  memory.scale(dtype, factor, destination, source, count);
  return destination;
}

Counts to_bytes(const std::vector<int64_t>& rows, size_t bytes_per_row) {
  Counts bytes;
  for (const int64_t row : rows) bytes.push_back(static_cast<size_t>(row) * bytes_per_row);
  return bytes;
}

// A long result is new memory each time, and its page faults take longer than its values unless they are for 2 MB each.
// NumPy does the same.
void advise_huge_pages(char* data, size_t bytes) {
  constexpr size_t kFewestBytes = 4 << 20;
  if (bytes < kFewestBytes) return;
  const auto page = static_cast<size_t>(::getpagesize());
  const size_t before = -reinterpret_cast<uintptr_t>(data) % page;
  ::madvise(data + before, (bytes - before) / page * page, MADV_HUGEPAGE);  // may fail: then it is slower
}

}  // namespace

std::vector<float*> Residuals::of(const Operation& operation) {
  std::vector<Residual>& residuals = residuals_[key_of(operation)];
  const std::vector<TensorSpec>& tensors = operation.tensors;
  const bool fits = std::equal(residuals.begin(), residuals.end(), tensors.begin(), tensors.end(),
                               [](const Residual& one, const TensorSpec& spec) { return one.count == spec.count(); });
  if (!fits) {
    residuals.clear();
    for (const TensorSpec& spec : tensors) {
      // The system gives pages of zeros when they are touched: a rank has those of its column.
      auto* memory = static_cast<float*>(std::calloc(std::max<size_t>(spec.bytes(), 1), 1));
      if (!memory) throw std::bad_alloc();
      residuals.push_back({std::unique_ptr<float, Freed>(memory), spec.count()});
    }
  }
  std::vector<float*> arrays;
  for (const Residual& residual : residuals) arrays.push_back(residual.memory.get());
  return arrays;
}

void Residuals::forget(int process_set) {
  auto it = residuals_.lower_bound({process_set, ""});
  while (it != residuals_.end() && it->first.first == process_set) it = residuals_.erase(it);
}

double Executor::run(const Plan& plan, double agreed_s, double now, const Round::Values& values) {
  const Agreement& first = *plan.parts.front();
  // Its set was removed since: what is pending there fails when that is carried out.
  if (!membership_.has(first.operation.process_set)) return now;
  const Submissions submissions = inbox_.find(plan, rank_, agreed_s, now, name_of_group(first));
  try {
    return run(plan, submissions, values);
  } catch (...) {
    inbox_.give_up(submissions);
    throw;
  }
}

double Executor::run(const Plan& plan, const Submissions& submissions, const Round::Values& values) {
  const Agreement& first = *plan.parts.front();
  if (first.error != ErrorKind::none) {
    fail(submissions, first.error, first.message);
    return now_s();
  }
  const SubmissionPtr& own = submissions.front();
  const bool has_title = own && own->request->title && submissions.size() == 1;
  watch_.now_doing(has_title ? *own->request->title : plan.title);
  const bool is_for_this_rank = this->is_for_this_rank(first.operation);
  if (is_for_this_rank) require_own(plan, submissions);
  const bool is_small = !values.data.empty() && is_for_this_rank && first.operation.kind == OpKind::allreduce;
  if (is_small)
    if (const std::optional<double> ended = reduce_values(values, submissions)) return *ended;
  run_by_kind(plan, submissions);
  return now_s();
}

void Executor::run_by_kind(const Plan& plan, const Submissions& submissions) {
  const Agreement& first = *plan.parts.front();
  const OpKind kind = first.operation.kind;
  if (kind == OpKind::add_process_set || kind == OpKind::open_process_set)
    return add_process_set(first, submissions.front());
  if (kind == OpKind::remove_process_set || kind == OpKind::close_process_set)
    return remove_process_set(first, submissions.front());
  if (first.operation.is_on_gpu) return carry_out_on_gpu(plan, submissions);
  if (!is_for_this_rank(first.operation)) return;
  carry_out(plan, submissions, host_);
}

bool Executor::is_for_this_rank(const Operation& operation) const {
  if (!is_of_participants(operation.kind)) return sets_.contains_this_rank(operation.process_set);
  const std::vector<int> participants = participants_of(operation);
  return std::binary_search(participants.begin(), participants.end(), rank_);
}

// Nothing where the Group would come to other bits.
std::optional<double> Executor::reduce_values(const Round::Values& values, const Submissions& submissions) {
  const Operation& operation = submissions.front()->operation();
  void* const output = submissions.front()->outputs[0];
  const auto count = static_cast<size_t>(operation.tensors.front().count());
  if (values.are_added_up)
    std::memcpy(output, values.data.front(), operation.bytes());
  else if (!sets_.group(operation.process_set).reduce_values(reduction_of_value(operation), values.data, output, count))
    return std::nullopt;
  return finish(submissions, std::vector<Result>(1));
}

// Of its only tensor.
Reduction Executor::reduction_of_value(const Operation& operation) const {
  const size_t ranks = membership_.ranks(operation.process_set).size();
  return reduction_of(operation, operation.tensors.front().dtype, static_cast<double>(ranks));
}

// Making the Group of a process set takes rounds of its own: it is there after the first operation.
size_t Executor::sum_bytes(const Operation& operation) {
  const Group* const group = sets_.made_group(operation.process_set);
  const auto count = static_cast<size_t>(operation.tensors.front().count());
  return group ? group->node_sum_bytes(reduction_of_value(operation), count) : 0;
}

Value Executor::add_on_node(const Value& own) {
  const Operation& operation = *own.operation;
  const auto count = static_cast<size_t>(operation.tensors.front().count());
  const Group::NodeSum sum =
      sets_.group(operation.process_set).add_on_node(reduction_of_value(operation), own.data, count);
  return {own.slot, static_cast<uint32_t>(sum.bytes), static_cast<const char*>(sum.data)};
}

const void* Executor::add_nodes(const Operation& operation, const std::vector<const void*>& sums) {
  const auto count = static_cast<size_t>(operation.tensors.front().count());
  char* const sum = sum_.get(operation.bytes());
  sets_.group(operation.process_set).add_nodes(reduction_of_value(operation), sums, sum, count);
  return sum;
}

// A rank that has joined contributes zeros, which is agreed. From any other rank a tensor is expected. With zeros the
// sum would be wrong, and without this rank the others would wait for it.
void Executor::require_own(const Plan& plan, const Submissions& submissions) const {
  for (size_t i = 0; i < submissions.size(); ++i)
    if (!submissions[i] && !plan.parts[i]->has_joined(rank_))
      throw failure(title_of(plan.parts[i]->operation) +
                    ": all ranks have agreed on it, but nothing is pending for it on rank " + std::to_string(rank_) +
                    ". The ranks are out of step, which is a fault of ringtrain: please report it with the files of "
                    "the flight recorder. To go on, start from the last checkpoint.");
}

// Ranks outside the process set help to connect the others.
void Executor::carry_out_on_gpu(const Plan& plan, const Submissions& submissions) try {
  const int process_set = plan.parts.front()->operation.process_set;
  const std::string& trouble = gpus_.open(process_set);
  if (!sets_.contains_this_rank(process_set)) return;
  if (!trouble.empty()) return fail(submissions, ErrorKind::failure, plan.title + ": " + trouble);
  const std::shared_ptr<GpuTensors>& tensors = gpus_.tensors();
  const Gpu::Current current(*tensors->gpu());
  tensors->let_wait_for(submissions);
  carry_out(plan, submissions, tensors);
} catch (const Error& error) {
  if (error.kind() != ErrorKind::failure) throw;
  throw failure(plan.title + ": " + error.what());
}

void Executor::carry_out(const Plan& plan, const Submissions& submissions, std::shared_ptr<Memory> memory) {
  const Operation& operation = plan.parts.front()->operation;
  const auto loan =
      std::make_shared<Loan>(Loan{sets_.shared_group(operation.process_set), adasum_, quantized_, std::move(memory)});
  const Network::Lending lending(sets_.network(), loan);
  try {
    if (operation.kind == OpKind::allreduce)
      allreduce(plan, submissions, *loan);
    else if (operation.kind == OpKind::broadcast)
      broadcast(plan, submissions, *loan->memory);
    else if (operation.kind == OpKind::allgather)
      allgather(plan, submissions, *loan);
    else if (operation.kind == OpKind::reducescatter)
      reducescatter(plan, submissions, *loan);
    else
      run_one(plan, submissions.front(), *loan);
  } catch (...) {
    std::shared_ptr<const void> in_use = loan;
    // Nobody knows when other ranks, or the GPU, are through with what they have begun to write.
    if (operation.is_registered || operation.is_on_gpu) in_use = keep_for_ever(std::make_shared<char>());
    for (const SubmissionPtr& submission : submissions)
      if (submission) submission->handle->lend_until_gone(in_use);
    throw;
  }
}

const char* Executor::name_of_group(const Agreement& agreement) const {
  const bool moves_data = agreement.error == ErrorKind::none && agreement.operation.kind <= OpKind::reducescatter;
  const int id = agreement.operation.process_set;
  if (!moves_data || !sets_.contains_this_rank(id)) return "";
  return agreement.operation.is_on_gpu ? gpus_.name_of_group(id) : sets_.group(id).name();
}

void Executor::fail(const Submissions& submissions, ErrorKind kind, const std::string& message) {
  inbox_.remove(submissions, kind);
  for (const SubmissionPtr& submission : submissions)
    if (submission) submission->handle->fail(kind, message);
}

void Executor::finish_all(const Plan& plan, const Submissions& submissions, Memory& memory) {
  Result result;
  result.done = memory.done(plan.title);
  inbox_.remove(submissions);
  for (const SubmissionPtr& submission : submissions)
    if (submission) submission->handle->finish(result);
}

void Executor::finish_results(const Plan& plan, const Submissions& submissions, Loan& loan) {
  const GpuEventPtr done = loan.memory->done(plan.title);
  for (Result& result : loan.results) result.done = done;
  finish(submissions, std::move(loan.results));
}

// The history keeps the submissions, but not their results. An alltoall whose result does not fit ends well: its caller
// sees by the splits what the other ranks sent.
double Executor::finish(const Submissions& submissions, std::vector<Result> results) {
  const double now = inbox_.remove(submissions);
  for (size_t i = 0; i < submissions.size(); ++i) {
    if (!submissions[i]) continue;
    const std::shared_ptr<Handle> handle = std::move(submissions[i]->handle);
    const bool had_no_room = submissions[i]->outputs.size() > 0 && !results[i].tensors.empty() &&
                             submissions[i]->operation().kind != OpKind::alltoall;
    if (had_no_room)
      handle->fail(ErrorKind::mismatch,
                   title_of(*submissions[i]->request) +
                       ": the result does not fit into the memory that this rank gave for it. Do all ranks send "
                       "equally many elements?");
    else
      handle->finish(std::move(results[i]));
  }
  return now;
}

void Executor::allreduce(const Plan& plan, const Submissions& submissions, Loan& loan) {
  Memory& memory = *loan.memory;
  const Operation& common = plan.parts.front()->operation;
  Group& group = memory.group(common.process_set);
  const bool keeps_unit = common.quantizer.kind != Quantizer::Kind::none;
  if (common.is_weighted) sum_weights(submissions, loan);
  std::map<std::pair<DType, double>, std::vector<Piece>> pieces;  // by dtype and divisor

  // Of tensors for which this rank contributes zeros, since it has joined or gives no weight to what it has.
  const auto gives_zeros = [&](const SubmissionPtr& one) { return !one || (common.is_weighted && one->weight == 0); };
  size_t bytes_of_zeros = 0;
  for (size_t i = 0; i < submissions.size(); ++i)
    if (gives_zeros(submissions[i])) bytes_of_zeros += plan.parts[i]->operation.bytes();
  char* zeros = memory.zeros(bytes_of_zeros);

  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const Operation& operation = plan.parts[i]->operation;
    if (common.is_weighted && !trouble_of(loan.weights[i]).empty()) continue;
    Weighting weighting{1.0, static_cast<double>(group.size())};
    if (common.is_weighted)
      weighting = weighting_of(submissions[i] ? submissions[i]->weight : 0, loan.weights[i], group.size(), keeps_unit);
    for (size_t t = 0; t < operation.tensors.size(); ++t) {
      const TensorSpec& spec = operation.tensors[t];
      const auto count = static_cast<size_t>(spec.count());
      std::vector<Piece>& list = pieces[{spec.dtype, weighting.divisor}];
      const auto& submission = submissions[i];
      if (!submission) {
        list.push_back({zeros, zeros, count});
      } else if (gives_zeros(submission)) {
        void* destination = submission->outputs[t];
        memory.copy(destination, zeros, spec.bytes());
        list.push_back({destination, destination, count});
      } else {
        void* destination = submission->outputs[t];
        const double factor = weighting.factor * prescale_of(operation, spec.dtype);
        list.push_back(
            {scaled(memory, spec.dtype, factor, submission->inputs[t], destination, count), destination, count});
      }
      if (gives_zeros(submission)) zeros += spec.bytes();
    }
  }
  for (const auto& [key, list] : pieces) {
    const DType dtype = key.first;
    const Reduction reduction = reduction_of(common, dtype, key.second);
    if (keeps_unit) {
      const std::vector<float*> residuals = residuals_of(plan, loan);
      memory.on_host(common.process_set, dtype, list, [&](Group& host, const std::vector<Piece>& pieces) {
        quantized_sum(common, host, pieces, residuals, *loan.quantized);
      });
    } else if (common.op == ReduceOp::adasum) {
      memory.on_host(common.process_set, dtype, list, [&](Group& host, const std::vector<Piece>& pieces) {
        loan.adasum->allreduce(host, dtype, reduction.scale, pieces);
      });
    } else if (common.is_registered) {
      group.allreduce_registered(reduction, list);
    } else {
      group.allreduce(reduction, list);
    }
  }
  finish_all(plan, common.is_weighted ? fail_without_average(plan, submissions, loan) : submissions, memory);
}

void Executor::sum_weights(const Submissions& submissions, Loan& loan) {
  for (const SubmissionPtr& submission : submissions)
    loan.weights.push_back(sum_of(submission ? submission->weight : 0));
  sum_over_ranks(*loan.on_host, loan.weights);
}

Executor::Submissions Executor::fail_without_average(const Plan& plan, Submissions submissions, const Loan& loan) {
  for (size_t i = 0; i < submissions.size(); ++i) {
    const std::string trouble = trouble_of(loan.weights[i]);
    if (trouble.empty()) continue;
    fail({std::exchange(submissions[i], nullptr)}, ErrorKind::mismatch,
         title_of(plan.parts[i]->operation) + ": " + trouble);
  }
  return submissions;
}

// Of each tensor of the plan that is reduced. A rank that has joined still has what it has left out before.
std::vector<float*> Executor::residuals_of(const Plan& plan, const Loan& loan) {
  std::vector<float*> all;
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const Operation& operation = plan.parts[i]->operation;
    if (operation.is_weighted && !trouble_of(loan.weights[i]).empty()) continue;
    for (float* residual : residuals_.of(operation)) all.push_back(residual);
  }
  return all;
}

void Executor::run_one(const Plan& plan, const SubmissionPtr& submission, Loan& loan) {
  const Agreement& agreement = *plan.parts.front();
  const Operation& operation = agreement.operation;
  // Join and barrier move no data: that all ranks have come is what was agreed.
  if (operation.kind == OpKind::join) inbox_.set_unnamed(operation.process_set, agreement.unnamed);
  if (!submission) return;  // a barrier of the others, after this rank has joined
  Result& result = loan.results.emplace_back();
  if (operation.kind == OpKind::alltoall)
    alltoall(*submission, loan);
  else
    result.number = agreement.result;
  result.done = loan.memory->done(plan.title);
  finish({submission}, std::move(loan.results));
}

// Returns the memory of the caller if the result fits there, else memory of its own: then finish() fails the Handle of
// this rank, unless it is that of an alltoall, and the other ranks go on.
void* Executor::place_of_result(const Submission& submission, size_t tensor, const TensorSpec& spec, Result& result,
                                Memory& memory) {
  if (submission.has_room_for(tensor, spec)) return submission.outputs[tensor];
  return result.tensors.emplace_back(memory.allocate(spec)).memory.get();
}

void Executor::allgather(const Plan& plan, const Submissions& submissions, Loan& loan) {
  Group& group = loan.memory->group(plan.parts.front()->operation.process_set);
  std::vector<Group::Gathering> arrays;
  loan.results.resize(submissions.size());
  for (size_t i = 0; i < submissions.size(); ++i) {
    const Submission& submission = *submissions[i];
    for (size_t t = 0; t < submission.inputs.size(); ++t) {
      const std::vector<int64_t>& rows = plan.parts[i]->rows[t];
      TensorSpec spec = submission.operation().tensors[t];
      spec.shape[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
      arrays.push_back({submission.inputs[t], place_of_result(submission, t, spec, loan.results[i], *loan.memory),
                        to_bytes(rows, spec.row_bytes())});
    }
  }
  group.allgather_all(arrays);
  finish_results(plan, submissions, loan);
}

// The first dimension is split as evenly as possible; the first ranks get one row more, as in Horovod.
void Executor::reducescatter(const Plan& plan, const Submissions& submissions, Loan& loan) {
  Memory& memory = *loan.memory;
  const Operation& common = plan.parts.front()->operation;
  Group& group = memory.group(common.process_set);
  const int64_t ranks = group.size();
  if (common.is_weighted) sum_weights(submissions, loan);
  std::map<std::pair<DType, double>, std::vector<Group::Scattering>> arrays;  // by dtype and divisor

  // A tensor with a weight of 0 is not read: the reduction reads zeros, the same ones for all such tensors.
  const auto gives_zeros = [&](const Submission& one) { return common.is_weighted && one.weight == 0; };
  size_t bytes_of_zeros = 0;
  for (const SubmissionPtr& submission : submissions)
    if (gives_zeros(*submission))
      for (const TensorSpec& spec : submission->operation().tensors)
        bytes_of_zeros = std::max(bytes_of_zeros, spec.bytes());
  const char* const zeros = memory.zeros(bytes_of_zeros);

  loan.results.resize(submissions.size());
  for (size_t i = 0; i < submissions.size(); ++i) {
    const Submission& submission = *submissions[i];
    if (common.is_weighted && !trouble_of(loan.weights[i]).empty()) continue;
    Weighting weighting{1.0, static_cast<double>(ranks)};
    if (common.is_weighted) weighting = weighting_of(submission.weight, loan.weights[i], group.size(), false);
    for (size_t t = 0; t < submission.inputs.size(); ++t) {
      const TensorSpec& whole = submission.operation().tensors[t];
      const int64_t rows = whole.shape[0];
      const size_t row = whole.row_bytes() / size_of(whole.dtype);
      Counts counts;
      for (int64_t r = 0; r < ranks; ++r)
        counts.push_back(static_cast<size_t>(rows / ranks + (r < rows % ranks)) * row);
      TensorSpec spec = whole;
      spec.shape[0] = rows / ranks + (group.rank() < rows % ranks);
      void* const output = place_of_result(submission, t, spec, loan.results[i], memory);

      const void* source = submission.inputs[t];
      const double factor = weighting.factor * prescale_of(common, whole.dtype);
      if (gives_zeros(submission)) {
        source = zeros;
      } else if (factor != 1.0) {
        char* const place = loan.scaled.emplace_back(memory.allocate(whole)).memory.get();
        source = scaled(memory, whole.dtype, factor, source, place, total_of(counts));
      }
      arrays[{whole.dtype, weighting.divisor}].push_back({source, output, std::move(counts)});
    }
  }
  for (const auto& [key, list] : arrays) group.reduce_scatter_all(reduction_of(common, key.first, key.second), list);
  finish_results(plan, common.is_weighted ? fail_without_average(plan, submissions, loan) : submissions, loan);
}

void Executor::broadcast(const Plan& plan, const Submissions& submissions, Memory& memory) {
  const Operation& common = plan.parts.front()->operation;
  Group& group = memory.group(common.process_set);
  const int root = membership_.place(common.process_set, common.root);
  std::vector<Piece> pieces;
  for (const SubmissionPtr& submission : submissions) {
    for (size_t t = 0; t < submission->inputs.size(); ++t) {
      void *input = submission->inputs[t], *output = submission->outputs[t];
      const size_t bytes = submission->operation().tensors[t].bytes();
      if (group.rank() == root) memory.copy(output, input, bytes);
      pieces.push_back({output, output, bytes});
    }
  }
  group.broadcast_all(pieces, root);
  finish_all(plan, submissions, memory);
}

void Executor::alltoall(const Submission& submission, Loan& loan) {
  Group& group = loan.memory->group(submission.operation().process_set);
  const auto ranks = static_cast<size_t>(group.size());
  const Counts one(ranks, sizeof(int64_t));
  for (size_t t = 0; t < submission.inputs.size(); ++t) {
    const int64_t* first = submission.splits.data() + t * ranks;
    const std::vector<int64_t>& sent = loan.sent_rows = {first, first + ranks};
    const std::vector<int64_t>& received = loan.received_rows = std::vector<int64_t>(ranks);
    loan.on_host->alltoall(loan.sent_rows.data(), one, loan.received_rows.data(), one);

    TensorSpec spec = submission.operation().tensors[t];
    const size_t row = spec.row_bytes();
    spec.shape[0] = std::accumulate(received.begin(), received.end(), int64_t{0});
    Result& result = loan.results.front();
    void* const output = place_of_result(submission, t, spec, result, *loan.memory);
    group.alltoall(submission.inputs[t], to_bytes(sent, row), output, to_bytes(received, row));
    result.received_splits.insert(result.received_splits.end(), received.begin(), received.end());
  }
}

void Executor::add_process_set(const Agreement& agreement, const SubmissionPtr& submission) {
  const int id = static_cast<int>(agreement.result);
  opener_.open(id);
  if (!submission) return;  // it was opened by others
  Result result;
  result.number = id;
  finish({submission}, {result});
}

void Executor::remove_process_set(const Agreement& agreement, const SubmissionPtr& submission) {
  const int id = static_cast<int>(agreement.operation.numbers.front());
  if (agreement.operation.kind == OpKind::close_process_set)
    opener_.close(id, ErrorKind::shut_down,
                  "was removed by all its ranks before this operation was complete. Call the operation on all ranks, "
                  "and wait for it, before remove_process_set() or destroy_process_group()");
  else
    opener_.close(id, ErrorKind::failure, "was removed");
  residuals_.forget(id);
  if (submission) finish({submission}, {Result()});  // else it was closed by others
}

// ------------------------------------------------------------------------------------------------ memory of the host

void HostMemory::copy(void* destination, const void* source, size_t bytes) {
  ringtrain::copy(destination, source, bytes);
}

void HostMemory::scale(DType dtype, double factor, void* destination, const void* source, size_t count) {
  ringtrain::scale(dtype, factor, destination, source, count);
}

char* HostMemory::zeros(size_t bytes) {
  char* zeros = zeros_.get(bytes);
  std::memset(zeros, 0, bytes);
  return zeros;
}

OwnedTensor HostMemory::allocate(const TensorSpec& spec) {
  // Not aligned_alloc: before glibc 2.38 that finds no place in what was freed by one of the same size, and the heap
  // grows with every result.
  constexpr size_t kLine = 64;
  size_t space = spec.bytes() + kLine;  // never none
  auto* memory = static_cast<char*>(std::malloc(space));
  if (!memory)
    throw failure("out of memory: " + std::to_string(space >> 20) + " MB for a result of " + to_string(spec));
  void* aligned = memory;
  std::align(kLine, spec.bytes(), aligned, space);
  advise_huge_pages(static_cast<char*>(aligned), spec.bytes());
  return {spec, std::shared_ptr<char>(static_cast<char*>(aligned), [memory](char*) { std::free(memory); }), nullptr};
}

}  // namespace ringtrain
