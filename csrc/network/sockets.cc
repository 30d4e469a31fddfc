#include "network/sockets.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "base/descriptor.h"
#include "base/error.h"
#include "base/wait.h"
#include "network/connector.h"
#include "network/frame_stream.h"
#include "network/poller.h"

namespace ringtrain {
namespace {

constexpr uint32_t kByeTag = ~uint32_t{0};
// A rank that leaves while others wait for it has mostly heard of a failure, and so will they.
constexpr double kReasonWithin_s = 0.2;
// How long a rank that leaves waits until the others have room for what it has to say.
constexpr double kByeWithin_s = 1;
constexpr uint64_t kLongestFrame = uint64_t{1} << 40;  // longer ones are rejected

constexpr const char* kOutOfStep = ". The ranks are out of step: do all of them run the same version of ringtrain?";
constexpr const char* kRaiseLimit = ". Raise the limit of file descriptors (see ulimit -n).";
constexpr const char* kIsHostUp = ". Is its host up, and the network to it?";

// Why a connection has ended without a bye. The process is gone if its kernel says so.
std::string why_ended(const RankName& name, int error) {
  if (error == 0 || error == ECONNRESET || error == EPIPE) return is_gone(name);
  if (error == EPROTO) return to_string(name) + " has sent bytes that are not a message" + kOutOfStep;
  return to_string(name) + " is out of reach: " + text_of(error) + kIsHostUp;
}

std::string why_unreached(const RankName& name, const OutOfReach& why) {
  if (why.failure == DialFailure::refused) return is_gone(name) + " (no connection to " + why.details + ")";
  if (why.failure == DialFailure::turned_away)
    return to_string(name) + " lives, but accepts no connection: " + why.details +
           ". Has it run out of file descriptors (see ulimit -n)?";
  return to_string(name) + " is out of reach: no connection to " + why.details + kIsHostUp;
}

class SocketNetwork final : public Network, Connector::Owner {
 public:
  SocketNetwork(const SocketDescription& description, std::vector<Descriptor> listeners, int rank,
                const std::vector<RankName>& names)
      : credentials_{description.secret, description.token, rank, static_cast<int>(names.size())},
        names_(names),
        streams_(description.streams),
        peers_(names.size()),
        connector_(poller_, *this, credentials_, {description.addresses, description.streams, description.timeout_s},
                   std::move(listeners)) {
    for (size_t i = 0; i < peers_.size(); ++i) peers_[i].rank = static_cast<int>(i);
  }

  // Says that it leaves, and takes what has come: the kernel would tell the other side that this was lost, which then
  // might lose what it has not read yet. A bye may have to wait for room in a socket's buffer.
  ~SocketNetwork() override {
    for (Descriptor& socket : connector_.take_proved()) leave(FrameStream(std::move(socket)));
    for (Peer& peer : peers_)
      for (const auto& stream : peer.streams) say_bye(stream->frames);
    Waiter::comes_true([&] { return has_written_all(); }, kByeWithin_s);
    for (Peer& peer : peers_)
      for (const auto& stream : peer.streams) take_rest(stream->frames);
  }

  NetworkRequest isend(const void* data, size_t bytes, int to, int tag) override {
    Peer& peer = peers_[static_cast<size_t>(to)];
    if (peer.is_lost) throw lost(peer);
    auto frame = std::make_shared<OutgoingFrame>();
    frame->header = {static_cast<uint32_t>(tag), peer.sequences[static_cast<uint32_t>(tag)].next_sent++, bytes};
    frame->data = static_cast<const char*>(data);
    if (!peer.has_left) send(peer, frame);
    return begun(handed_out({&peer, frame, nullptr}), Kind::message);
  }

