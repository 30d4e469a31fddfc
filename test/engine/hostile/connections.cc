// How ranks connect while strangers disturb them, addresses fail or descriptors run out.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <functional>

#include "base/clock.h"
#include "base/error.h"
#include "network/dialling.h"
#include "ranks.h"

namespace ringtrain {
namespace {

constexpr double kDeadline_s = 15;
constexpr int kTag = 5;

// A message of 8 bytes on its way.
struct Message {
  Network* network;
  std::string whose;
  NetworkRequest request;
  std::array<char, 8> data = {'h', 'e', 'l', 'l', 'o'};
  bool has_ended = false;

  void look() {
    try {
      has_ended = has_ended || network->test(request);
    } catch (const Error& error) {
      fail(whose + ": " + error.what());
    }
  }
};

std::unique_ptr<Message> sent(Network& from, const std::string& whose, int to) {
  auto message = std::make_unique<Message>(Message{&from, whose, {}});
  message->request = from.isend(message->data.data(), message->data.size(), to, kTag);
  return message;
}

std::unique_ptr<Message> received(Network& by, const std::string& whose, int from) {
  auto message = std::make_unique<Message>(Message{&by, whose, {}});
  message->data = {};
  message->request = by.irecv(message->data.data(), message->data.size(), from, kTag);
  return message;
}

void wait_for(const std::vector<std::unique_ptr<Message>>& messages) {
  const double end = now_s() + kDeadline_s;
  for (bool is_over = false; !is_over;) {
    require(now_s() < end, "not all messages have arrived within 15 s");
    is_over = true;
    for (const auto& message : messages) {
      message->look();
      is_over = is_over && message->has_ended;
    }
  }
}

void allow_many_descriptors() {
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

// Every outcome of an attempt, drawn: no address is dialled after it has failed, and the end comes in bounded time.
void try_dialling(uint64_t seed) {
  Draw draw(seed);
  const size_t streams = 1 + draw.below(4), addresses = 1 + draw.below(3);
  const double patience_s = 1 + static_cast<double>(draw.below(10));
  const std::string story = "seed " + std::to_string(seed) + ": ";
  // Of 4 outcomes: of the kinds of failure, and success.
  const uint64_t outcomes = 4 + draw.below(2);
  Dialling dialling(streams, addresses, patience_s);
  std::vector<Dialling::Attempt> under_way;
  size_t connected = 0;
  double now = 100;
  for (int step = 0; connected == 0 && !dialling.is_out_of_reach(); ++step) {
    require(step < 10'000, story + "does not end");
    while (const auto attempt = dialling.take_due(now)) {
      require(!dialling.loss(attempt->address), story + "dials an address that has failed");
      under_way.push_back(*attempt);
    }
    if (under_way.empty() && dialling.is_out_of_reach()) break;
    if (under_way.empty()) {
      require(std::isfinite(dialling.next_due_s()) && dialling.next_due_s() > now - 1e-9, story + "waits for nothing");
      now = dialling.next_due_s();
      continue;
    }
    now += 0.001;
    const size_t which = draw.below(under_way.size());
    const Dialling::Attempt attempt = under_way[which];
    under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(which));
    const uint64_t outcome = draw.below(outcomes);
    if (outcome == 4 && draw.one_in(8)) {
      dialling.has_connected(attempt.stream);
      ++connected;
    } else {
      const auto failure = outcome >= 4 ? DialFailure::turned_away : static_cast<DialFailure>(outcome);
      dialling.has_failed(attempt.stream, failure, "drawn", now);
    }
  }
  for (size_t address = 0; connected == 0 && address < addresses; ++address)
    require(dialling.loss(address).has_value(), story + "gives up before all addresses have failed");
  const double longest_s = static_cast<double>(addresses) * (patience_s + 1) + 10;
  require(now - 100 < longest_s, story + "takes " + std::to_string(now - 100) + " s");
}

// All ranks send to rank 0 at once, while it does not look for a moment and strangers hold connections to it.
void try_dials(int count, int strangers) {
  allow_many_descriptors();
  Job job(count);
  std::vector<std::unique_ptr<Network>> ranks;
  for (int rank = 0; rank < count; ++rank) ranks.push_back(job.open(rank));
  for (int i = 0; i < strangers / 2; ++i) connect_to(job.addresses()[0][0]);
  std::vector<std::unique_ptr<Message>> messages;
  for (int rank = 1; rank < count; ++rank) {
    messages.push_back(sent(*ranks[static_cast<size_t>(rank)], "rank " + std::to_string(rank), 0));
    messages.push_back(received(*ranks[0], "rank 0 from " + std::to_string(rank), rank));
  }
  for (const auto& message : messages)
    if (message->network != ranks[0].get()) message->look();
  for (int i = 0; i < strangers / 2; ++i) connect_to(job.addresses()[0][0]);
  wait_for(messages);
}

// Nobody listens at one of two addresses of rank 0.
void try_two_addresses(bool is_bad_first, int streams) {
  Job job(2, streams);
  auto& of_rank_0 = job.addresses()[0];
  of_rank_0.insert(is_bad_first ? of_rank_0.begin() : of_rank_0.end(), SocketAddress{"127.0.0.1", 1});
  const auto first = job.open(0), second = job.open(1);
  std::vector<std::unique_ptr<Message>> messages;
  messages.push_back(sent(*second, "rank 1", 0));
  messages.push_back(received(*first, "rank 0", 1));
  wait_for(messages);
}

// Rank 1 dials and then does not run for longer than rank 0 waits for its proof, as if it were stopped.
void try_late_proof() {
  Job job(2);
  const auto first = job.open(0), second = job.open(1);
  std::vector<std::unique_ptr<Message>> messages;
  messages.push_back(received(*first, "rank 0", 1));
  messages.push_back(sent(*second, "rank 1", 0));
  messages.back()->look();  // its hello leaves
  for (const double end = now_s() + 6; now_s() < end; usleep(1000)) first->has_arrived_from_any(kTag + 1);
  wait_for(messages);
}

// Rank 0 has no file descriptor left for a second, so it turns rank 1 away.
void try_full_rank() {
  Job job(2);
  int ready[2];
  require(pipe(ready) == 0, "no pipe");
  const pid_t child = fork();
  if (child == 0) {
    char go;
    require(read(ready[0], &go, 1) == 1, "rank 0 has ended");
    const auto network = job.open(1);
    std::vector<std::unique_ptr<Message>> messages;
    messages.push_back(sent(*network, "rank 1", 0));
    wait_for(messages);
    std::_Exit(0);
  }
  const auto network = job.open(0);
  std::vector<std::unique_ptr<Message>> messages;
  messages.push_back(received(*network, "rank 0", 1));
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = 100;
  setrlimit(RLIMIT_NOFILE, &limit);
  std::vector<int> taken;
  while (const int one = dup(ready[0])) {
    if (one < 0) break;
    taken.push_back(one);
  }
  require(write(ready[1], "g", 1) == 1, "rank 1 has ended");
  for (const double end = now_s() + 1; now_s() < end; usleep(1000)) messages.back()->look();
  require(!messages.back()->has_ended, "rank 0 has a connection without a descriptor");
  for (const int one : taken) close(one);
  wait_for(messages);
  int status = 0;
  require(waitpid(child, &status, 0) == child && status == 0, "rank 1 has failed");
}

}  // namespace ringtrain
