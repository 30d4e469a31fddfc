// The world of the sockets: the real SocketNetworks of some ranks that send each other messages as a script says, over
// simulated TCP (kernel.h), while packets are slow, links are cut, ranks are stopped or killed, descriptors run out and
// strangers connect.
//
// A rank is one fibre, as its engine thread: it opens its Network, carries out its steps and leaves with a bye. In a
// step it sends and receives what was drawn for all ranks, and waits until all of it has ended. News go to ranks that
// may never look for them.
//
// Rules. A message comes to the rank that it was sent to, once, unchanged, in the order of its tag and its sender. The
// memory of a receive that was given up is not written to. No stranger is welcomed, and none of its messages taken. An
// error of a rank names another one only if that was killed, has failed itself, was out of reach for longer than the
// timeout, if their connection was reset, if it has no address, or if it has ended the connection of a rank that has
// none and so is lost. "has left the job" is only said of ranks that have failed, or with the reason why messages
// that they sent before they left are lost. No rank makes system calls without end. In the end no rank waits.
#include "network/sockets.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>

#include "base/error.h"
#include "base/placement.h"
#include "fibres.h"
#include "kernel.h"

namespace ringtrain {

using simulation::Fibres;
using simulation::Kernel;
using simulation::kNever;
using simulation::Random;
using simulation::Story;
using simulation::Telling;

namespace {

constexpr double kEnd_s = 150;
constexpr int kNewsTag = 9;
constexpr double kMoment_s = 1;  // for news to leave
// From then on a rank that waits listens to news, as an engine does: it may have lost a rank that it does not wait for.
constexpr double kPatience_s = 20;

// ----------------------------------------------------------------------------------------------------- what is drawn

struct Message {
  int from, to, tag;
  uint32_t number;  // of those with this tag from and to these ranks
  size_t bytes;
  enum { waited_for, asked_before, given_up } receiver;
  bool is_news = false, is_dropped_by_sender = false;
};

struct Step {
  std::vector<Message> messages;
  std::vector<double> pauses;  // by rank
};

struct Fault {
  enum Kind { stop, kill, vanish, cut, reset, forget, spoil, no_descriptors, strangers, late, refuse, hide, slow };
  Kind kind;
  int rank = 0, other = 0;
  double at = 0, duration = 0;
  int count = 0;          // of strangers, or of descriptors that are left
  int interface = -1;     // of a cut, -1: all; and of addresses
  bool both_ways = true;  // of a cut
  size_t number = 0;
};

std::string text_of(const Fault& fault) {
  constexpr const char* kNames[] = {"stop",           "kill",      "vanish", "cut",    "reset", "forget", "spoil",
                                    "no descriptors", "strangers", "late",   "refuse", "hide",  "slow"};
  char text[160];
  const char* name = kNames[fault.kind];
  switch (fault.kind) {
    case Fault::cut:
      std::snprintf(text, sizeof(text), "%s the link from rank %d to rank %d%s at %.3f s, for %.3f s, interface %d",
                    name, fault.rank, fault.other, fault.both_ways ? " and back" : "", fault.at, fault.duration,
                    fault.interface);
      break;
    case Fault::reset:
    case Fault::forget:
    case Fault::spoil:
      std::snprintf(text, sizeof(text), "%s connections of ranks %d and %d at %.3f s", name, fault.rank, fault.other,
                    fault.at);
      break;
    case Fault::no_descriptors:
    case Fault::strangers:
      std::snprintf(text, sizeof(text), "%s at rank %d from %.3f s on, for %.3f s: %d", name, fault.rank, fault.at,
                    fault.duration, fault.count);
      break;
    case Fault::refuse:
    case Fault::hide:
      std::snprintf(text, sizeof(text), "%s address %d of rank %d", name, fault.interface, fault.rank);
      break;
    default:
      std::snprintf(text, sizeof(text), "%s rank %d at %.3f s, for %.3f s", name, fault.rank, fault.at, fault.duration);
  }
  return text;
}

struct Draw {
  int ranks = 2, interfaces = 1, streams = 1;
  double timeout_s = 1;
  Kernel::Settings kernel = {};
  std::vector<Step> steps;
  std::vector<bool> listens;  // by rank: takes news
  bool is_sealed = false;
  bool leaves_together = true;  // as an engine does; else each rank leaves when it has ended
  std::vector<Fault> faults;
};

class Drawing {
 public:
  explicit Drawing(uint64_t seed) : random_(seed) {}

