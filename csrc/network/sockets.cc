#include "network/sockets.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <limits>
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

// Of messages without bytes between two Networks: one leaves; one has got so many messages; one wants to hear that.
constexpr uint32_t kByeTag = ~uint32_t{0}, kReceiptTag = kByeTag - 1, kReceiptPleaseTag = kByeTag - 2;
// A rank confirms what has come after so much; after an eighth of it where it sends something else anyway.
constexpr size_t kReceiptBytes = 256 << 10, kReceiptFrames = 64;
// A longer message stays in the memory of its sender for a moment until it is confirmed. Shorter ones, and those that
// are not confirmed by then, are copied.
constexpr size_t kCopiedBytes = 64 << 10;
constexpr double kMoment_s = 100e-6;
// How often connections are looked at, and how long one may have no answer before another one is tried beside it.
constexpr double kGlance_s = 0.1, kSilent_s = 0.5;
// How long a rank is dialled whose connections have had no answer for their whole time.
constexpr double kLastTry_s = 0.5;
// How long a broken connection is made again where ranks may be out of reach for ever.
constexpr double kHealWithin_s = 10;
constexpr double kNever_s = std::numeric_limits<double>::infinity();
// A rank that leaves while others wait for it has mostly heard of a failure, and so will they.
constexpr double kReasonWithin_s = 0.2;
// How long a rank that leaves waits for others that take nothing of what it has for them.
constexpr double kByeWithin_s = 1;
constexpr uint64_t kLongestFrame = uint64_t{1} << 40;  // longer ones are rejected

constexpr const char* kOutOfStep = ". The ranks are out of step: do all of them run the same version of ringtrain?";
constexpr const char* kRaiseLimit = ". Raise the limit of file descriptors (see ulimit -n).";
constexpr const char* kIsHostUp = ". Is its host up, and the network to it?";

