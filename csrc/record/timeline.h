// A file of this rank's operations in the Trace Event Format, which chrome://tracing and Perfetto show.
//
// One event on each line. After every write the file is a complete JSON array, so it can be read while the job runs
// and after it was killed. Events are noted by any thread and written by a thread of the Timeline's own.
#pragma once

#include <condition_variable>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "record/submission.h"

namespace ringtrain {

// ALLREDUCE, as tools for Horovod's timelines expect the names of what is done.
std::string in_capitals(std::string name);

class Timeline {
 public:
  struct Setup {
    std::string path;
    int rank = 0;
    std::string process;     // "rank 0 on node1"
    double start_s = 0;      // is 0 in the file; on this rank's clock of base/clock.h
    size_t limit_bytes = 0;  // of the file; what comes later is left out, and the file says so
    bool marks_rounds = false;
  };

  // Something else than an operation of ranks, such as what happens to a key of a store.
  struct Stretch {
    std::string track, name;
    double begin_s, end_s;
  };

  // Throws Error(failure) if the file cannot be written.
  explicit Timeline(Setup setup);
  // Writes what is left.
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Any thread; these cost as little as can be.
  void note(SubmissionPtr ended);
  void note_wait(double begin_s, double end_s);  // a thread of the script waited for a Handle
  void note(Stretch stretch);
  void note_round(double at_s);
  void mark(std::string text, double at_s);

 private:
  struct Wait {
    double begin_s, end_s;
  };
  struct Mark {
    std::string text;
    double at_s;
  };
  using Event = std::variant<SubmissionPtr, Wait, Mark, Stretch>;

  void add(Event event);
  void loop();
  void write_all(std::vector<Event> events);

  // Writing thread only.
  void format(const SubmissionPtr& submission);
  void format(const Wait& wait);
  void format(const Mark& mark);
  void format(const Stretch& stretch);
  void format_span(const char* name, int track, double begin_s, double end_s, const std::string& more);
  void begin_event();
  int track_of(const std::string& name);
  void write(bool is_first);

  const Setup setup_;
  int file_ = -1;

  Mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<Event> noted_ GUARDED_BY(mutex_);
  bool is_ending_ GUARDED_BY(mutex_) = false;

  // Writing thread only.
  std::unordered_map<std::string, int> tracks_;  // by the name of the operation
  std::string text_;                             // of events that are not in the file yet
  size_t size_ = 0;                              // of the file
  bool is_full_ = false;

  std::thread thread_;
};

// The Timeline of this process, for whatever has something to show in it.
//
// Any thread. The maker of a Timeline owns it, and announces it; null takes that back.
void announce_timeline(const std::shared_ptr<Timeline>& timeline);
// Costs nearly nothing. False is certain.
bool may_have_timeline();
// Null where there is none, or no more.
std::shared_ptr<Timeline> current_timeline();

// A stretch of time of a key of a store, in the timeline of this process.
//
// When something began that may be shown; 0 where nothing is.
inline double begin_of_stretch() { return may_have_timeline() ? now_s() : 0; }

// From its beginning until now. `what()` is its name. Of two stretches of one track that overlap, one contains the
// other.
template <typename What>
void note_stretch(double begin_s, const std::string& track, What what) {
  if (begin_s == 0) return;
  if (const auto timeline = current_timeline()) timeline->note({track, what(), begin_s, now_s()});
}

}  // namespace ringtrain