  Draw draw() {
    draw_world();
    draw_steps();
    draw_faults();
    return std::move(draw_);
  }

 private:
  void draw_world() {
    draw_.ranks = random_.between(2, random_.chance(0.2) ? 7 : 4);
    draw_.interfaces = random_.chance(0.6) ? 1 : random_.between(2, 3);
    draw_.streams = random_.chance(0.6) ? 1 : random_.between(2, 3);
    draw_.timeout_s = random_.one_of(std::vector<double>{0, 1, 2, 4});
    draw_.kernel.delay_least = random_.real(1e-6, 1e-4);
    draw_.kernel.delay_most = draw_.kernel.delay_least + random_.real(0, random_.chance(0.5) ? 0.001 : 0.1);
    draw_.kernel.segment_bytes = random_.one_of(std::vector<int>{8, 100, 1448, 1 << 16});
    draw_.kernel.window_bytes = random_.one_of(std::vector<size_t>{100, 2000, 20000, 1 << 20});
    if (draw_.kernel.segment_bytes == 8) longest_ = 200;
    draw_.kernel.short_reads = random_.chance(0.5) ? 0 : random_.real(0, 0.5);
    draw_.kernel.switches = random_.chance(0.5) ? 0 : random_.real(0, 0.5);
    draw_.kernel.losses = random_.chance(0.5) ? 0 : random_.real(0, 1);
    for (int rank = 0; rank < draw_.ranks; ++rank) draw_.listens.push_back(random_.chance(0.5));
  }

  int another(int rank) { return (rank + 1 + random_.below(draw_.ranks - 1)) % draw_.ranks; }

  void draw_steps() {
    const int steps = random_.between(1, 6), most = random_.between(1, 6);
    const double pause = random_.chance(0.3) ? 0.1 : 0.01;
    const double news = random_.chance(0.5) ? 0 : random_.real(0, 0.3), given_up = random_.chance(0.7) ? 0 : 0.2;
    draw_.leaves_together = news > 0 || given_up > 0 || random_.chance(0.5);
    const double asked_before = random_.real(0, 0.5);
    for (int i = 0; i < steps; ++i) {
      Step& step = draw_.steps.emplace_back();
      const int count = random_.between(1, most * draw_.ranks / 2);
      for (int j = 0; j < count; ++j) {
        Message message = {};
        message.from = random_.below(draw_.ranks);
        message.to = another(message.from);
        message.is_news = random_.chance(news);
        message.tag = message.is_news ? kNewsTag : 1 + random_.below(2);
        message.number = numbers_[{message.from, message.to, message.tag}]++;
        message.bytes = static_cast<size_t>(message.is_news       ? 24
                                            : random_.chance(0.7) ? random_.between(16, 64)
                                                                  : random_.between(16, longest_));
        if (random_.chance(asked_before)) message.receiver = Message::asked_before;
        if (random_.chance(given_up)) message.receiver = Message::given_up;
        message.is_dropped_by_sender = message.is_news && random_.chance(0.3);
        step.messages.push_back(message);
      }
      for (int rank = 0; rank < draw_.ranks; ++rank) step.pauses.push_back(random_.real(0, pause));
    }
  }