  NetworkRequest irecv(void* data, size_t bytes, int from, int tag) override {
    Peer& peer = peers_[static_cast<size_t>(from)];
    Sequence& sequence = peer.sequences[static_cast<uint32_t>(tag)];
    const uint32_t number = sequence.next_received++;
    const auto found = sequence.frames.find(number);
    std::shared_ptr<IncomingFrame> frame;
    if (found == sequence.frames.end()) {
      frame = std::make_shared<IncomingFrame>();
      frame->header = {static_cast<uint32_t>(tag), number, bytes};
      frame->place = static_cast<char*>(data);
      sequence.frames[number] = frame;
      connector_.want(peer.rank);
    } else {
      frame = std::move(found->second);
      sequence.frames.erase(found);
      if (frame->header.bytes > bytes)
        throw failure(to_string(names_[static_cast<size_t>(from)]) + " has sent a message of " +
                      std::to_string(frame->header.bytes) + " bytes where one of at most " + std::to_string(bytes) +
                      " bytes was due" + kOutOfStep);
      std::copy_n(frame->own.get(), frame->came, static_cast<char*>(data));
      frame->place = static_cast<char*>(data);  // for the rest
      frame->own.reset();
      if (frame->is_complete) --unclaimed_[frame->header.tag];
    }
    return begun(handed_out({&peer, nullptr, frame}), Kind::message);
  }

  bool has_arrived(int from, int tag) override {
    Peer& peer = peers_[static_cast<size_t>(from)];
    if (has_come(peer, tag)) return true;
    connector_.want(peer.rank);
    progress();
    if (has_come(peer, tag)) return true;
    if (peer.is_lost) throw lost(peer);
    return false;
  }

  bool has_arrived_from_any(int tag) override {
    progress();
    const auto unclaimed = unclaimed_.find(static_cast<uint32_t>(tag));
    if (unclaimed != unclaimed_.end() && unclaimed->second > 0 &&
        std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) { return has_come(peer, tag); }))
      return true;
    if (first_lost_) throw lost(*first_lost_);
    return false;
  }

  // Not by has_arrived(): another one of them may be lost.
  int sender(const std::vector<int>& ranks, int tag) override {
    for (const int rank : ranks)
      if (has_come(peers_[static_cast<size_t>(rank)], tag)) return rank;
    throw failure("a message of any rank has arrived, but of none of them");
  }

  bool is_connected_to(int rank) const override {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    return !peer.streams.empty() && !peer.is_lost && !peer.is_leaving;
  }
  bool would_see_end_at(int rank) const override { return is_connected_to(rank); }

  int descriptor() const override { return poller_.descriptor(); }

 private:
  struct Peer;
  struct Stream final : Watched, FrameStream::Receiver {
    Stream(SocketNetwork& network, Peer& peer, Descriptor socket, int dialler)
        : network(network), peer(peer), frames(std::move(socket)), dialler(dialler) {}
    void is_ready(uint32_t events) override { network.serve(*this, events); }
    std::shared_ptr<IncomingFrame> place(const FrameHeader& header) override { return network.place(*this, header); }
    void complete(IncomingFrame& frame) override { network.complete(frame); }
    SocketNetwork& network;
    Peer& peer;
    FrameStream frames;
    const int dialler;  // the rank that has dialled
    bool has_said_bye = false;
  };

  // Messages of one tag from and to one rank, each by its number: asked for and not complete, or come and not asked
  // for.
  struct Sequence {
    uint32_t next_sent = 0, next_received = 0;
    std::map<uint32_t, std::shared_ptr<IncomingFrame>> frames;
  };

  struct Peer {
    int rank = 0;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::shared_ptr<OutgoingFrame>> unsent;  // until there is a stream
    std::unordered_map<uint32_t, Sequence> sequences;
    size_t next_stream = 0;
    bool is_lost = false;
    bool is_unreached = false;  // lost because it could not be connected to
    bool is_leaving = false;    // a stream has said bye
    bool has_left = false;      // all have, and there is no unfinished one on which it may have sent messages
    double left_at_s = 0;
    ErrorKind kind_of_loss = ErrorKind::peer_lost;
    std::string why_lost;
    std::string why_incomplete;  // where messages that it sent before it left may be lost
  };

