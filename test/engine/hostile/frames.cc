// A rank that knows the secret and sends frames that nobody expects, to the Network of another rank that is in the
// middle of its own messages. The other rank may lose it, or fail with an Error; nothing else may happen.
#include <errno.h>
#include <sys/socket.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "network/alarm.h"
#include "network/endpoint.h"
#include "network/frame_stream.h"
#include "network/handshake.h"
#include "ranks.h"

namespace ringtrain {
namespace {

constexpr int kAlarmTag = 15, kTags = 4;

struct Counts {
  uint64_t connections = 0, frames = 0, messages = 0, losses = 0, errors = 0;
};

// Rank 1, of which nothing is real but the handshake.
class Liar {
 public:
  Liar(const Job& job, Network& other, Draw& draw) : other_(other), draw_(draw) {
    const SocketDescription of_rank_0 = job.description(0);
    const Credentials credentials{of_rank_0.secret, of_rank_0.token, 1, 2};
    auto handshake = Handshake::dial(begin_connection("127.0.0.1", of_rank_0.addresses[0][0], 5), 0, 0, credentials);
    auto state = Handshake::State::under_way;
    for (const double end = now_s() + 5; state == Handshake::State::under_way && now_s() < end;) {
      state = handshake.advance();
      other_.has_arrived_from_any(0);
    }
    require(state == Handshake::State::done, "no handshake with rank 0");
    connection_.emplace(handshake.take());
  }

  void send_frame() {
    FrameHeader header = {};
    header.tag = draw_.one_in(20)   ? static_cast<uint32_t>(draw_.any())
                 : draw_.one_in(8)  ? ~uint32_t{0}
                 : draw_.one_in(10) ? kAlarmTag
                                    : static_cast<uint32_t>(draw_.below(kTags));
    header.number = draw_.one_in(5) ? static_cast<uint32_t>(draw_.below(6)) : next_[header.tag]++;
    header.bytes = !draw_.one_in(10) ? draw_.below(5000)
                   : draw_.one_in(4) ? draw_.any() >> draw_.below(64)
                                     : draw_.below(40);
    Bytes bytes(sizeof(header) + std::min<uint64_t>(header.bytes, 6000));
    std::memcpy(bytes.data(), &header, sizeof(header));
    for (size_t i = sizeof(header); i < bytes.size(); i += 7) bytes[i] = static_cast<char>(draw_.any());
    // Questions, answers and failures, as the alarm sends them.
    if (header.tag == kAlarmTag && bytes.size() > sizeof(header)) bytes[sizeof(header)] = "qaf"[draw_.below(3)];
    if (draw_.one_in(30)) bytes.resize(draw_.below(bytes.size()));
    send(bytes);
  }

 private:
  // In parts; what the other rank sends is thrown away, so that neither waits for the other.
  void send(const Bytes& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const size_t left = bytes.size() - sent, part = draw_.one_in(3) ? 1 + draw_.below(left) : left;
      const ssize_t moved = ::send(connection_->socket(), bytes.data() + sent, part, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (moved < 0 && errno != EAGAIN) return;
      if (moved > 0) sent += static_cast<size_t>(moved);
      char nowhere[9000];
      while (recv(connection_->socket(), nowhere, sizeof(nowhere), MSG_DONTWAIT) > 0) continue;
      if (draw_.one_in(2)) other_.has_arrived(1, static_cast<int>(draw_.below(kTags)));
    }
  }

  Network& other_;
  Draw& draw_;
  std::optional<ByteStream> connection_;
  std::map<uint32_t, uint32_t> next_;  // numbers, by tag
};

// The work of rank 0 meanwhile: sends, receives, gives up requests, listens to the alarm.
void work(Network& network, Alarm& alarm, std::vector<NetworkRequest>& requests, Draw& draw, Counts& counts) {
  static std::array<std::array<char, 4096>, 8> in;
  static const Bytes out(100'000, 'x');
  const auto tag = [&] { return static_cast<int>(draw.below(kTags)); };
  if (draw.one_in(3)) requests.push_back(network.irecv(in[draw.below(8)].data(), draw.below(4097), 1, tag()));
  if (draw.one_in(6)) requests.push_back(network.isend(out.data(), draw.below(out.size()), 1, tag()));
  for (size_t i = 0; i < requests.size();) {
    const bool is_over = draw.one_in(12) || network.test(requests[i]);
    counts.messages += is_over;
    if (is_over)
      requests.erase(requests.begin() + static_cast<std::ptrdiff_t>(i));
    else
      ++i;
  }
  if (draw.one_in(4)) network.has_arrived_from_any(tag());
  if (draw.one_in(4)) alarm.listen();
}

void one_connection(Draw& draw, Counts& counts) {
  const Job job(2, 1 + static_cast<int>(draw.below(2)), 5);
  const auto network = job.open(0);
  Descriptor unused(job.description(1).listeners.front());
  Alarm alarm(Endpoint(*network, {0, 1}, 0, kAlarmTag, nullptr), job.names());
  std::vector<NetworkRequest> requests;
  try {
    Liar liar(job, *network, draw);
    for (int i = 0; i < 60; ++i, ++counts.frames) {
      liar.send_frame();
      work(*network, alarm, requests, draw, counts);
    }
  } catch (const Error& error) {
    ++(error.kind() == ErrorKind::peer_lost ? counts.losses : counts.errors);
    const std::string text = error.what();
    const bool says_who = text.find("rank") != std::string::npos;
    require(says_who && name_of(error.kind()) != nullptr, "an error that names nobody: " + text);
  }
}

}  // namespace

void try_frames(double seconds, uint64_t seed) {
  Counts counts;
  for (const double end = now_s() + seconds; now_s() < end; ++seed, ++counts.connections) {
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    Draw draw(seed);
    one_connection(draw, counts);
  }
  std::printf("%llu connections, %llu frames, %llu messages, %llu losses, %llu errors\n",
              static_cast<unsigned long long>(counts.connections), static_cast<unsigned long long>(counts.frames),
              static_cast<unsigned long long>(counts.messages), static_cast<unsigned long long>(counts.losses),
              static_cast<unsigned long long>(counts.errors));
}

}  // namespace ringtrain
