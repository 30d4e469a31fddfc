// The system calls that sockets.cc and its neighbours make, for simulated ranks: TCP, epoll and the table of
// descriptors, in the virtual time of Fibres. The linker puts them in the place of the C library's (--wrap), so the
// product's sources compile unchanged.
//
// Each rank is a host with some interfaces. Data arrives in order, in parts, after drawn delays. A link may be
// cut in one direction: packets are sent again when it is whole, and a connection whose time is over ends as the
// kernel's would. Strangers are ends of connections that belong to no rank.
#pragma once

#include <sys/epoll.h>
#include <sys/uio.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fibres.h"

namespace ringtrain::simulation {

class Kernel {
 public:
  struct Settings {
    double delay_least, delay_most;  // of a packet
    int segment_bytes;               // at most, in a packet
    size_t window_bytes;             // sent and not read
    double short_reads;              // probabilities: a read returns less than what has come
    double switches;                 // another rank runs during a system call
    double losses;                   // the reset of an end that has ignored bytes overtakes what it has sent
  };

  Kernel(Story& story, Random& random, Fibres& fibres, int ranks, int interfaces, const Settings& settings,
         const Telling& telling);
  ~Kernel();

  static constexpr int kPort = 4711;
  static std::string address_of(int rank, int interface);  // in numbers
  // As if Python had opened it.
  int listen(int rank, int interface);

  // ---- faults
  void limit_descriptors(int rank, int more) { hosts_[index(rank)].limit = hosts_[index(rank)].held + more; }
  void unlimit_descriptors(int rank) { hosts_[index(rank)].limit = kMostDescriptors; }
  // Nothing arrives from `from` at `to` from `begin` to `end`. Interface -1: all.
  void cut(int from, int to, int interface, double begin, double end);
  // Changes a byte of what one of these ranks sends next to the other.
  void spoil(int rank, int other) { spoilt_.insert(pair_of(rank, other)); }
  // Connections of these ranks, of which each is reset with this probability.
  void reset(int rank, int other, double probability);
  // Connections of these ranks, of which each loses all packets from now on with this probability.
  void forget(int rank, int other, double probability);
  void refuse(int rank, int interface) { hosts_[index(rank)].refuses[index(interface)] = true; }
  void hide(int rank, int interface) { hosts_[index(rank)].is_hidden[index(interface)] = true; }
  void set_slow(int rank, double pause_s) { hosts_[index(rank)].pause_s = pause_s; }
  // Its kernel ends all its connections.
  void kill(int rank);
  // Nothing is sent by it any more.
  void vanish(int rank);
  // Calls from now on fail.
  void end() { has_ended_ = true; }

  // ---- strangers
  struct Stranger {
    int rank;  // that it connects to
    enum Kind { silent, garbage, half_hello, wrong_proof, reflected_proof, replayed_proof, hangs_up, kinds };
    Kind kind;
    double lasts_s;
  };
  void begin_stranger(const Stranger& stranger);

  // ---- what has happened
  // Whether a connection of the two has ended because packets between them were lost for too long.
  bool was_out_of_reach(int rank, int other) const { return out_of_reach_.count(pair_of(rank, other)) > 0; }
  bool was_reset(int rank, int other) const { return reset_.count(pair_of(rank, other)) > 0; }
  bool has_an_address(int rank) const;
  bool has_all_addresses(int rank) const;
  bool was_short_of_descriptors(int rank) const { return hosts_[index(rank)].was_short; }

  // ---- system calls of the rank that runs
  int socket();
  int bind(int descriptor, int interface);
  int connect(int descriptor, int to, int interface);
  int accept(int descriptor);
  int set_timeout(int descriptor, double seconds);
  ssize_t send(int descriptor, const iovec* parts, size_t count);
  ssize_t receive(int descriptor, const iovec* parts, size_t count);
  struct Answers {
    bool is_owed = false;  // something that was sent has not arrived
    double last_s_ago = 0;
  };
  Answers answers_on(int descriptor);
  int shut_down(int descriptor);
  int close(int descriptor);
  int open_file();
  int open_epoll();
  int control(int epoll, int operation, int descriptor, const epoll_event* event);
  int take_events(int epoll, epoll_event* events, int most);
  int wait_for(int epoll, double longest_s);
  void sleep(double seconds);
  void fill_randomly(void* bytes, size_t count);