  // The meaning of a request.
  struct Transfer {
    Peer* peer;
    std::shared_ptr<OutgoingFrame> out;
    std::shared_ptr<IncomingFrame> in;
    bool is_cancelled = false;

    bool is_over() const { return is_cancelled || (out ? out->left() == 0 || peer->has_left : in->is_complete); }
    // The memory of its sender, or receiver, is no longer needed.
    void let_go() {
      if (out) out->keep_data();
      if (in) in->place = nullptr;
    }
  };

  static uint64_t handed_out(Transfer transfer) {
    return reinterpret_cast<uint64_t>(new Transfer(std::move(transfer)));
  }
  static Transfer& of(uint64_t handle) { return *reinterpret_cast<Transfer*>(handle); }

  // ------------------------------------------------------------------------------------------------------- requests

  static constexpr int kBroken = -1;  // the others are a rank and 1

  int look(uint64_t& handle, bool& has_ended) noexcept override {
    Transfer& transfer = of(handle);
    int code = 0;
    if (!transfer.is_over()) {
      try {
        progress();
      } catch (const std::exception&) {
        why_broken_ = std::current_exception();  // a copy of its text would need memory
        code = kBroken;
      }
    }
    has_ended = transfer.is_over();
    const Peer& peer = *transfer.peer;
    if (code == 0 && !has_ended && is_gone_for_good(peer)) code = peer.rank + 1;
    if (code == 0 && !has_ended) return 0;
    transfer.let_go();
    delete &transfer;
    return code;
  }

  void require_success(int code) const override {
    if (code == kBroken) throw failure(error_of([&] { std::rethrow_exception(why_broken_); })->what());
    if (code != 0) throw lost(peers_[static_cast<size_t>(code - 1)]);
  }

  void cancel(uint64_t handle) noexcept override {
    of(handle).let_go();
    of(handle).is_cancelled = true;
  }
  bool lets_go_at_once() const override { return true; }

  static bool has_come(const Peer& peer, int tag) {
    const auto sequence = peer.sequences.find(static_cast<uint32_t>(tag));
    if (sequence == peer.sequences.end()) return false;
    const auto frame = sequence->second.frames.find(sequence->second.next_received);
    return frame != sequence->second.frames.end() && frame->second->is_complete;
  }

  static bool is_gone_for_good(const Peer& peer) {
    return peer.is_lost || (peer.has_left && now_s() - peer.left_at_s > kReasonWithin_s);
  }

  Error lost(const Peer& peer) const {
    const RankName& name = names_[static_cast<size_t>(peer.rank)];
    if (peer.is_lost) return {peer.kind_of_loss, peer.why_lost};
    return {ErrorKind::peer_lost, to_string(name) + " has left the job" + peer.why_incomplete};
  }

  // --------------------------------------------------------------------------------------------------- what is ready

  void progress() {
    if (poller_.run()) wake_sleepers();
    connector_.look();
    if (!leaving_.empty()) note_left();
  }

  void serve(Stream& stream, uint32_t events) {
    const bool may_write = (events & EPOLLOUT) != 0, may_read = (events & ~uint32_t{EPOLLOUT}) != 0;
    if (may_write && !stream.frames.write()) return end_unwritable(stream);
    if (may_read && !stream.frames.read(stream)) return end(stream);
    wait_for_writing(stream);
  }

  void wait_for_writing(Stream& stream) {
    poller_.wait_for_writing(stream.frames.socket(), stream, stream.frames.queued_bytes() > 0);
  }

  void end_unwritable(Stream& stream) {
    stream.frames.read_rest(stream);
    end(stream);
  }

  // A connection that ends without a bye is a death.
  void end(Stream& stream) {
    Peer& peer = stream.peer;
    if (!stream.has_said_bye) lose(peer, why_ended(names_[static_cast<size_t>(peer.rank)], stream.frames.error()));
    poller_.remove(stream.frames.socket());
    const auto found = std::find_if(peer.streams.begin(), peer.streams.end(),
                                    [&](const std::unique_ptr<Stream>& one) { return one.get() == &stream; });
    poller_.bury(std::move(*found));
    peer.streams.erase(found);
  }

