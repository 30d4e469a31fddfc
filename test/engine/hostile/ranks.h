// Ranks of a simulated job, all in this process: the real Network over sockets of this host.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/placement.h"
#include "network/network.h"
#include "network/sockets.h"

namespace ringtrain {

// Ends the program with this message.
[[noreturn]] void fail(const std::string& message);
void require(bool holds, const std::string& message);

// Numbers that follow from a seed alone.
class Draw {
 public:
  explicit Draw(uint64_t seed) : generator_(seed) {}
  uint64_t any() { return generator_(); }
  // Less than `end`; 0 if `end` is 0.
  uint64_t below(uint64_t end) { return end == 0 ? 0 : generator_() % end; }
  bool one_in(uint64_t count) { return below(count) == 0; }

 private:
  std::mt19937_64 generator_;
};

int make_listener();
SocketAddress address_of(int listener);
int connect_to(const SocketAddress& address);

// Where all ranks listen, and what they have to know to reach each other.
class Job {
 public:
  explicit Job(int size, int streams = 1, double timeout_s = 10);

  std::vector<std::vector<SocketAddress>>& addresses() { return description_.addresses; }
  const std::vector<RankName>& names() const { return names_; }
  // The listener belongs to the Network from now on.
  SocketDescription description(int rank) const;
  std::unique_ptr<Network> open(int rank) const { return open_sockets(description(rank), rank, names_); }

 private:
  SocketDescription description_;
  std::vector<RankName> names_;
};

// The tests that main.cc runs; each ends the program where something is wrong.
void try_dialling(uint64_t seed);
void try_dials(int ranks, int strangers);
void try_two_addresses(bool is_bad_first, int streams);
void try_late_proof();
void try_full_rank();
void try_frames(double seconds, uint64_t seed);
void try_negotiation(int trials, uint64_t seed);

}  // namespace ringtrain