// Why a connection has ended that cannot be made again.
std::string why_ended(const RankName& name, int error) {
  if (error == EPROTO) return to_string(name) + " has sent bytes that are not a message" + kOutOfStep;
  return "messages to " + to_string(name) + " cannot be sent again: " + text_of(error);
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
      : credentials_{description.secret, description.token, rank, static_cast<int>(names.size()),
                     description.is_sealed},
        names_(names),
        streams_(description.streams),
        timeout_s_(description.timeout_s),
        peers_(names.size()),
        connector_(poller_, *this, credentials_, {description.addresses, description.streams, description.timeout_s},
                   std::move(listeners)) {
    for (size_t i = 0; i < peers_.size(); ++i) peers_[i].rank = static_cast<int>(i);
  }

  // Waits until what it has sent is confirmed, as long as connections are made again if the network is down and the job
  // has not failed. Then it says that it leaves, and takes what has come: the kernel would tell the other side that
  // this was lost, which then might lose what it has not read yet.
  ~SocketNetwork() override {
    try {
      ask_for_receipts();
      const double end_s = now_s() + (has_failed_ ? 0 : longest_healing_s());
      for (uint64_t before = ~uint64_t{0}; before != sent_bytes() || (is_cut_off() && now_s() < end_s);) {
        before = sent_bytes();
        if (Waiter::comes_true([&] { return is_all_confirmed(); }, kByeWithin_s)) break;
      }
    } catch (const std::exception&) {  // it leaves all the same
    }
    for (ByteStream& bytes : connector_.take_proved()) leave(FrameStream(std::move(bytes)));
    for (Peer& peer : peers_)
      for (const auto& stream : peer.streams) say(stream->frames, kByeTag);
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
    std::shared_ptr<IncomingFrame>& place = sequence.frames[number];
    const std::shared_ptr<IncomingFrame> frame = place ? place : std::make_shared<IncomingFrame>();
    if (!place) {
      frame->header = {static_cast<uint32_t>(tag), number, bytes};
      frame->place = static_cast<char*>(data);
      place = frame;
      connector_.want(peer.rank);
    } else {
      if (frame->is_complete) {
        --unclaimed_[frame->header.tag];
        sequence.frames.erase(number);
      }
      if (frame->header.bytes > bytes)
        throw failure(to_string(names_[static_cast<size_t>(from)]) + " has sent a message of " +
                      std::to_string(frame->header.bytes) + " bytes where one of at most " + std::to_string(bytes) +
                      " bytes was due" + kOutOfStep);
      std::copy_n(frame->own.get(), frame->came, static_cast<char*>(data));
      frame->place = static_cast<char*>(data);  // for the rest
      frame->own.reset();
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

  bool prefers_long_messages() const override { return true; }
  void has_failed() override { has_failed_ = true; }
  int descriptor() const override { return poller_.descriptor(); }

 private:
  struct Peer;
  struct Stream final : Watched, FrameStream::Receiver {
    Stream(SocketNetwork& network, Peer& peer, ByteStream bytes, int dialler, int number)
        : network(network), peer(peer), frames(std::move(bytes)), dialler(dialler), number(number) {}
    void is_ready(uint32_t events) override { network.serve(*this, events); }
    std::shared_ptr<IncomingFrame> place(const FrameHeader& header) override { return network.place(*this, header); }
    void complete(IncomingFrame& frame) override { network.complete(*this, frame); }
    SocketNetwork& network;
    Peer& peer;
    FrameStream frames;
    const int dialler, number;  // the rank that has dialled, and which of its connections this is
    bool has_said_bye = false;
    // Given to this connection, from the first that the other rank has not confirmed on: where the connection breaks,
    // they are sent again.
    std::deque<std::shared_ptr<OutgoingFrame>> unconfirmed;
    uint32_t confirmed = 0;                  // how many before them
    uint32_t received = 0;                   // how many have come
    size_t owed_frames = 0, owed_bytes = 0;  // of these, what this rank has not confirmed
    double owed_since_s = 0;                 // since when the other kernel owes an answer; 0: it owes none
    bool is_silent = false;                  // for so long that another connection is tried
  };

  // Messages of one tag from and to one rank, each by its number: asked for and not complete, or come and not asked
  // for. One that comes twice, because its connection broke before it was confirmed, is dropped.
  struct Sequence {
    uint32_t next_sent = 0, next_received = 0;
    std::map<uint32_t, std::shared_ptr<IncomingFrame>> frames;
  };

  struct Peer {
    int rank = 0;
    std::vector<std::unique_ptr<Stream>> streams;
    std::deque<std::shared_ptr<OutgoingFrame>> unsent;  // until there is a stream
    std::unordered_map<uint32_t, Sequence> sequences;
    size_t next_stream = 0;
    // Since when its kernel owes an answer on one of these, or on one that has ended, and has answered on none.
    double silent_since_s = kNever_s;
    bool is_lost = false;
    bool is_unreached = false;   // lost because it could not be connected to
    bool was_unreached = false;  // and has dialled this rank all the same
    bool is_leaving = false;     // a stream has said bye
    bool has_left = false;       // all have, and there is no unfinished one on which it may have sent messages
    double left_at_s = 0;
    ErrorKind kind_of_loss = ErrorKind::peer_lost;
    std::string why_lost;
    std::string why_incomplete;   // where messages that it sent before it left may be lost
    std::string why_broken;       // its last connection
    double lost_at_s = kNever_s;  // where it is left to the other rank to dial
  };

  // The meaning of a request.
  struct Transfer {
    Peer* peer;
    std::shared_ptr<OutgoingFrame> out;
    std::shared_ptr<IncomingFrame> in;
    bool is_cancelled = false;
    double written_s = 0;  // since when all of it is on its way

    bool is_over() {
      if (is_cancelled) return true;
      return out ? peer->has_left || (out->left() == 0 && may_go()) : in->is_complete;
    }
    // Whether the sender may use its memory again: nobody needs it to send the message once more.
    bool may_go() {
      if (out->is_confirmed || out->is_kept || out->header.bytes <= kCopiedBytes) return true;
      if (written_s == 0) written_s = now_s();
      return now_s() - written_s > kMoment_s;
    }
    // The memory of its sender, or receiver, is no longer needed.
    void let_go() {
      if (out && !out->is_confirmed) out->keep_data();
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
    const bool was_written = transfer.written_s > 0;
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
    if (code == 0 && !has_ended) {
      if (!was_written && transfer.written_s > 0) unconfirmed_.push_back(transfer.out);
      return 0;
    }
    // Not all who wait for a message sleep in this Network, so the list would grow.
    if (transfer.written_s > 0)
      unconfirmed_.erase(std::remove(unconfirmed_.begin(), unconfirmed_.end(), transfer.out), unconfirmed_.end());
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
    if (const double now = now_s(); now > next_glance_s_) {
      if (now > next_glance_s_ + kSilent_s) forget_what_was_owed();
      next_glance_s_ = now + kGlance_s;
      for (Peer& peer : peers_) glance_at(peer, now);
    }
  }

  // A sender that would only wait until its message is confirmed gets its memory back by a copy.
  bool let_senders_go() noexcept override {
    const bool waits_for_receipts = !unconfirmed_.empty();
    for (const auto& frame : std::exchange(unconfirmed_, {}))
      if (!frame->is_confirmed) frame->keep_data();
    return waits_for_receipts;
  }

  void serve(Stream& stream, uint32_t events) {
    const bool may_write = (events & EPOLLOUT) != 0, may_read = (events & ~uint32_t{EPOLLOUT}) != 0;
    if (may_write && !stream.frames.write()) return end_unwritable(stream);
    if (may_read && !stream.frames.read(stream)) return end(stream);
    if (stream.owed_bytes >= kReceiptBytes || stream.owed_frames >= kReceiptFrames) {
      confirm(stream);
      if (!stream.frames.write()) return end_unwritable(stream);
    }
    wait_for_writing(stream);
  }

  void wait_for_writing(Stream& stream) {
    poller_.wait_for_writing(stream.frames.socket(), stream, stream.frames.queued_bytes() > 0);
  }

  void end_unwritable(Stream& stream) {
    stream.frames.read_rest(stream);
    end(stream);
  }

  // A connection that ends without a bye has broken, and is made again, unless the rank refuses it: then its process is
  // gone.
  void end(Stream& stream) { end(stream, stream.frames.error()); }
  void end(Stream& stream, int error) {
    Peer& peer = stream.peer;
    if (stream.frames.incoming()) stream.frames.incoming()->came = 0;  // it comes once more
    for (const auto& frame : stream.unconfirmed) frame->begin_again();
    peer.unsent.insert(peer.unsent.begin(), stream.unconfirmed.begin(), stream.unconfirmed.end());
    const bool is_over = stream.has_said_bye;
    const int dialler = stream.dialler, number = stream.number;
    poller_.remove(stream.frames.socket());
    const auto found = std::find_if(peer.streams.begin(), peer.streams.end(),
                                    [&](const std::unique_ptr<Stream>& one) { return one.get() == &stream; });
    poller_.bury(std::move(*found));
    peer.streams.erase(found);
    const bool is_replaced = find(peer, dialler, number) != peer.streams.end();
    const bool is_missing = dialler == credentials_.rank && !is_replaced;
    if (is_missing) connector_.has_broken(peer.rank, number);
    if (has_waited(error))
      peer.silent_since_s = std::min(peer.silent_since_s, std::max(now_s() - timeout_s_, heard_at_s(peer)));
    if (is_over || peer.is_lost) return;
    if (error == EPROTO || error == ENOMEM) return lose(peer, why_ended(names_[static_cast<size_t>(peer.rank)], error));
    heal(peer, error, is_missing);
  }

  static std::vector<std::unique_ptr<Stream>>::iterator find(Peer& peer, int dialler, int number) {
    return std::find_if(peer.streams.begin(), peer.streams.end(),
                        [&](const auto& one) { return one->dialler == dialler && one->number == number; });
  }

  void heal(Peer& peer, int error, bool is_missing) {
    if (!peer.streams.empty()) {
      if (is_missing) connector_.heal(peer.rank, Dialling::Missing::connected_before, kNever_s);
      return send_unsent(peer);
    }
    if (peer.is_leaving) {
      peer.why_incomplete = incomplete(error);
      return note_left();
    }
    const double now = now_s();
    peer.why_broken = error == 0 ? "it was closed" : text_of(error);
    const double longest_s = has_waited(error) ? kLastTry_s : longest_healing_s();
    if (peer.was_unreached)
      peer.lost_at_s = now + longest_s;
    else
      connector_.heal(peer.rank, Dialling::Missing::all, now + longest_s);
  }

  // Whether the kernel has waited for an answer for all of timeout_s_.
  static bool has_waited(int error) { return failure_of(error) == DialFailure::unreachable; }

  double longest_healing_s() const { return timeout_s_ == 0 ? kHealWithin_s : timeout_s_; }

  // Where nothing is acknowledged any more, another connection is tried beside it: the network may have forgotten this
  // one. Streams that still have answers carry on at once. A silent rank has timeout_s_ for all of its streams
  // together: the kernel counts from what was last sent on each, and what one has not delivered is sent on the next.
  void glance_at(Peer& peer, double now) {
    if (peer.streams.empty()) {
      if (now > peer.lost_at_s)
        lose(peer, to_string(names_[static_cast<size_t>(peer.rank)]) +
                       " is out of reach: it has not dialled this rank again after " + peer.why_broken + kIsHostUp);
      return;
    }
    bool is_one_new = false, is_one_heard = false;
    for (const auto& stream : peer.streams) {
      const Answers answers = answers_on(stream->frames.socket());
      if (!answers.is_owed) stream->owed_since_s = 0;
      if (answers.is_owed && stream->owed_since_s == 0) stream->owed_since_s = now;
      const double silence_s = answers.is_owed ? std::min(answers.last_s_ago, now - stream->owed_since_s) : 0;
      const bool is_silent = silence_s > kSilent_s;
      const bool was_silent = std::exchange(stream->is_silent, is_silent);
      is_one_new |= is_silent && !was_silent;
      is_one_heard |= !is_silent && answers.last_s_ago < kSilent_s;
      if (is_silent) peer.silent_since_s = std::min(peer.silent_since_s, now - silence_s);
    }
    if (peer.silent_since_s != kNever_s && heard_at_s(peer) > peer.silent_since_s + kSilent_s)
      peer.silent_since_s = kNever_s;
    if (timeout_s_ > 0 && now > peer.silent_since_s + timeout_s_) return end_all(peer, ETIMEDOUT);
    if (!is_one_new) return;
    if (is_one_heard) return end_silent(peer);
    for (const auto& stream : peer.streams)
      if (stream->dialler == credentials_.rank) connector_.has_broken(peer.rank, stream->number);
    if (!peer.was_unreached) connector_.heal(peer.rank, Dialling::Missing::all, now + longest_healing_s());
  }

  // This rank has not looked for a while, as one that was stopped: all may have been answered meanwhile.
  void forget_what_was_owed() {
    for (Peer& peer : peers_) {
      peer.silent_since_s = kNever_s;
      for (const auto& stream : peer.streams) stream->owed_since_s = 0;
    }
  }

  static double heard_at_s(const Peer& peer) {
    double at_s = 0;
    for (const auto& stream : peer.streams)
      at_s = std::max(at_s, now_s() - answers_on(stream->frames.socket()).last_s_ago);
    return at_s;
  }

  void end_all(Peer& peer, int error) {
    while (!peer.streams.empty()) {
      Stream& stream = *peer.streams.front();
      stream.frames.read_rest(stream);
      end(stream, error);
    }
  }

  void end_silent(Peer& peer) {
    while (true) {
      const auto silent =
          std::find_if(peer.streams.begin(), peer.streams.end(), [](const auto& one) { return one->is_silent; });
      if (silent == peer.streams.end()) return;
      end(**silent);
    }
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
    peer.was_unreached = true;
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
    if (stream.owed_bytes >= kReceiptBytes / 8 || stream.owed_frames >= kReceiptFrames / 8) confirm(stream);
    stream.unconfirmed.push_back(frame);
    stream.frames.send(frame);
    if (!is_first) return;
    if (stream.frames.write())
      wait_for_writing(stream);
    else
      end_unwritable(stream);
  }

  void send_unsent(Peer& peer) {
    for (const auto& frame : std::exchange(peer.unsent, {})) send(peer, frame);
  }

  // Tells the other rank how many messages have come.
  static void confirm(Stream& stream) {
    auto receipt = std::make_shared<OutgoingFrame>();
    receipt->header = {kReceiptTag, stream.received, 0};
    stream.owed_frames = stream.owed_bytes = 0;
    stream.frames.send(receipt);
  }

  void ask_for_receipts() {
    for (Peer& peer : peers_) {
      for (const auto& stream : peer.streams) {
        if (stream->unconfirmed.empty()) continue;
        say(stream->frames, kReceiptPleaseTag);
        wait_for_writing(*stream);
      }
    }
  }

  // Of all ranks that can still say so.
  bool is_all_confirmed() {
    progress();
    return std::none_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return is_to_confirm(peer); });
  }

  static bool is_to_confirm(const Peer& peer) {
    if (peer.is_lost || peer.is_leaving) return false;
    return !peer.unsent.empty() || std::any_of(peer.streams.begin(), peer.streams.end(),
                                               [](const auto& one) { return !one->unconfirmed.empty(); });
  }

  // Whether what is to be confirmed has not come to the other side's kernel.
  bool is_cut_off() const {
    return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      const auto has_more = [](const auto& one) {
        return !one->unconfirmed.empty() &&
               (one->frames.queued_bytes() > 0 || answers_on(one->frames.socket()).is_owed);
      };
      return is_to_confirm(peer) &&
             (peer.streams.empty() || std::any_of(peer.streams.begin(), peer.streams.end(), has_more));
    });
  }

  uint64_t sent_bytes() const {
    uint64_t bytes = 0;
    for (const Peer& peer : peers_)
      for (const auto& stream : peer.streams) bytes += stream->frames.sent_bytes();
    return bytes;
  }

  // Whether it can be true.
  static bool take_receipt(Stream& stream, uint32_t received) {
    for (; stream.confirmed != received; ++stream.confirmed) {
      if (stream.unconfirmed.empty() || stream.unconfirmed.front()->left() > 0) return false;
      stream.unconfirmed.front()->is_confirmed = true;
      stream.unconfirmed.pop_front();
    }
    return true;
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
      return nobodys(header);
    }
    if (header.tag == kReceiptPleaseTag) stream.owed_bytes = kReceiptBytes;
    if (header.tag == kReceiptPleaseTag) return nobodys(header);
    if (header.tag == kReceiptTag)
      return header.bytes == 0 && take_receipt(stream, header.number) ? nobodys(header) : nullptr;
    if (header.bytes > kLongestFrame) return nullptr;
    Sequence& sequence = peer.sequences[header.tag];
    const auto found = sequence.frames.find(header.number);
    if (found != sequence.frames.end()) {
      const std::shared_ptr<IncomingFrame>& frame = found->second;
      if (frame->is_complete) return nobodys(header);
      if (header.bytes > frame->header.bytes) return nullptr;
      if (is_under_way(peer, frame)) return new_frame(header);
      frame->header = header;
      return frame;
    }
    const bool was_asked_for = static_cast<int32_t>(header.number - sequence.next_received) < 0;
    if (was_asked_for) return nobodys(header);  // and has come
    std::shared_ptr<IncomingFrame> frame = new_frame(header);
    if (frame) sequence.frames[header.number] = frame;
    return frame;
  }

  static bool is_under_way(const Peer& peer, const std::shared_ptr<IncomingFrame>& frame) {
    return std::any_of(peer.streams.begin(), peer.streams.end(),
                       [&](const auto& one) { return one->frames.incoming() == frame; });
  }

  // Null where there is no memory.
  static std::shared_ptr<IncomingFrame> new_frame(const FrameHeader& header) {
    auto frame = std::make_shared<IncomingFrame>();
    frame->header = header;
    frame->own.reset(new (std::nothrow) char[header.bytes]);
    frame->place = frame->own.get();
    return frame->own ? frame : nullptr;
  }

  static std::shared_ptr<IncomingFrame> nobodys(const FrameHeader& header) {
    return std::make_shared<IncomingFrame>(IncomingFrame{header, nullptr, 0, nullptr, false});
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

  void complete(Stream& stream, const IncomingFrame& frame) {
    const uint32_t tag = frame.header.tag;
    if (tag >= kReceiptPleaseTag) return;
    ++stream.received;
    ++stream.owed_frames;
    stream.owed_bytes += frame.header.bytes;
    auto& frames = stream.peer.sequences[tag].frames;
    const auto found = frames.find(frame.header.number);
    if (found == frames.end()) return;
    IncomingFrame& message = *found->second;
    if (&message != &frame && (message.is_complete || !frame.own)) return;
    if (&message != &frame) take_copy(stream.peer, found->second, frame);
    if (message.own)
      ++unclaimed_[tag];
    else
      frames.erase(found);
  }

  // Of a message that was sent again while it was under way on a connection that has broken at the other end.
  static void take_copy(const Peer& peer, const std::shared_ptr<IncomingFrame>& message, const IncomingFrame& copy) {
    for (const auto& stream : peer.streams)
      if (stream->frames.incoming() == message) stream->frames.discard_incoming();
    if (message->place) std::copy_n(copy.own.get(), copy.header.bytes, message->place);
    message->came = copy.header.bytes;
    message->is_complete = true;
  }

  static void say(FrameStream& frames, uint32_t tag) {
    auto word = std::make_shared<OutgoingFrame>();
    word->header = {tag, 0, 0};
    frames.send(word);
    frames.write();
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
    say(frames, kByeTag);
    take_rest(frames);
  }

  // ----------------------------------------------------------------------------------------------------- connections

  bool is_connected(int rank) const override {
    return !peers_[static_cast<size_t>(rank)].streams.empty() || is_over(rank);
  }
  bool is_over(int rank) const override {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    return peer.is_lost || peer.is_leaving;
  }

  // Those that the lower rank has dialled come first on both sides.
  void connected(int rank, int dialler, int number, ByteStream bytes) override {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (peer.is_unreached) find_again(peer);
    if (peer.is_lost) return;
    peer.lost_at_s = peer.silent_since_s = kNever_s;
    const auto before = find(peer, dialler, number);
    if (before != peer.streams.end()) (*before)->is_silent = true;  // the other end has given it up
    const auto place =
        std::find_if(peer.streams.begin(), peer.streams.end(), [&](const auto& one) { return one->dialler > dialler; });
    Stream& stream =
        **peer.streams.insert(place, std::make_unique<Stream>(*this, peer, std::move(bytes), dialler, number));
    poller_.add(stream.frames.socket(), stream, false);
    end_silent(peer);
    send_unsent(peer);
  }

  // The last messages of a rank that has left, or leaves later, may be on a connection without a welcome. Where the
  // other side has ended or reset that connection, they would have come before the end, behind a welcome.
  void failed_before_welcome(int rank, int error) override {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (failure_of(error) != DialFailure::unreachable) return;
    peer.why_incomplete = incomplete(error);
  }

  static std::string incomplete(int error) {
    const std::string why = error == 0 ? "it was closed" : text_of(error);
    return ", and messages from it may be lost, because a connection with it has failed: " + why + kIsHostUp;
  }

  void is_out_of_reach(int rank, const OutOfReach& why) override {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (!peer.streams.empty() || peer.is_lost) return;
    peer.is_unreached = true;
    const RankName& name = names_[static_cast<size_t>(rank)];
    if (why.failure == DialFailure::no_descriptor)
      lose(peer, "no connection to " + to_string(name) + ": " + why.details + kRaiseLimit, ErrorKind::failure);
    else if (why.failure == DialFailure::refused && !peer.why_broken.empty())
      lose(peer, is_gone(name));
    else
      lose(peer, why_unreached(name, why));
  }

  const Credentials credentials_;
  const std::vector<RankName> names_;
  const int streams_;
  const double timeout_s_;
  Poller poller_;
  std::vector<Peer> peers_;                                  // by rank
  std::vector<Peer*> leaving_;                               // have said bye on a stream, and may have more to say
  std::unordered_map<uint32_t, size_t> unclaimed_;           // messages of a tag that are there and not asked for
  std::vector<std::shared_ptr<OutgoingFrame>> unconfirmed_;  // that somebody waits for
  double next_glance_s_ = 0;
  const Peer* first_lost_ = nullptr;
  bool has_failed_ = false;
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