  void lose(Peer& peer, const std::string& why, ErrorKind kind = ErrorKind::peer_lost) {
    if (peer.is_lost || peer.has_left) return;
    peer.is_lost = true;
    peer.kind_of_loss = kind;
    peer.why_lost = why;
    if (!first_lost_) first_lost_ = &peer;
  }

  // A rank that could not be connected to connects to this one. Nothing was sent to it, and nothing has come from it.
  void find_again(Peer& peer) {
    peer.is_lost = peer.is_unreached = false;
    const auto lost = std::find_if(peers_.begin(), peers_.end(), [](const Peer& one) { return one.is_lost; });
    first_lost_ = lost == peers_.end() ? nullptr : &*lost;
  }

  // -------------------------------------------------------------------------------------------------------- messages

  void send(Peer& peer, const std::shared_ptr<OutgoingFrame>& frame) {
    if (peer.streams.empty()) {
      peer.unsent.push_back(frame);
      connector_.dial(peer.rank);
      return;
    }
    Stream& stream = stream_for(peer);
    const bool is_first = stream.frames.queued_bytes() == 0;
    stream.frames.send(frame);
    if (!is_first) return;
    if (stream.frames.write())
      wait_for_writing(stream);
    else
      end_unwritable(stream);
  }

  // The one with the least to do, of as many as were asked for: all of them prefer those that one side has dialled.
  Stream& stream_for(Peer& peer) {
    const size_t count = std::min(peer.streams.size(), static_cast<size_t>(streams_));
    size_t best = peer.next_stream++ % count;
    for (size_t i = 0; i < count; ++i)
      if (peer.streams[i]->frames.queued_bytes() < peer.streams[best]->frames.queued_bytes()) best = i;
    return *peer.streams[best];
  }

  // Null for what no rank of this build sends.
  std::shared_ptr<IncomingFrame> place(Stream& stream, const FrameHeader& header) {
    Peer& peer = stream.peer;
    if (header.tag == kByeTag) {
      stream.has_said_bye = true;
      if (!std::exchange(peer.is_leaving, true)) leaving_.push_back(&peer);
      note_left();
      return std::make_shared<IncomingFrame>(IncomingFrame{header, nullptr, 0, nullptr, false});
    }
    if (header.bytes > kLongestFrame) return nullptr;
    Sequence& sequence = peer.sequences[header.tag];
    const auto found = sequence.frames.find(header.number);
    if (found != sequence.frames.end()) {
      const bool has_come_before = found->second->own != nullptr;
      if (has_come_before || header.bytes > found->second->header.bytes) return nullptr;
      std::shared_ptr<IncomingFrame> frame = std::move(found->second);
      sequence.frames.erase(found);
      frame->header = header;
      return frame;
    }
    const bool was_asked_for = static_cast<int32_t>(header.number - sequence.next_received) < 0;
    if (was_asked_for) return nullptr;  // and has come
    auto frame = std::make_shared<IncomingFrame>();
    frame->header = header;
    frame->own.reset(new (std::nothrow) char[header.bytes]);
    if (!frame->own) return nullptr;
    frame->place = frame->own.get();
    sequence.frames[header.number] = frame;
    return frame;
  }

  void note_left() {
    for (auto next = leaving_.begin(); next != leaving_.end();) {
      Peer& peer = **next;
      peer.has_left = !peer.is_lost && has_said_all(peer);
      peer.left_at_s = now_s();
      next = peer.has_left || peer.is_lost ? leaving_.erase(next) : std::next(next);
    }
  }

  bool has_said_all(const Peer& peer) const {
    return !connector_.has_proved_itself_to(peer.rank) &&
           std::all_of(peer.streams.begin(), peer.streams.end(), [](const auto& one) { return one->has_said_bye; });
  }

