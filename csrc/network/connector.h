// Makes the connections between ranks: it dials, answers other diallers, and hands over those that have proved who they
// are.
//
// A connection that this rank answers is
//
//   in the kernel's queue  until this rank has fewer than 256 unfinished handshakes, and a file descriptor for it
//   silent                 until its hello has come, at most 1 s
//   known by its word      until it has proved who it is, at most 5 s after it was accepted
//   made                   and handed over
//
// and is closed when its time is over. So strangers occupy 256 places at most, nothing is closed to make room, and
// each place becomes free within seconds. network/dialling.h describes how a rank dials.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "network/byte_stream.h"
#include "network/dialling.h"
#include "network/handshake.h"
#include "network/poller.h"
#include "network/tcp.h"

namespace ringtrain {

// Addresses of every rank, and how to reach them.
struct Directory {
  std::vector<std::vector<SocketAddress>> addresses;
  int streams;       // connections to each rank
  double timeout_s;  // see prepare_socket(); also how long a rank that ends connections is dialled again
};

// Why a rank cannot be connected to.
struct OutOfReach {
  DialFailure failure;
  std::string details;  // its addresses, each with a reason
};

class Connector {
 public:
  // The receiver of the connections.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual bool is_connected(int rank) const = 0;
    // It is lost, or leaves: no connection to it is of use any more.
    virtual bool is_over(int /*rank*/) const { return false; }
    // `stream`: which of the connections that `dialler` makes, this rank or the other one.
    virtual void connected(int rank, int dialler, int stream, ByteStream bytes) = 0;
    // A connection that this rank dialled, and that the other one may have taken for made: messages of the other one
    // may have been lost with it. `error`: errno; 0: the other side has ended it.
    virtual void failed_before_welcome(int /*rank*/, int /*error*/) {}
    // For good: all its addresses have failed.
    virtual void is_out_of_reach(int rank, const OutOfReach& why) = 0;
  };

  // All but the listeners outlive this. The sockets of the listeners do not block.
  Connector(Poller& poller, Owner& owner, const Credentials& credentials, Directory directory,
            std::vector<Descriptor> listeners);
  ~Connector();

  // Dials a rank, unless that has been done before.
  void dial(int rank);
  // A connection has broken that this rank had dialled.
  void has_broken(int rank, int stream);
  // Makes connections that have broken again: see Dialling::heal().
  void heal(int rank, Dialling::Missing missing, double until_s);
  // Leaves it to a rank that this one waits for to dial, for a moment.
  void want(int rank);
  // Does what is due by now.
  void look();
  // Connections that were dialled and that the other rank may take for made, though this one has not been welcomed yet:
  // takes all of them; and returns whether there is one to this rank.
  std::vector<ByteStream> take_proved();
  bool has_proved_itself_to(int rank) const;

 private:
  class Listener;
  class Beginning;
  using Beginnings = std::list<std::unique_ptr<Beginning>>;

  struct Peer {
    std::optional<Dialling> dialling;  // from the first attempt on
    double wanted_at = 0;              // when to dial a rank that has not dialled; 0: nobody waits for it
  };

  void accept(Listener& listener);
  void answer(Descriptor socket);
  bool refuse_one(int listener);
  void listen_again(double now);
  void dial_wanted(double now);
  bool make_dialling(int rank);
  void dial_due(int rank, double now);
  void go_on_dialling(int rank, double now);
  void dial(int rank, Dialling::Attempt attempt, double now);
  void end_late(double now);
  bool is_late(const Beginning& beginning, double now);
  const SocketAddress& address_of(int rank, size_t number) const;
  Dialling& dialling(int rank) { return *peers_[static_cast<size_t>(rank)].dialling; }
  OutOfReach loss_of(int rank) const;
  void begin(std::unique_ptr<Beginning> beginning);
  void advance(Beginning& beginning);
  Beginnings::iterator place_of(const Beginning& beginning);
  void drop(Beginnings::iterator beginning);
  void end(Beginnings::iterator beginning);

  Poller& poller_;
  Owner& owner_;
  const Credentials& credentials_;
  const Directory directory_;
  Descriptor spare_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::vector<Peer> peers_;   // by rank
  std::vector<int> wanted_;   // ranks that are left to dial this one
  std::vector<int> waiting_;  // ranks with streams that wait to be dialled
  Beginnings beginnings_;     // handshakes under way
  size_t answered_ = 0;       // those of them that this rank answers
  size_t closed_ = 0;         // listeners that nobody listens to at the moment
};

}  // namespace ringtrain
