// Carries out plans: finds the submissions, hands their memory to the Group, and finishes their Handles.
#pragma once

#include <vector>

#include "collectives/adasum.h"
#include "collectives/scratch.h"
#include "coordination/plan.h"
#include "runtime/inbox.h"
#include "runtime/process_sets.h"

namespace ringtrain {

// One thread at a time.
class Executor {
 public:
  // Both outlive this.
  Executor(Inbox& inbox, ProcessSets& sets) : inbox_(inbox), sets_(sets) {}

  // Throws when the ranks are out of step afterwards; then nothing can be carried out any more.
  void run(const Plan& plan, double agreed_s);

 private:
  const char* name_of_group(const Agreement& agreement) const;
  void fail(const Agreement& agreement, const SubmissionPtr& submission);
  void allreduce(const Plan& plan, const std::vector<SubmissionPtr>& submissions);
  void run_one(const Agreement& agreement, const SubmissionPtr& submission);
  void add_process_set(const Agreement& agreement, const SubmissionPtr& submission);
  void remove_process_set(const Agreement& agreement, const SubmissionPtr& submission);

  Result allgather(const Agreement& agreement, const Submission& submission, Group& group);
  void broadcast(const Agreement& agreement, const Submission& submission, Group& group);
  Result alltoall(const Submission& submission, Group& group);
  Result reducescatter(const Submission& submission, Group& group);

  // Frees the name and finishes the Handle.
  void finish(const SubmissionPtr& submission, Result result);

  Inbox& inbox_;
  ProcessSets& sets_;
  Scratch zeros_;
  Adasum adasum_;
};

}  // namespace ringtrain
