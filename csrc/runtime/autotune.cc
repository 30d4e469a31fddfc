#include "runtime/autotune.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace ringtrain {
namespace {

constexpr size_t kSamplesPerCandidate = 5, kFinalSamples = 9;
constexpr size_t kOperationsPerSample = 8;
constexpr double kSample_s = 0.03;
// A candidate must be faster than the one in use by more than measuring it again would be.
constexpr double kClearly = 1.03;

std::string with_digits(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

// As the option counts it.
std::string in_units(const Tuning& tuning, const Autotune::Knob& knob) {
  return with_digits(static_cast<double>(tuning.*knob.member) / static_cast<double>(knob.unit), 0);
}

constexpr size_t kKilo = 1024, kMega = 1024 * 1024;

}  // namespace

std::vector<Autotune::Knob> Autotune::knobs(const Options& options, bool is_one_node, bool shares_nodes) {
  std::vector<Knob> all;
  if (shares_nodes) all.push_back({"mailbox_kb", &Tuning::mailbox_bytes, kKilo, {32 * kKilo, 64 * kKilo}});
  if (!is_one_node)
    all.push_back(
        {"ring_chunk_kb", &Tuning::ring_chunk_bytes, kKilo, {30 * kKilo, 60 * kKilo, 240 * kKilo, 960 * kKilo}});
  all.push_back(
      {"fusion_threshold_mb", &Tuning::fusion_threshold_bytes, kMega, {kMega, 4 * kMega, 16 * kMega, 64 * kMega}});
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](const Knob& knob) { return options.set_by_user.count(knob.option) != 0; }),
            all.end());
  return all;
}

Autotune::Autotune(const Tuning& start, std::vector<Knob> knobs)
    : start_(start), knobs_(std::move(knobs)), now_(start), best_(start), began_s_(now_s()) {
  begin_trial({});
}

// Of one candidate there is nothing to learn.
void Autotune::begin_trial(std::vector<Tuning> candidates) {
  candidates_ = std::move(candidates);
  samples_.assign(candidates_.size(), {});
  turn_ = 0;
  if (candidates_.size() < 2) return end_trial();
  if (!(candidates_.front() == now_)) proposal_ = candidates_.front();
}

void Autotune::note(size_t bytes, double seconds) {
  if (is_done_ || proposal_) return;
  ++operations_;
  bytes_ += bytes;
  seconds_ += seconds;
  if (operations_ >= kOperationsPerSample && seconds_ >= kSample_s) end_sample();
}

void Autotune::end_sample() {
  samples_[turn_ % candidates_.size()].push_back(static_cast<double>(bytes_) / seconds_);
  ++turn_;
  operations_ = bytes_ = 0;
  seconds_ = 0;
  if (turn_ == candidates_.size() * (is_final_ ? kFinalSamples : kSamplesPerCandidate)) return end_trial();
  const Tuning& next = candidates_[turn_ % candidates_.size()];
  if (!(next == now_)) proposal_ = next;
}

double Autotune::median(size_t candidate) const {
  std::vector<double> sorted = samples_[candidate];
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

// The first candidate is what was best so far.
const Tuning& Autotune::best_of_trial() const {
  size_t best = 0;
  for (size_t i = 1; i < candidates_.size(); ++i)
    if (median(i) > median(best) * (best == 0 ? kClearly : 1.0)) best = i;
  return candidates_[best];
}

void Autotune::end_trial() {
  if (candidates_.size() > 1) best_ = best_of_trial();
  if (is_final_) {
    is_done_ = true;
    if (candidates_.size() > 1) {
      before_ = median(0);
      after_ = best_ == start_ ? before_ : median(1);
    }
    if (!(best_ == now_)) proposal_ = best_;
    return;
  }
  if (next_knob_ < knobs_.size()) {
    const Knob& knob = knobs_[next_knob_++];
    std::vector<Tuning> candidates = {best_};
    for (const size_t value : knob.candidates) {
      Tuning candidate = best_;
      candidate.*knob.member = value;
      if (!(candidate == best_)) candidates.push_back(candidate);
    }
    return begin_trial(std::move(candidates));
  }
  is_final_ = true;
  begin_trial(best_ == start_ ? std::vector<Tuning>{} : std::vector<Tuning>{start_, best_});
}

std::optional<Tuning> Autotune::take_proposal() {
  if (proposal_) now_ = *proposal_;
  return std::exchange(proposal_, std::nullopt);
}

std::string Autotune::report() const {
  const std::string when = " after " + with_digits(now_s() - began_s_, 1) + " s of training";
  if (best_ == start_) return "autotune: nothing is clearly faster than what was set" + when;
  std::string changes;
  for (const Knob& knob : knobs_)
    if (start_.*knob.member != best_.*knob.member)
      changes +=
          (changes.empty() ? "" : ", ") + knob.option + " " + in_units(start_, knob) + " -> " + in_units(best_, knob);
  return "autotune: allreduce went at " + with_digits(before_ / 1e9, 2) + " GB/s before, goes at " +
         with_digits(after_ / 1e9, 2) + " GB/s now (" + changes + ")" + when;
}

std::string Autotune::findings() const {
  std::string lines;
  for (const Knob& knob : knobs_) lines += knob.option + "=" + in_units(best_, knob) + "\n";
  return lines;
}

void Autotune::write(const std::string& path) const {
  std::ofstream file(path);
  file << findings();
  file.close();
  if (!file) warn("autotune cannot write what it found to " + path);
}

}  // namespace ringtrain