  // Swarm: each story draws how many of each kind it has, so that some have many of one and none of another.
  void draw_faults() {
    if (random_.chance(0.15)) return;
    add(Fault::stop, random_.chance(0.3) ? 0.6 : 0, 4);
    add(Fault::kill, random_.chance(0.1) ? 0.8 : 0, 2);
    add(Fault::vanish, draw_.timeout_s > 0 && random_.chance(0.05) ? 1 : 0, 1);
    add(Fault::cut, random_.chance(0.25) ? 0.6 : 0, 4);
    add(Fault::reset, random_.chance(0.1) ? 0.7 : 0, 3);
    add(Fault::no_descriptors, random_.chance(0.2) ? 0.6 : 0, 3);
    add(Fault::strangers, random_.chance(0.2) ? 0.6 : 0, 3);
    add(Fault::late, random_.chance(0.2) ? 0.5 : 0, 2);
    add(Fault::refuse, draw_.interfaces > 1 && random_.chance(0.4) ? 0.6 : 0, 3);
    add(Fault::hide, draw_.interfaces > 1 && random_.chance(0.2) ? 0.6 : 0, 2);
    add(Fault::slow, random_.chance(0.2) ? 0.6 : 0, 2);
    add(Fault::reset, random_.chance(0.2) ? 0.8 : 0, 5);
    add(Fault::forget, draw_.timeout_s > 0 && random_.chance(0.1) ? 0.7 : 0, 3);
    draw_.is_sealed = random_.chance(0.25);
    add(Fault::spoil, draw_.is_sealed && random_.chance(0.5) ? 0.7 : 0, 4);
  }

  void add(Fault::Kind kind, double probability, int most) {
    for (int i = 0; i < most && random_.chance(probability); ++i) {
      Fault fault = {kind};
      fault.rank = random_.below(draw_.ranks);
      fault.other = another(fault.rank);
      fault.at = random_.chance(0.5) ? random_.real(0, 0.2) : random_.real(0, 3);
      fault.duration = random_.chance(0.5) ? random_.real(0, 1) : random_.real(0, 12);
      const bool is_for_ever = draw_.timeout_s > 0 && random_.chance(0.2);
      const bool may_last = kind == Fault::cut || kind == Fault::no_descriptors;
      if (may_last && is_for_ever) fault.duration = kNever;
      fault.count = random_.chance(0.8) ? random_.between(0, 20) : random_.between(200, 400);
      if (kind == Fault::no_descriptors) fault.count = random_.below(6);
      fault.interface = random_.below(draw_.interfaces);
      if (kind == Fault::cut && random_.chance(0.7)) fault.interface = -1;
      fault.both_ways = random_.chance(0.5);
      if (kind == Fault::slow) fault.duration = random_.real(1e-5, 0.01);
      fault.number = draw_.faults.size();
      draw_.faults.push_back(fault);
    }
  }

  Random random_;
  Draw draw_;
  int longest_ = 20000;
  std::map<std::array<int, 3>, uint32_t> numbers_;
};

// --------------------------------------------------------------------------------------------------------- the world

class World {
 public:
  World(uint64_t seed, const Draw& draw, const Telling& telling, Story& story)
      : draw_(draw),
        telling_(telling),
        story_(story),
        random_(seed ^ 0x9e3779b97f4a7c15),
        kernel_(story, random_, fibres_, draw.ranks, draw.interfaces, draw.kernel, telling),
        fibres_(story, random_, draw.ranks) {
    for (const Fault& fault : draw.faults) {
      story.faults.push_back(text_of(fault));
      if (!telling.left_out.count(fault.number)) faults_.push_back(fault);
    }
    ranks_.resize(static_cast<size_t>(draw.ranks));
    for (int rank = 0; rank < draw.ranks; ++rank) names_.push_back({rank, "h" + std::to_string(rank), 100 + rank});
  }

  void run() {
    for (int rank = 0; rank < draw_.ranks; ++rank)
      for (int interface = 0; interface < draw_.interfaces; ++interface)
        ranks_[static_cast<size_t>(rank)].listeners.push_back(kernel_.listen(rank, interface));
    for (const Fault& fault : faults_) begin(fault);
    for (int rank = 0; rank < draw_.ranks; ++rank) fibres_.start(rank, "script", [this, rank] { live(rank); });
    fibres_.run(kEnd_s);
    check_end();
    kernel_.end();
  }

 private:
  struct Awaited {
    const Message* message;
    bool sends;
    std::vector<char> data;
    NetworkRequest request;
  };
  struct Rank {
    std::vector<int> listeners;
    bool has_finished = false;  // its steps
    bool has_ended = false, has_failed = false;
    std::map<int, uint32_t> news;  // by sender: how many have come
    std::vector<std::unique_ptr<Awaited>> given_up;
  };

  // Requests go before their Network.
  struct Session {
    std::unique_ptr<Network> network;
    std::vector<std::unique_ptr<Awaited>> news;  // that nobody waits for
  };

