// The attempts to connect to one rank: which address each connection dials next, and when. Uses no sockets, clocks
// or threads: time is an argument, in seconds.
//
// A rank is reached by a given number of connections, called streams. Each stream is in one of these states:
//
//   waiting     until its time has come; take_due() moves it to dialling
//   dialling    an attempt at one address is under way, and ends by has_connected() or has_failed()
//   connected   final
//   given up    final
//
// An address that refuses, or cannot be reached, is not dialled again: the stream waits, without a pause, for the next
// address, and is given up when all addresses have failed. An attempt that the other rank ended, or that had no file
// descriptor, is repeated after a pause of 20 ms, which doubles up to 0.5 s. The address has failed, too, when attempts
// that failed for one of these two reasons have taken `patience_s` with their pauses. An attempt that took longer than
// 0.5 s counts as 0.5 s: one of the two ranks was stopped, or the network between them was down. The rank is out of
// reach when all its streams are given up.
//
// A connection that breaks is made again (heal): until a given time an address that cannot be reached is dialled again
// as one that ends attempts is. The last attempt ends after that time, since this rank may have been stopped meanwhile,
// and no address is left untried.
// Streams of a rank that is connected keep their addresses, so a link is used again when it is back; those of one that
// is not try all addresses in turn. A rank that refuses at an address at which it has answered before is gone: all its
// streams are given up.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace ringtrain {

enum class DialFailure {
  refused,        // nobody listens at the address, so the process is gone
  unreachable,    // the host or the network to it is down
  turned_away,    // the other rank has ended the connection before it began
  no_descriptor,  // this process has no file descriptor, port or memory for another connection
};
DialFailure failure_of(int error);  // errno; 0: the other side has ended the connection

class Dialling {
 public:
  // `patience_s`: how long attempts that are turned away are repeated; 0: forever.
  Dialling(size_t streams, size_t addresses, double patience_s);

  struct Attempt {
    size_t stream, address;
  };
  // Begins the attempt of a stream whose time has come. Nothing: none is due.
  std::optional<Attempt> take_due(double now);
  // When the next attempt is due, or infinity.
  double next_due_s() const;

  void has_connected(size_t stream);
  void has_broken(size_t stream);
  // Dials streams that are not connected until `until_s`. Those that were connected before keep their addresses: others
  // connect the rank meanwhile.
  enum class Missing { all, connected_before };
  void heal(Missing missing, double until_s, double now);
  bool heals() const { return heals_until_s_.has_value(); }
  double heals_until_s() const { return *heals_until_s_; }
  void has_failed(size_t stream, DialFailure failure, const std::string& reason, double now);
  // Gives up the streams that wait: the rank is connected already, and more streams are only a matter of speed.
  void stop_waiting();

  bool is_out_of_reach() const;
  // Why an address was given up; nothing while it may still be dialled.
  struct Loss {
    DialFailure failure;
    std::string reason;
  };
  const std::optional<Loss>& loss(size_t address) const { return addresses_[address]; }

 private:
  enum class State { waiting, dialling, connected, given_up };
  struct Stream {
    State state = State::waiting;
    size_t own_address, address;
    bool has_been_connected = false;
    double due_s = 0, pause_s = 0;
    double dialled_at_s = 0;
    // How long attempts at this address took that failed for these reasons, with their pauses, from the end of the
    // first one on.
    std::optional<double> turned_away_s, no_descriptor_s;
    std::optional<Loss> latest;  // why an attempt to heal has failed
  };

  void dial_again(Stream& stream, double now);
  void dial_next_address(Stream& stream, double now);
  void heal_after(Stream& stream, DialFailure failure, const std::string& reason, double now);
  void give_up(Stream& stream);
  bool may_give_up(double now) const;

  const double patience_s_;
  std::optional<double> heals_until_s_;
  Missing missing_ = Missing::all;
  std::vector<Stream> streams_;
  std::vector<std::optional<Loss>> addresses_;
  std::vector<bool> has_answered_, was_tried_;  // by address; tried: since the beginning of heal()
};

}  // namespace ringtrain
