#include "record/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/json.h"
#include "base/log.h"
#include "base/signals.h"

namespace ringtrain {
namespace {

constexpr auto kPause = std::chrono::milliseconds(100);
constexpr size_t kMostNoted = 1 << 20;  // events; if the disk is so slow that more come together, they are left out
constexpr int kScript = 0, kFirstTrack = 1, kMostTracks = 4096;
constexpr char kEnd[] = "\n]\n";
constexpr size_t kEndBytes = sizeof(kEnd) - 1;

// In microseconds, to the nanosecond. Ten times as fast as printf's %.3f, of which a step has a thousand.
void append_us(std::string& text, double seconds) {
  const long long ns = std::llround(1e9 * std::abs(seconds));
  if (seconds < 0) text += '-';
  text += std::to_string(ns / 1000);
  const auto digits = static_cast<int>(ns % 1000);
  for (const int digit : {digits / 100, digits / 10 % 10, digits % 10}) text += static_cast<char>('0' + digit);
  text.insert(text.end() - 3, '.');
}

// A moment of base/clock.h, as the clock on the wall had it. Tools that bring timelines together look for it.
long long us_since_epoch(double at_s) {
  using std::chrono::system_clock;
  const auto now = std::chrono::duration_cast<std::chrono::microseconds>(system_clock::now().time_since_epoch());
  return now.count() - std::llround(1e6 * (now_s() - at_s));
}

// Returns 0, or the errno of what failed. A call may write a part only, as before the disk is full: the next one says
// why.
int write_at(int file, const std::string& text, size_t place) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = pwrite(file, text.data() + done, text.size() - done, static_cast<off_t>(place + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;
    done += static_cast<size_t>(count);
  }
  return 0;
}

struct Announced {
  Mutex mutex;
  std::weak_ptr<Timeline> timeline GUARDED_BY(mutex);
  std::atomic<bool> may_be_there{false};
};

// Threads may ask until the process ends.
Announced& announced() {
  static Announced* const one = new Announced;
  return *one;
}

}  // namespace

std::string in_capitals(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) { return std::toupper(letter); });
  return name;
}

Timeline::Timeline(Setup setup) : setup_(std::move(setup)) {
  file_ = open(setup_.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) throw failure("cannot write the timeline " + setup_.path + ": " + std::strerror(errno));
  text_ = "[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" + std::to_string(setup_.rank) +
          ",\"args\":{\"name\":" + quoted(setup_.process) +
          ",\"start_time_since_epoch_in_micros\":" + std::to_string(us_since_epoch(setup_.start_s)) +
          "}},\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":" + std::to_string(setup_.rank) +
          ",\"tid\":0,\"args\":{\"name\":\"script\"}}";
  write(true);
  thread_ = start_thread(&Timeline::loop, this);
}