  // ---- faults

  void begin(const Fault& fault) {
    const int rank = fault.rank;
    const auto at = [&](double time, std::function<void()> action) { fibres_.at(time, std::move(action)); };
    switch (fault.kind) {
      case Fault::stop:
        return at(fault.at, [=] { stop(rank, fault.duration); });
      case Fault::kill:
        return at(fault.at, [=] { kill(rank); });
      case Fault::vanish:
        return at(fault.at, [=] {
          if (fibres_.is_killed(rank)) return;
          kernel_.vanish(rank);
          kill(rank);
        });
      case Fault::cut:
        kernel_.cut(rank, fault.other, fault.interface, fault.at, fault.at + fault.duration);
        if (fault.both_ways) kernel_.cut(fault.other, rank, fault.interface, fault.at, fault.at + fault.duration);
        return;
      case Fault::reset:
        return at(fault.at, [=] { kernel_.reset(rank, fault.other, fault.both_ways ? 1 : 0.5); });
      case Fault::forget:
        return at(fault.at, [=] { kernel_.forget(rank, fault.other, fault.both_ways ? 1 : 0.5); });
      case Fault::spoil:
        return at(fault.at, [=] { kernel_.spoil(rank, fault.other); });
      case Fault::no_descriptors:
        at(fault.at, [=] { kernel_.limit_descriptors(rank, fault.count); });
        if (fault.duration < kNever) at(fault.at + fault.duration, [=] { kernel_.unlimit_descriptors(rank); });
        return;
      case Fault::strangers:
        for (int i = 0; i < fault.count; ++i) {
          const auto kind = static_cast<Kernel::Stranger::Kind>(random_.below(Kernel::Stranger::kinds));
          const double lasts_s = random_.real(0, fault.duration);
          at(fault.at + random_.real(0, fault.both_ways ? 0.001 : 2),
             [=] { kernel_.begin_stranger({rank, kind, lasts_s}); });
        }
        return;
      case Fault::late:
        return;
      case Fault::refuse:
        return kernel_.refuse(rank, fault.interface);
      case Fault::hide:
        return kernel_.hide(rank, fault.interface);
      case Fault::slow:
        return kernel_.set_slow(rank, fault.duration);
    }
  }

  void stop(int rank, double duration) {
    if (fibres_.is_killed(rank) || fibres_.is_stopped(rank)) return;
    trace_at(rank, "fault", "is stopped for " + std::to_string(duration) + " s");
    fibres_.stop(rank, fibres_.now() + duration);
  }

  void kill(int rank) {
    if (fibres_.is_killed(rank)) return;
    trace_at(rank, "fault", "is killed");
    fibres_.kill(rank);
    kernel_.kill(rank);
  }

  // ---- a rank

  void live(int rank) {
    Rank& self = ranks_[static_cast<size_t>(rank)];
    for (const Fault& fault : faults_)
      if (fault.kind == Fault::late && fault.rank == rank) fibres_.pause(fault.duration);
    try {
      Session session = {open(rank), {}};
      trace("begins");
      try {
        carry_out(self, rank, session);
      } catch (const Error&) {
        self.has_failed = true;  // before it says bye
        throw;
      }
      trace("leaves");
    } catch (const Error& error) {
      self.has_failed = true;
      if (!fibres_.is_killed(rank)) {
        trace(std::string("fails: ") + error.what());
        check_error(rank, error);
      }
    }
    self.has_ended = true;
    trace("has left");
    for (const auto& one : self.given_up)
      if (std::any_of(one->data.begin(), one->data.end(), [](char byte) { return byte != 'g'; }))
        story_.find(title_of(*one->message) + " is written to memory that rank " + std::to_string(rank) +
                    " has taken back");
  }

  std::unique_ptr<Network> open(int rank) {
    SocketDescription description;
    description.listeners = ranks_[static_cast<size_t>(rank)].listeners;
    for (int other = 0; other < draw_.ranks; ++other) {
      auto& addresses = description.addresses.emplace_back();
      for (int interface = 0; interface < draw_.interfaces; ++interface)
        addresses.push_back({Kernel::address_of(other, interface), Kernel::kPort});
    }
    description.secret = "secret";
    description.token = "token";
    description.streams = draw_.streams;
    description.timeout_s = draw_.timeout_s;
    description.is_sealed = draw_.is_sealed;
    return open_sockets(description, rank, names_);
  }

