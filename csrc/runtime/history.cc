#include "runtime/history.h"

#include <utility>

namespace ringtrain {
namespace {

constexpr size_t kCapacity = 1024;

void add_to(Totals& totals, const Submission& submission) {
  const Progress& progress = submission.progress;
  ++totals.operations;
  if (progress.error != ErrorKind::none) ++totals.failed;
  if (progress.begun_s == 0) return;
  totals.bytes += submission.operation().bytes();
  totals.queued_s += progress.announced_s - progress.submitted_s;
  totals.waiting_s += progress.agreed_s - progress.announced_s;
  totals.ready_s += progress.begun_s - progress.agreed_s;
  totals.working_s += progress.ended_s - progress.begun_s;
}

}  // namespace

SubmissionPtr History::add(SubmissionPtr submission) {
  add_to(totals_[submission->operation().kind], *submission);
  if (ring_.size() < kCapacity) {
    ring_.push_back(std::move(submission));
    return nullptr;
  }
  std::swap(ring_[next_], submission);
  next_ = (next_ + 1) % kCapacity;
  return submission;
}

std::vector<SubmissionPtr> History::last() const {
  std::vector<SubmissionPtr> submissions(ring_.begin() + static_cast<std::ptrdiff_t>(next_), ring_.end());
  submissions.insert(submissions.end(), ring_.begin(), ring_.begin() + static_cast<std::ptrdiff_t>(next_));
  return submissions;
}

}  // namespace ringtrain
