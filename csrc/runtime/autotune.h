// Finds better sizes on the running job, one knob after another, and stops.
//
// Rank 0 measures how fast allreduces go, and proposes; all ranks change at the same round of the negotiation. The
// candidates of a knob take turns, sample by sample, so that a slow moment of the machine hits all of them; the median
// counts. At the end the best of all takes turns with what the job began with, and stays only if it is faster.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/options.h"

namespace ringtrain {

class Autotune {
 public:
  struct Knob {
    std::string option;  // its name in the table of options
    size_t Tuning::* member;
    size_t unit;  // bytes of 1 of the option
    std::vector<size_t> candidates;
  };

  // The options to try, except those that the user has set: sizes of shared memory where ranks share some, sizes of the
  // ring where they do not all.
  static std::vector<Knob> knobs(const Options& options, bool is_one_node, bool shares_nodes);

  Autotune(const Tuning& start, std::vector<Knob> knobs);

  // An allreduce was carried out with the Tuning of now.
  void note(size_t bytes, double seconds);
  // Returns what all ranks should use from now on, if that changes. To be agreed on before the next note().
  std::optional<Tuning> take_proposal();

  // When it is over: the options that it found, for the person at the terminal and for the next job.
  bool is_done() const { return is_done_; }
  std::string report() const;                 // one sentence
  std::string findings() const;               // "name=value" a line
  void write(const std::string& path) const;  // the same to a file; warns if it cannot

 private:
  void begin_trial(std::vector<Tuning> candidates);
  void end_sample();
  void end_trial();
  const Tuning& best_of_trial() const;
  double median(size_t candidate) const;

  const Tuning start_;
  const std::vector<Knob> knobs_;
  size_t next_knob_ = 0;
  bool is_final_ = false, is_done_ = false;
  Tuning now_, best_;
  std::optional<Tuning> proposal_;
  double began_s_ = 0;
  double before_ = 0, after_ = 0;  // bytes per second, of the final trial

  // Of the trial under way.
  std::vector<Tuning> candidates_;
  std::vector<std::vector<double>> samples_;  // bytes per second, by candidate
  size_t turn_ = 0;

  // Of the sample under way.
  size_t operations_ = 0, bytes_ = 0;
  double seconds_ = 0;
};

}  // namespace ringtrain