  static Kernel& current();
  // Whether it is a descriptor of the simulation.
  static bool has(int descriptor) { return descriptor >= kFirstDescriptor; }

 private:
  static constexpr int kMostDescriptors = 1 << 20, kFirstDescriptor = 1 << 16, kBacklog = 1024;
  static constexpr int kStranger = -1;

  struct Connection;
  struct Epoll;
  // One end, and what the other one has sent to it: read, arrived, and still under way.
  struct Side {
    int rank = kStranger;
    int descriptor = -1;
    std::string bytes;
    size_t read = 0, arrived = 0;
    double last_arrival = 0, arrived_s = 0;
    bool will_end = false, has_ended = false;  // the other one has sent its last byte; and it has come
    bool is_connected = false, is_closed = false, is_over = false;
    bool is_full = false;  // the other one waits for this one to read
    double full_since = 0;
    int error = 0;
    double timeout_s = 0;
    uint64_t received = 0;
    bool has_shut_down = false;
    uint64_t came_before_shut_down = 0;
  };
  struct Connection {
    Side sides[2];  // who dials, and who answers
    int to = 0, interface = 0, number = 0;
    double begun_s = 0;
    int tries = 0;
    bool was_answered = false, was_cut = false, is_forgotten = false;
    std::string begin;  // of what the dialling rank has said
    std::unique_ptr<Stranger> stranger;
  };
  struct Entry {
    enum Kind { free, file, listener, socket, epoll } kind = free;
    int rank = 0;
    int interface = 0;
    Connection* connection = nullptr;
    int side = 0;
    std::unique_ptr<Epoll> own_epoll;
    // How it is watched
    Epoll* watcher = nullptr;
    uint32_t interest = 0;
    epoll_data_t data = {};
    bool is_listed = false;
  };
  struct Epoll {
    std::vector<int> listed;  // what may be ready
  };
  struct Host {
    std::vector<std::deque<Connection*>> queues;  // of its listeners, by interface
    std::vector<bool> listens, refuses, is_hidden;
    int held = 0, limit = kMostDescriptors;
    bool was_short = false, has_vanished = false, is_dead = false;
    double pause_s = 0;
  };
  struct Cut {
    int from, to, interface;
    double begin, end;
  };

  static size_t index(int number) { return static_cast<size_t>(number); }
  static std::pair<int, int> pair_of(int a, int b) { return {std::min(a, b), std::max(a, b)}; }

  bool begin_call();
  int refuse_call(int error);
  int new_descriptor(Entry::Kind kind);
  Entry& entry(int descriptor) { return *entries_[index(descriptor - kFirstDescriptor)]; }
  Connection& new_connection();
  double delay() { return random_.real(settings_.delay_least, settings_.delay_most); }
  bool is_cut(int from, int to, int interface, double since) const;
  double whole_at(int from, int to, int interface, double time) const;
  bool is_cut_now(const Connection& connection) const;  // in any direction
  bool was_cut_since(const Connection& connection, double since) const;
  double arrival(const Connection& connection, int from_side);
  void try_to_connect(Connection& connection);
  void arrive_at_listener(Connection& connection);
  void fail(Connection& connection, int side, int error);
  void send_bytes(Connection& connection, int to_side, const char* bytes, size_t count);
  void wait_for_room(Connection& connection, int side);
  void arrive(Connection& connection, int side, size_t upto);
  void send_end(Connection& connection, int to_side);
  void send_reset(Connection& connection, int to_side, bool may_overtake);
  void close_side(Connection& connection, int side);
  void end_late(const Cut& cut);
  void hear(Connection& connection);
  void note(int descriptor);
  uint32_t ready_for(const Entry& entry) const;
  bool has_ready(Epoll& epoll);
  void happened(const char* what, const Connection& connection, int side, uint64_t number);

  Story& story_;
  Random& random_;
  Fibres& fibres_;
  const Settings settings_;
  const Telling& telling_;
  std::vector<Host> hosts_;
  std::vector<Cut> cuts_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<int> free_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<int, std::string> overheard_;  // by answering rank: what another rank has said to it
  std::set<std::pair<int, int>> out_of_reach_, reset_, spoilt_;
  uint64_t calls_at_once_ = 0;
  double called_s_ = -1;
  bool has_ended_ = false;
};

}  // namespace ringtrain::simulation