  void carry_out(Rank& self, int rank, Session& session) {
    Network& network = *session.network;
    for (const Step& step : draw_.steps) {
      fibres_.pause(step.pauses[static_cast<size_t>(rank)]);
      std::vector<std::unique_ptr<Awaited>> awaited;
      for (const Message& message : step.messages) {
        const bool sends = message.from == rank;
        if (!sends && (message.to != rank || message.is_news)) continue;
        auto one = std::make_unique<Awaited>(Awaited{&message, sends, {}, {}});
        begin(network, *one);
        if (sends && message.is_news)
          drop_or_keep(session, std::move(one));
        else if (!sends && message.receiver == Message::given_up)
          give_up(self, std::move(one));
        else
          awaited.push_back(std::move(one));
      }
      wait_for(self, rank, session, awaited);
    }
    // News get a moment to leave.
    const double end = fibres_.now() + kMoment_s;
    while (!session.news.empty() && fibres_.now() < end) {
      forget_ended_news(session);
      if (!session.news.empty()) network.sleep(1e-3, 1e-3, nullptr);
    }
    self.has_finished = true;
    while (draw_.leaves_together && !has_everybody_finished()) {
      take_news(self, network, rank);
      network.sleep(1e-3, kNever, nullptr);
    }
  }

  bool has_everybody_finished() const {
    for (int rank = 0; rank < draw_.ranks; ++rank) {
      const Rank& one = ranks_[static_cast<size_t>(rank)];
      if (!one.has_finished && !one.has_ended && !fibres_.is_killed(rank)) return false;
    }
    return true;
  }

  void begin(Network& network, Awaited& one) {
    const Message& message = *one.message;
    if (one.sends) {
      one.data = content_of(message);
      one.request = network.isend(one.data.data(), message.bytes, message.to, message.tag);
    } else {
      one.data.assign(message.bytes, 'r');
      if (message.receiver == Message::asked_before && network.has_arrived(message.from, message.tag))
        trace(title_of(message) + " is there");
      one.request = network.irecv(one.data.data(), message.bytes, message.from, message.tag);
    }
    trace((one.sends ? "sends " : "asks for ") + title_of(message));
  }

  // The sender no longer waits, and uses its memory for something else.
  void drop_or_keep(Session& session, std::unique_ptr<Awaited> one) {
    if (!one->message->is_dropped_by_sender) return session.news.push_back(std::move(one));
    one->request = NetworkRequest();
    std::fill(one->data.begin(), one->data.end(), 'd');
  }

  void give_up(Rank& self, std::unique_ptr<Awaited> one) {
    one->request = NetworkRequest();
    std::fill(one->data.begin(), one->data.end(), 'g');
    self.given_up.push_back(std::move(one));
  }

  void wait_for(Rank& self, int rank, Session& session, std::vector<std::unique_ptr<Awaited>>& awaited) {
    Network& network = *session.network;
    const double impatient_s = now_s() + kPatience_s;
    bool listens = draw_.listens[static_cast<size_t>(rank)];
    while (true) {
      for (size_t i = 0; i < awaited.size();) {
        if (!network.test(awaited[i]->request)) {
          ++i;
          continue;
        }
        finish(*awaited[i]);
        awaited.erase(awaited.begin() + static_cast<std::ptrdiff_t>(i));
      }
      forget_ended_news(session);
      listens = listens || now_s() >= impatient_s;
      if (listens) take_news(self, network, rank);
      if (awaited.empty()) return;
      waiting_for_[rank] = awaited.front()->message;
      network.sleep(1e-3, listens ? kNever : std::max(1e-3, impatient_s - now_s()), nullptr);
      waiting_for_[rank] = nullptr;
    }
  }

  void finish(Awaited& one) {
    trace((one.sends ? "has sent " : "has received ") + title_of(*one.message));
    if (one.sends)
      std::fill(one.data.begin(), one.data.end(), 'x');
    else
      check_content(*one.message, one.data);
  }

