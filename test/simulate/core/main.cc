// Tells the stories of the seeds FIRST ... END - 1 and prints, as lines of JSON, those with a finding and what all of
// them took. Exit status 1 if there was a finding. A story that takes 5 s of the processor has one, and is the last.
//
//   WORLD FIRST END [--trace] [--faults] [--without N,N,...] [--seconds S]
#include <malloc.h>
#include <signal.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "story.h"

using namespace ringtrain::simulation;

namespace {

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    char escaped[8];
    const bool is_plain = c != '"' && c != '\\' && (c < 0 || c >= ' ');
    std::snprintf(escaped, sizeof(escaped), is_plain ? "%c" : "\\u%04x", c);
    json += escaped;
  }
  return json + "\"";
}

std::string list_of(const std::vector<std::string>& texts) {
  std::string list;
  for (const std::string& text : texts) list += (list.empty() ? "" : ",") + quoted(text);
  return "[" + list + "]";
}

double seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

constexpr int kTick_s = 1, kMostTicks = 20;
uint64_t told_seed = 0, stories = 0, events = 0, findings = 0, story_hash = 0;
uint64_t ticking_stories = 0;  // the number of stories at the last tick
int ticks = 0;                 // of the story under way
double begin_s = 0;

// Into `text`; of a signal handler, so it takes no memory.
int put_total(char* text, size_t size) {
  return std::snprintf(
      text, size,
      "{\"stories\": %llu, \"events\": %llu, \"findings\": %llu, \"hash\": \"%016llx\", \"seconds\": %.3f}\n",
      static_cast<unsigned long long>(stories), static_cast<unsigned long long>(events),
      static_cast<unsigned long long>(findings), static_cast<unsigned long long>(story_hash), seconds() - begin_s);
}

// A rank that goes on without an event cannot be ended, so the process ends with it.
void end_endless_story(int) {
  if (std::exchange(ticking_stories, stories) != stories) ticks = 0;
  if (++ticks < kMostTicks) return;
  ++findings;
  std::fflush(stdout);  // the trace
  char text[400];
  int length =
      std::snprintf(text, sizeof(text),
                    "{\"seed\": %llu, \"finding\": \"no end: some rank goes on without an event\", \"faults\": []}\n",
                    static_cast<unsigned long long>(told_seed));
  length += put_total(text + length, sizeof(text) - static_cast<size_t>(length));
  _exit(write(STDOUT_FILENO, text, static_cast<size_t>(length)) == length ? 1 : 3);
}

void watch_for_endless_stories() {
  struct sigaction action = {};
  action.sa_handler = end_endless_story;
  action.sa_flags = SA_RESTART;
  sigaction(SIGVTALRM, &action, nullptr);
  const itimerval tick = {{kTick_s, 0}, {kTick_s, 0}};
  setitimer(ITIMER_VIRTUAL, &tick, nullptr);
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s FIRST END [--trace] [--faults] [--without N,N,...] [--seconds S]\n", words[0]);
    return 2;
  }
  // Stories take the memory of those before: to have pages of the kernel zeroed takes longer than most stories.
  constexpr int kMost = 32 << 20;
  mallopt(M_MMAP_THRESHOLD, kMost);
  mallopt(M_TRIM_THRESHOLD, kMost);
  const uint64_t first = std::strtoull(words[1], nullptr, 10), end = std::strtoull(words[2], nullptr, 10);
  Telling telling;
  bool lists_faults = false;
  double limit_s = 1e300;
  for (int i = 3; i < count; ++i) {
    if (!std::strcmp(words[i], "--trace")) telling.trace = true;
    if (!std::strcmp(words[i], "--faults")) lists_faults = true;
    if (!std::strcmp(words[i], "--seconds") && i + 1 < count) limit_s = std::strtod(words[++i], nullptr);
    if (!std::strcmp(words[i], "--without") && i + 1 < count)
      for (const char* next = words[++i]; *next;) {
        char* rest;
        telling.left_out.insert(std::strtoull(next, &rest, 10));
        next = *rest == ',' ? rest + 1 : rest;
      }
  }
  watch_for_endless_stories();
  begin_s = seconds();
  for (uint64_t seed = first; seed < end && seconds() - begin_s < limit_s; ++seed) {
    told_seed = seed;
    const Story story = tell(seed, telling);
    ++stories;
    events += story.events;
    story_hash ^= story.hash * (2 * seed + 1);
    findings += !story.finding.empty();
    if (telling.trace || (story.finding.empty() && !lists_faults)) continue;
    std::printf("{\"seed\": %llu, \"finding\": %s, \"faults\": %s}\n", static_cast<unsigned long long>(seed),
                quoted(story.finding).c_str(), list_of(story.faults).c_str());
    std::fflush(stdout);
  }
  if (!telling.trace) {
    char text[200];
    put_total(text, sizeof(text));
    std::fputs(text, stdout);
  }
  return findings > 0;
}
