// The simulated network between workers and servers: connections whose frames are late, lost, or cut off.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fibres.h"
#include "network/connector.h"
#include "network/frame_stream.h"
#include "network/poller.h"

namespace ringtrain::simulation {

// Of one story; a port is the rank of the process that listens there. Like Fibres, one at a time.
class Net {
 public:
  struct Weather {
    double least_s = 1e-4, most_s = 1e-3;  // on the way
    size_t room_bytes = 1 << 20;           // of what is on its way in a connection
    double timeout_s = 4;                  // after which the kernel ends a connection that carries nothing
  };

  Net(Fibres& fibres, Random& random, Weather weather, int ranks);
  ~Net();
  static Net& current();

  // Faults. Links have no direction; `b` -1: all links of rank a.
  void cut(int a, int b, double until);
  void slow_down(int a, int b, double until, double seconds);
  void reset(int a, int b);
  // All connections of a rank end, and nobody listens at its port any more.
  void kill(int rank);
  // From now on a port takes connections, though perhaps nobody looks at them yet.
  void open_port(int rank) { listeners_[rank]; }
  bool is_cut(int a, int b) const;
  double delay(int a, int b);

  // The questions of the seams.
  void listen(int port, Poller& poller, Connector::Owner& owner);
  void stop_listening(int port);
  void dial(int port, int worker, double timeout_s, Poller& poller, std::function<void(Descriptor, int error)> done);
  void close(int socket);
  bool is_readable(int socket) const;
  bool is_writable(int socket) const;
  bool write(int socket, const FrameHeader& header, const char* data);  // false: no room
  bool read(int socket, FrameStream::Receiver& receiver, uint64_t& bytes, int& error);

 private:
  struct Frame {
    double at;
    FrameHeader header;
    std::vector<char> bytes;
  };
  struct End {
    int rank = 0, peer = 0;
    bool is_closed = false;
    double ends_at = kNever;  // what the other side has sent until then comes before
    int error = 0;
    std::deque<Frame> inbox;
    double last_at = 0;
    size_t on_the_way = 0;  // bytes in the inbox
  };
  struct Listener {
    Poller* poller = nullptr;
    Connector::Owner* owner = nullptr;
    std::vector<std::function<void(Poller&, Connector::Owner&)>> waiting;
  };
  struct Trouble {
    int a, b;
    double since, until, seconds;
    bool is_of(int x, int y) const { return (a == x && (b == y || b < 0)) || (a == y && (b == x || b < 0)); }
  };

  End& end(int socket) { return ends_[static_cast<size_t>(socket)]; }
  const End& end(int socket) const { return ends_[static_cast<size_t>(socket)]; }
  double cut_until(int a, int b) const;
  void end_at(int socket, double at, int error);

  Fibres& fibres_;
  Random& random_;
  const Weather weather_;
  std::vector<bool> is_dead_;
  std::deque<End> ends_;
  std::map<int, Listener> listeners_;
  std::vector<Trouble> cuts_, slow_;
};

}  // namespace ringtrain::simulation
