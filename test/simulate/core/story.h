// One story: everything that a seed decides, and what became of it. Worlds (negotiation.cc, ...) tell stories; main.cc
// runs many of them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace ringtrain::simulation {

// Numbers drawn from a seed, the same on every machine and with every library.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t next() { return engine_(); }
  // One of 0 ... count - 1.
  int below(int count) { return static_cast<int>((engine_() >> 11) % static_cast<uint64_t>(count)); }
  int between(int least, int most) { return least + below(most - least + 1); }
  double real(double least, double most) {
    return least + (most - least) * (static_cast<double>(engine_() >> 11) * 0x1p-53);
  }
  bool chance(double probability) { return real(0, 1) < probability; }
  template <typename Item>
  const Item& one_of(const std::vector<Item>& items) {
    return items[static_cast<size_t>(below(static_cast<int>(items.size())))];
  }
  template <typename Item>
  void shuffle(std::vector<Item>& items) {
    for (size_t i = items.size(); i > 1; --i)
      std::swap(items[i - 1], items[static_cast<size_t>(below(static_cast<int>(i)))]);
  }

 private:
  std::mt19937_64 engine_;
};

// How a story is to be told.
struct Telling {
  bool trace = false;         // one line an event on standard output
  std::set<size_t> left_out;  // faults that do not happen, by their number in Story::faults
};

// The outcome of a story.
struct Story {
  std::string finding;  // the first one; empty if all went well
  std::vector<std::string>
      faults;  // what was drawn, each in a line; a fault may be left out without changing the others
  uint64_t hash = 14695981039346656037ull;  // of all events
  uint64_t events = 0;

  // Notes a broken rule. The first one counts, since others may follow from it.
  void find(const std::string& what) {
    if (finding.empty()) finding = what;
  }
  void mix(uint64_t value) { hash = (hash ^ value) * 1099511628211ull; }
};

// The world of this program. The same seed and telling give the same story.
Story tell(uint64_t seed, const Telling& telling);

}  // namespace ringtrain::simulation