  static void forget_ended_news(Session& session) {
    auto& news = session.news;
    for (size_t i = 0; i < news.size();) {
      bool has_ended = true;
      try {
        has_ended = session.network->test(news[i]->request);
      } catch (const Error&) {  // for a rank that is lost
      }
      if (has_ended)
        news.erase(news.begin() + static_cast<std::ptrdiff_t>(i));
      else
        ++i;
    }
  }

  void take_news(Rank& self, Network& network, int rank) {
    while (network.has_arrived_from_any(kNewsTag)) {
      std::vector<int> others;
      for (int other = 0; other < draw_.ranks; ++other)
        if (other != rank) others.push_back(other);
      const int sender = network.sender(others, kNewsTag);
      Message message = {sender, rank, kNewsTag, self.news[sender]++, 24, Message::waited_for};
      std::vector<char> data(message.bytes);
      NetworkRequest request = network.irecv(data.data(), data.size(), sender, kNewsTag);
      if (!network.test(request)) story_.find(title_of(message) + " has arrived, and does not come");
      trace("has heard " + title_of(message));
      check_content(message, data);
    }
  }

  // ---- rules

  static std::string title_of(const Message& message) {
    return "message " + std::to_string(message.number) + " of tag " + std::to_string(message.tag) + " from rank " +
           std::to_string(message.from) + " to rank " + std::to_string(message.to);
  }

  static std::vector<char> content_of(const Message& message) {
    std::vector<char> content(message.bytes);
    const int32_t head[] = {message.from, message.to, message.tag, static_cast<int32_t>(message.number)};
    std::memcpy(content.data(), head, sizeof(head));
    for (size_t i = sizeof(head); i < content.size(); ++i)
      content[i] = static_cast<char>(i * 7 + message.number + static_cast<size_t>(message.from));
    return content;
  }

  void check_content(const Message& message, const std::vector<char>& data) {
    if (data == content_of(message)) return;
    Message came = message;
    std::memcpy(&came.from, data.data(), 4);
    std::memcpy(&came.to, data.data() + 4, 4);
    std::memcpy(&came.tag, data.data() + 8, 4);
    std::memcpy(&came.number, data.data() + 12, 4);
    story_.find("instead of " + title_of(message) + " comes " + title_of(came) + ", or something else");
  }

  void check_error(int rank, const Error& error) {
    const std::string text = error.what(), what = "rank " + std::to_string(rank) + " fails: " + text;
    const size_t begin = text.find("rank ");
    if (begin == std::string::npos) {
      if (!kernel_.was_short_of_descriptors(rank)) story_.find("an error without a cause: " + what);
      return;
    }
    const int named = std::atoi(text.c_str() + begin + 5);
    if (named < 0 || named >= draw_.ranks || named == rank) return story_.find("an error that names nobody: " + what);
    const Rank& other = ranks_[static_cast<size_t>(named)];
    if (error.kind() != ErrorKind::peer_lost) {
      if (!kernel_.was_short_of_descriptors(rank)) story_.find("an error without a cause: " + what);
    } else if (text.find("has left the job") != std::string::npos) {
      const bool says_why = text.find("may be lost") != std::string::npos;
      const bool may_be_lost = kernel_.was_reset(rank, named) || was_cut_for_long(rank, named) ||
                               (says_why && kernel_.was_out_of_reach(rank, named));
      if (!other.has_failed && !(other.has_ended && may_be_lost))
        story_.find("a rank that has not failed is said to have left: " + what);
    } else if (text.find("is gone") != std::string::npos) {
      const bool was_connected = text.find("no connection to") == std::string::npos;
      const bool is_reachable = kernel_.has_an_address(named) && (!was_connected || kernel_.has_an_address(rank));
      const bool may_miss_bye = was_deaf(rank, named) || (!was_connected && leaves_with_others(rank));
      const bool may_lose_bye = may_miss_bye || kernel_.was_reset(rank, named);
      if (!is_at_fault(rank, named) && is_reachable && !(other.has_ended && may_lose_bye))
        story_.find("a rank that lives is said to be gone: " + what);
    } else if (text.find("out of reach") != std::string::npos) {
      // The last attempts to make a connection again may go to an address that nobody can reach. And nobody knows what
      // has become of a rank that is left to dial again, since it could not be dialled before.
      const bool had_connection = kernel_.was_reset(rank, named) || fibres_.is_killed(named);
      const bool is_left_to_dial = text.find("has not dialled") != std::string::npos && fibres_.is_killed(named);
      const bool is_found = kernel_.has_an_address(named) && (kernel_.has_all_addresses(named) || !had_connection);
      if (!kernel_.was_out_of_reach(rank, named) && !was_cut_for_long(rank, named) && is_found && !is_left_to_dial)
        story_.find("a rank that can be reached is said to be out of reach: " + what);
    } else if (text.find("accepts no connection") != std::string::npos) {
      if (!kernel_.was_short_of_descriptors(named) && !is_at_fault(rank, named) && !kernel_.was_reset(rank, named))
        story_.find("a rank that accepts is said not to: " + what);
    } else {
      story_.find("an error without a cause: " + what);
    }
  }