  void complete(const IncomingFrame& frame) {
    if (frame.own) ++unclaimed_[frame.header.tag];
  }

  static void say_bye(FrameStream& frames) {
    auto bye = std::make_shared<OutgoingFrame>();
    bye->header = {kByeTag, 0, 0};
    frames.send(bye);
    frames.write();
  }

  // Whether nothing is left to write to those that still read. They may wait for room, too.
  bool has_written_all() {
    bool has_rest = false;
    for (Peer& peer : peers_) {
      if (peer.is_lost) continue;
      for (const auto& stream : peer.streams) {
        drop_what_has_come(stream->frames);
        has_rest |= stream->frames.write() && stream->frames.queued_bytes() > 0;
      }
    }
    return !has_rest;
  }

  static void drop_what_has_come(const FrameStream& frames) {
    char nowhere[4096];
    while (::recv(frames.socket(), nowhere, sizeof(nowhere), MSG_DONTWAIT) > 0) continue;
  }

  static void take_rest(const FrameStream& frames) {
    ::shutdown(frames.socket(), SHUT_WR);
    drop_what_has_come(frames);
  }

  static void leave(FrameStream frames) {
    say_bye(frames);
    take_rest(frames);
  }

  // ----------------------------------------------------------------------------------------------------- connections

  bool is_connected(int rank) const override {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    return !peer.streams.empty() || peer.is_lost || peer.is_leaving;
  }

  // Those that the lower rank has dialled come first on both sides.
  void connected(int rank, int dialler, Descriptor socket) override {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (peer.is_unreached) find_again(peer);
    if (peer.is_lost || peer.streams.size() >= 2 * static_cast<size_t>(streams_)) return;
    const auto place =
        std::find_if(peer.streams.begin(), peer.streams.end(), [&](const auto& one) { return one->dialler > dialler; });
    Stream& stream = **peer.streams.insert(place, std::make_unique<Stream>(*this, peer, std::move(socket), dialler));
    poller_.add(stream.frames.socket(), stream, false);
    for (const auto& frame : std::exchange(peer.unsent, {})) send(peer, frame);
  }

  // The last messages of a rank that has left, or leaves later, may be on a connection without a welcome. Where the
  // other side has ended or reset that connection, they would have come before the end, behind a welcome.
  void failed_before_welcome(int rank, int error) override {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (failure_of(error) != DialFailure::unreachable) return;
    peer.why_incomplete =
        ", and messages from it may be lost, because a connection with it has failed: " + text_of(error) + kIsHostUp;
  }

  void is_out_of_reach(int rank, const OutOfReach& why) override {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (!peer.streams.empty() || peer.is_lost) return;
    peer.is_unreached = true;
    const RankName& name = names_[static_cast<size_t>(rank)];
    if (why.failure == DialFailure::no_descriptor)
      lose(peer, "no connection to " + to_string(name) + ": " + why.details + kRaiseLimit, ErrorKind::failure);
    else
      lose(peer, why_unreached(name, why));
  }

  const Credentials credentials_;
  const std::vector<RankName> names_;
  const int streams_;
  Poller poller_;
  std::vector<Peer> peers_;                         // by rank
  std::vector<Peer*> leaving_;                      // have said bye on a stream, and may have more to say
  std::unordered_map<uint32_t, size_t> unclaimed_;  // messages of a tag that are there and not asked for
  const Peer* first_lost_ = nullptr;
  std::exception_ptr why_broken_;
  Connector connector_;
};

}  // namespace

std::unique_ptr<Network> open_sockets(const SocketDescription& description, int rank,
                                      const std::vector<RankName>& names) {
  std::vector<Descriptor> listeners;  // are closed where this fails: nobody waits for this rank then
  for (const int socket : description.listeners) listeners.emplace_back(socket);
  return std::make_unique<SocketNetwork>(description, std::move(listeners), rank, names);
}

}  // namespace ringtrain
