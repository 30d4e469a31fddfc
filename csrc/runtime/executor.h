// Carries out plans: finds the submissions, hands their memory to the Group, and finishes their Handles.
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/adasum.h"
#include "collectives/quantized.h"
#include "coordination/operation.h"
#include "coordination/plan.h"
#include "runtime/gpus.h"
#include "runtime/inbox.h"
#include "runtime/memory.h"
#include "runtime/peer_watch.h"
#include "runtime/process_sets.h"
#include "runtime/weights.h"

namespace ringtrain {

// The residuals of quantized operations, by operation: each is added to the next one of that name.
//
// Requires Engine::turn_.
class Residuals {
 public:
  // One array for each tensor, as long as it. Zeros at first, and when the name comes with other shapes.
  std::vector<float*> of(const Operation& operation);
  // Of all operations of a process set.
  void forget(int process_set);

 private:
  struct Freed {
    void operator()(float* memory) const { std::free(memory); }
  };
  struct Residual {
    std::unique_ptr<float, Freed> memory;
    int64_t count = 0;
  };
  std::map<Key, std::vector<Residual>> residuals_;
};

class Executor final : public NodeSums {
 public:
  // Opens and closes process sets for it. All ranks of the world call these together.
  class Sets {
   public:
    virtual ~Sets() = default;
    virtual void open(int process_set) REQUIRES(turn) = 0;
    // Nothing is under way in it any more when this returns. `kind`, `why`: for what is pending there.
    virtual void close(int process_set, ErrorKind kind, const std::string& why) REQUIRES(turn) = 0;
  };

  // `rank`: this one. `membership`: of the Coordinator that agreed on the plans. All else outlives this.
  Executor(int rank, const Membership& membership, PeerWatch& watch, Inbox& inbox, ProcessSets& sets, Gpus& gpus,
           Sets& opener, Residuals& residuals)
      : rank_(rank),
        membership_(membership),
        watch_(watch),
        inbox_(inbox),
        sets_(sets),
        gpus_(gpus),
        opener_(opener),
        residuals_(residuals) {}

  // Throws when the ranks are out of step afterwards; then nothing can be carried out any more.
  // `values`: of its tensor, if they are here already; else nothing. Returns when it has ended.
  double run(const Plan& plan, double agreed_s, double now, const Round::Values& values) REQUIRES(turn);

  size_t sum_bytes(const Operation& operation) override REQUIRES(turn);
  Value add_on_node(const Value& own) override REQUIRES(turn);
  const void* add_nodes(const Operation& operation, const std::vector<const void*>& sums) override REQUIRES(turn);

 private:
  using Submissions = std::vector<SubmissionPtr>;
  // All that a plan is carried out with, but for the user's arrays. Requests of MPI own it: they may outlive the plan.
  struct Loan {
    const std::shared_ptr<Group> on_host;
    const std::shared_ptr<Adasum> adasum;
    const std::shared_ptr<Quantized> quantized;
    const std::shared_ptr<Memory> memory;
    std::vector<Result> results = {};  // one for each part, where not all of it is in tensors of the user
    std::vector<int64_t> sent_rows = {}, received_rows = {};
    std::vector<WeightSum> weights = {};  // one for each part of a weighted plan
    std::vector<OwnedTensor> scaled = {};
  };

  const char* name_of_group(const Agreement& agreement) const REQUIRES(turn);
  void require_own(const Plan& plan, const Submissions& submissions) const REQUIRES(turn);
  void fail(const Submissions& submissions, ErrorKind kind, const std::string& message) REQUIRES(turn);
  // Whether this rank takes part in it.
  bool is_for_this_rank(const Operation& operation) const REQUIRES(turn);
  double run(const Plan& plan, const Submissions& submissions, const Round::Values& values) REQUIRES(turn);
  void run_by_kind(const Plan& plan, const Submissions& submissions) REQUIRES(turn);
  std::optional<double> reduce_values(const Round::Values& values, const Submissions& submissions) REQUIRES(turn);
  Reduction reduction_of_value(const Operation& operation) const REQUIRES(turn);
  void carry_out_on_gpu(const Plan& plan, const Submissions& submissions) REQUIRES(turn);
  void carry_out(const Plan& plan, const Submissions& submissions, std::shared_ptr<Memory> memory) REQUIRES(turn);
  void allreduce(const Plan& plan, const Submissions& submissions, Loan& loan) REQUIRES(turn);
  // Sums the weights of a weighted plan over the ranks.
  void sum_weights(const Submissions& submissions, Loan& loan) REQUIRES(turn);
  // Fails those parts of a weighted plan whose weights have no average. Returns the others, and null in the place of
  // these.
  Submissions fail_without_average(const Plan& plan, Submissions submissions, const Loan& loan) REQUIRES(turn);
  void broadcast(const Plan& plan, const Submissions& submissions, Memory& memory) REQUIRES(turn);
  void allgather(const Plan& plan, const Submissions& submissions, Loan& loan) REQUIRES(turn);
  void reducescatter(const Plan& plan, const Submissions& submissions, Loan& loan) REQUIRES(turn);
  std::vector<float*> residuals_of(const Plan& plan, const Loan& loan) REQUIRES(turn);
  void run_one(const Plan& plan, const SubmissionPtr& submission, Loan& loan) REQUIRES(turn);
  void add_process_set(const Agreement& agreement, const SubmissionPtr& submission) REQUIRES(turn);
  void remove_process_set(const Agreement& agreement, const SubmissionPtr& submission) REQUIRES(turn);

  // Its result goes to the Loan.
  void alltoall(const Submission& submission, Loan& loan) REQUIRES(turn);
  static void* place_of_result(const Submission& submission, size_t tensor, const TensorSpec& spec, Result& result,
                               Memory& memory);

  // Frees the names and finishes the Handles of a plan whose results are in its tensors.
  void finish_all(const Plan& plan, const Submissions& submissions, Memory& memory) REQUIRES(turn);
  // The same for a plan whose results are in the loan.
  void finish_results(const Plan& plan, const Submissions& submissions, Loan& loan) REQUIRES(turn);
  // Frees the names and finishes the Handles, each with its result. Returns when the operations have ended.
  double finish(const Submissions& submissions, std::vector<Result> results) REQUIRES(turn);

  const int rank_;
  const Membership& membership_;
  PeerWatch& watch_;
  Inbox& inbox_;
  ProcessSets& sets_;
  Gpus& gpus_;
  Sets& opener_;
  Residuals& residuals_;
  Scratch sum_;  // of the nodes
  const std::shared_ptr<HostMemory> host_ = std::make_shared<HostMemory>(sets_);
  const std::shared_ptr<Adasum> adasum_ = std::make_shared<Adasum>();
  const std::shared_ptr<Quantized> quantized_ = std::make_shared<Quantized>();
};

}  // namespace ringtrain