Timeline::~Timeline() {
  {
    const Lock lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
  close(file_);
}

void Timeline::note(SubmissionPtr ended) { add(std::move(ended)); }
void Timeline::note(Stretch stretch) { add(std::move(stretch)); }
void Timeline::note_wait(double begin_s, double end_s) { add(Wait{begin_s, end_s}); }
void Timeline::mark(std::string text, double at_s) { add(Mark{std::move(text), at_s}); }
void Timeline::note_round(double at_s) {
  if (setup_.marks_rounds) mark("CYCLE_START", at_s);
}

void Timeline::add(Event event) {
  const Lock lock(mutex_);
  if (noted_.size() < kMostNoted) noted_.push_back(std::move(event));
}

void Timeline::loop() {
  for (bool is_ending = false; !is_ending;) {
    std::vector<Event> events;
    {
      const Lock lock(mutex_);
      changed_.wait_for(mutex_, kPause, [&]() REQUIRES(mutex_) { return is_ending_; });
      is_ending = is_ending_;
      events.swap(noted_);
    }
    write_all(std::move(events));
  }
}

void Timeline::write_all(std::vector<Event> events) {
  constexpr size_t kMostAtOnce = 32 << 10;
  for (const Event& event : events) {
    if (is_full_) break;
    std::visit([&](const auto& one) { format(one); }, event);
    if (size_ + text_.size() > setup_.limit_bytes) {
      is_full_ = true;
      format(Mark{"the timeline is full; timeline_limit_mb makes it larger", setup_.start_s});
    }
    if (text_.size() > kMostAtOnce) write(false);
  }
  write(false);
}

void Timeline::write(bool is_first) {
  if (text_.empty()) return;
  text_ += kEnd;
  const size_t place = is_first ? 0 : size_ - kEndBytes;
  if (const int error = write_at(file_, text_, place); error != 0) {
    if (!is_full_) warn("the timeline " + setup_.path + " ends here: " + std::strerror(error));
    is_full_ = true;
  }
  size_ = place + text_.size();
  text_.clear();
}

void Timeline::begin_event() { text_ += ",\n"; }

// A track for each name; when there are too many, the rest share one.
int Timeline::track_of(const std::string& name) {
  const bool is_too_many = tracks_.size() >= kMostTracks;
  const auto [it, is_new] = tracks_.try_emplace(is_too_many && !tracks_.count(name) ? "others" : name,
                                                kFirstTrack + static_cast<int>(tracks_.size()));
  if (is_new) {
    begin_event();
    text_ += "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":" + std::to_string(setup_.rank) +
             ",\"tid\":" + std::to_string(it->second) + ",\"args\":{\"name\":" + quoted(it->first) + "}}";
  }
  return it->second;
}

// `more`: fields, or nothing.
void Timeline::format_span(const char* name, int track, double begin_s, double end_s, const std::string& more) {
  constexpr double kShortest_s = 1e-7;
  if (end_s - begin_s < kShortest_s) return;
  begin_event();
  text_ += "{\"name\":\"";
  text_ += name;
  text_ += "\",\"ph\":\"X\",\"ts\":";
  append_us(text_, begin_s - setup_.start_s);
  text_ += ",\"dur\":";
  append_us(text_, end_s - begin_s);
  text_ += ",\"pid\":" + std::to_string(setup_.rank) + ",\"tid\":" + std::to_string(track);
  text_ += more.empty() ? "}" : "," + more + "}";
}

// The operation, and within it how far it was when.
void Timeline::format(const SubmissionPtr& submission) {
  const Operation& operation = submission->operation();
  const Progress& progress = submission->progress;
  // Process sets may have operations of one name at the same time.
  const std::string of_set = operation.process_set == 0 ? "" : " of " + std::to_string(operation.process_set);
  const int track = track_of(name_of(operation.kind) + std::string(".") + operation.name + of_set);
  std::string arguments = "\"name\":" + quoted(operation.name) + ",\"bytes\":" + std::to_string(operation.bytes()) +
                          ",\"process_set\":" + std::to_string(operation.process_set);
  if (const auto& title = submission->request->title) arguments += ",\"title\":" + quoted(*title);
  if (const auto& site = submission->request->site) arguments += ",\"site\":" + quoted(*site);
  if (progress.error != ErrorKind::none) arguments += ",\"error\":" + quoted(name_of(progress.error));
  const bool is_adasum = operation.kind == OpKind::allreduce && operation.op == ReduceOp::adasum;
  const std::string name = in_capitals(is_adasum ? "adasum" : name_of(operation.kind));
  format_span(name.c_str(), track, progress.submitted_s, progress.ended_s, "\"args\":{" + arguments + "}");
  if (progress.begun_s == 0) return;  // it failed before
  format_span("queued", track, progress.submitted_s, progress.announced_s, "");
  format_span(("NEGOTIATE_" + name).c_str(), track, progress.announced_s, progress.agreed_s, "");
  format_span("ready", track, progress.agreed_s, progress.begun_s, "");
  format_span(*progress.group ? progress.group : "done", track, progress.begun_s, progress.ended_s, "");
}

void Timeline::format(const Wait& wait) { format_span("waiting", kScript, wait.begin_s, wait.end_s, ""); }

// The category keeps it apart from what happens within an operation.
void Timeline::format(const Stretch& stretch) {
  format_span(stretch.name.c_str(), track_of(stretch.track), stretch.begin_s, stretch.end_s, "\"cat\":\"kvstore\"");
}

void Timeline::format(const Mark& mark) {
  begin_event();
  text_ += "{\"name\":" + quoted(mark.text) + ",\"ph\":\"i\",\"ts\":";
  append_us(text_, mark.at_s - setup_.start_s);
  text_ += ",\"pid\":" + std::to_string(setup_.rank) + ",\"tid\":" + std::to_string(kScript) + ",\"s\":\"p\"}";
}

void announce_timeline(const std::shared_ptr<Timeline>& timeline) {
  Announced& here = announced();
  const Lock lock(here.mutex);
  here.timeline = timeline;
  here.may_be_there = timeline != nullptr;
}

bool may_have_timeline() { return announced().may_be_there.load(std::memory_order_relaxed); }

std::shared_ptr<Timeline> current_timeline() {
  if (!may_have_timeline()) return nullptr;
  Announced& here = announced();
  const Lock lock(here.mutex);
  return here.timeline.lock();
}

}  // namespace ringtrain