  bool is_at_fault(int rank, int named) const {
    return fibres_.is_killed(named) || ranks_[static_cast<size_t>(named)].has_failed ||
           kernel_.was_out_of_reach(rank, named) || was_cut_for_long(rank, named);
  }

  // Whether the rank, though it still looks for news, would know in a job that all leave: nobody says bye to a rank
  // that has no connection.
  bool leaves_with_others(int rank) const {
    return draw_.leaves_together && ranks_[static_cast<size_t>(rank)].has_finished && has_everybody_finished();
  }

  // Whether the rank was stopped, or their link cut, for so long that it may have missed the bye of the other one.
  bool was_deaf(int rank, int other) const {
    return std::any_of(faults_.begin(), faults_.end(), [&](const Fault& fault) {
      const bool is_of_both = std::minmax(rank, other) == std::minmax(fault.rank, fault.other);
      return fault.duration > 0.5 * kMoment_s &&
             ((fault.kind == Fault::stop && fault.rank == rank) || (fault.kind == Fault::cut && is_of_both));
    });
  }

  // Whether the host has vanished, or their link was cut for as long as a rank may be out of reach, but for the time of
  // the attempt that is under way when it is whole again.
  bool was_cut_for_long(int rank, int other) const {
    double cut_s = 0;
    for (const Fault& fault : faults_) {
      const bool is_of_both = std::minmax(rank, other) == std::minmax(fault.rank, fault.other);
      if (fault.kind == Fault::vanish && (fault.rank == rank || fault.rank == other)) return true;
      if (fault.kind == Fault::cut && is_of_both) cut_s += fault.duration;
    }
    return cut_s > 0 && cut_s >= draw_.timeout_s - 1.2;
  }

  void check_end() {
    std::string waits;
    for (int rank = 0; rank < draw_.ranks; ++rank) {
      const Rank& self = ranks_[static_cast<size_t>(rank)];
      if (self.has_ended || fibres_.is_killed(rank)) continue;
      const Message* message = waiting_for_[rank];
      waits += (waits.empty() ? "rank " : ", rank ") + std::to_string(rank) + " waits for " +
               (message ? title_of(*message) : "nothing");
    }
    if (!waits.empty()) story_.find("a wait without an end: " + waits);
  }

  // ---- the trace

  void trace(const std::string& text) {
    if (telling_.trace) trace_at(fibres_.running_rank(), fibres_.running_role(), text);
  }
  void trace_at(int rank, const char* role, const std::string& text) {
    if (telling_.trace) std::printf("%12.6f  rank %-3d %-7s %s\n", fibres_.now(), rank, role, text.c_str());
  }

  const Draw& draw_;
  const Telling& telling_;
  Story& story_;
  Random random_;  // of delays and of the next fibre
  std::vector<Fault> faults_;
  std::vector<Rank> ranks_;
  std::vector<RankName> names_;
  std::map<int, const Message*> waiting_for_;
  Kernel kernel_;  // what unwinds still calls it
  Fibres fibres_;
};

}  // namespace

simulation::Story simulation::tell(uint64_t seed, const Telling& telling) {
  Story story;
  const Draw draw = Drawing(seed).draw();
  World(seed, draw, telling, story).run();
  return story;
}

}  // namespace ringtrain
