// Tells the stories of the seeds FIRST ... END - 1 and prints, as lines of JSON, those with a finding and what all of
// them took. Exit status 1 if there was a finding.
//
//   WORLD FIRST END [--trace] [--faults] [--without N,N,...] [--seconds S]
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

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
  uint64_t stories = 0, events = 0, findings = 0, hash = 0;
  const double begin = seconds();
  for (uint64_t seed = first; seed < end && seconds() - begin < limit_s; ++seed) {
    const Story story = tell(seed, telling);
    ++stories;
    events += story.events;
    hash ^= story.hash * (2 * seed + 1);
    findings += !story.finding.empty();
    if (telling.trace || (story.finding.empty() && !lists_faults)) continue;
    std::printf("{\"seed\": %llu, \"finding\": %s, \"faults\": %s}\n", static_cast<unsigned long long>(seed),
                quoted(story.finding).c_str(), list_of(story.faults).c_str());
    std::fflush(stdout);
  }
  if (!telling.trace)
    std::printf("{\"stories\": %llu, \"events\": %llu, \"findings\": %llu, \"hash\": \"%016llx\", \"seconds\": %.3f}\n",
                static_cast<unsigned long long>(stories), static_cast<unsigned long long>(events),
                static_cast<unsigned long long>(findings), static_cast<unsigned long long>(hash), seconds() - begin);
  return findings > 0;
}
