#include "runtime/pair_messages.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <utility>

#include "coordination/ledger.h"
#include "kernels/copy.h"

namespace ringtrain {

namespace {

enum class Say : uint8_t {
  sends,
  awaits,
  refuses_sender,
  refuses_receiver,
  explains_to_sender,
  explains_to_receiver,
  asks_for_confirmation,
  confirms
};

constexpr size_t kMostOfSite = 256;

}  // namespace

// Followed by the shape and, of a sender with few values, these; of an explanation by the line of the script.
struct PairMessages::Word {
  Say say = Say::sends;
  DType dtype = DType::uint8;
  uint16_t dimensions = 0;
  int32_t process_set = 0;
  int64_t tag = 0;
  int64_t number = 0;  // of the message; of a confirmation: how many words were said
  uint32_t place = 0;  // where a receiver expects the values
  int32_t core = -1;   // on which the rank runs
};

PairMessages::PairMessages(const World& world, double ask_s, Fabric& fabric, Inbox& inbox)
    : world_(world), bell_(fabric.bell()), message_bell_(fabric.message_bell()), ask_s_(ask_s), inbox_(inbox) {
  const int own_node = world.nodes[static_cast<size_t>(world.rank)];
  std::vector<int> all, of_node;
  for (int rank = 0; rank < world.size(); ++rank) {
    all.push_back(rank);
    if (world.nodes[static_cast<size_t>(rank)] == own_node) of_node.push_back(rank);
  }
  if (fabric.node()) rings_ = std::make_unique<RingLink>(*fabric.node(), of_node);
  const bool is_on_one_node = rings_ && of_node.size() == all.size();
  if (!fabric.network() || is_on_one_node) return;
  network_ =
      std::make_unique<NetworkLink>(Endpoint(*fabric.network(), std::move(all), world.rank, kMessageTag, nullptr));
}

MessageLink& PairMessages::link_to(int rank) {
  const bool shares_memory =
      rings_ && world_.nodes[static_cast<size_t>(rank)] == world_.nodes[static_cast<size_t>(world_.rank)];
  if (shares_memory) return *rings_;
  return *network_;
}

bool PairMessages::are_carried_by_network() const {
  return std::any_of(carried_.begin(), carried_.end(),
                     [](const MessagePtr& one) { return !one->values->requests.empty(); });
}

size_t PairMessages::carried_so_far() const {
  size_t done = 0;
  for (const MessagePtr& one : carried_) done += one->values->done;
  return done;
}

void PairMessages::let_others_ring(bool ring) {
  if (rings_) rings_->let_others_ring(ring);
}

// Whether the values go with the sender's word.
bool PairMessages::is_few(const Message& message) {
  return message.submission->operation().bytes() <= link_to(message.peer()).most_bytes();
}

// ----------------------------------------------------------------------------------------------------------- the work

bool PairMessages::has_work() {
  if (inbox_.has_new_messages() || (rings_ && rings_->is_called()) || (network_ && network_->is_called())) return true;
  return std::any_of(carried_.begin(), carried_.end(),
                     [&](const MessagePtr& one) { return link_to(one->peer()).is_over(*one->values); });
}

size_t PairMessages::work(double now) {
  ended_ = 0;
  inbox_.take_new_messages(fresh_, now);
  for (const SubmissionPtr& submission : fresh_) begin(submission);
  fresh_.clear();
  const auto hear_word = [&](const MessageLink::Word& word) {
    turn.assert_held();
    hear(word);
  };
  if (rings_) rings_->listen(hear_word);
  if (network_) network_->listen(hear_word);
  for (size_t i = 0; i < carried_.size();) {
    const MessagePtr message = carried_[i];
    if (!link_to(message->peer()).is_over(*message->values)) {
      ++i;
      continue;
    }
    carried_.erase(carried_.begin() + static_cast<std::ptrdiff_t>(i));
    finish(message);
  }
  return ended_;
}

void PairMessages::begin(const SubmissionPtr& submission) {
  const Operation& operation = submission->operation();
  const auto source = static_cast<int>(operation.numbers[0]), destination = static_cast<int>(operation.numbers[1]);
  auto message = std::make_shared<Message>();
  message->submission = submission;
  message->sends = source == world_.rank;
  message->way = {operation.process_set, operation.numbers[2], message->sends ? destination : source};
  message->memory = static_cast<char*>(message->sends ? submission->inputs[0] : submission->outputs[0]);
  message->since_s = now_s();
  if (message->sends)
    begin_send(message);
  else
    begin_receive(message);
}

void PairMessages::begin_send(const MessagePtr& message) {
  Sends& sends = sends_[message->way];
  sends.is_used = true;
  message->number = sends.next++;
  if (const auto failed = sends.failed.find(message->number); failed != sends.failed.end()) {
    const Error error = failed->second;
    sends.failed.erase(failed);
    return fail(message, error.kind(), error.what());
  }
  say_own(*message);
  if (!sends.heard.empty() && sends.heard.front().number == message->number) {
    const Heard heard = std::move(sends.heard.front());
    sends.heard.pop_front();
    return meet_receiver(message, heard);
  }
  sends.waiting.push_back(message);
  wait_for_other_end(message);
}

void PairMessages::begin_receive(const MessagePtr& message) {
  Receives& receives = receives_[{std::get<0>(message->way), std::get<1>(message->way)}];
  drop_given_up(receives);
  FromRank* arrivals = nullptr;
  if (message->peer() != kAnySource) arrivals_[message->way].is_used = true;
  if (message->peer() != kAnySource && receives.from_any == 0 && has_failed(message, arrivals_[message->way])) return;
  // None of those that wait would have left it.
  if (std::optional<Heard> heard = take_first_heard(*message, arrivals))
    return meet_sender(message, *arrivals, *heard, heard->values.data());
  receives.waiting.push_back(message);
  wait_for_other_end(message);
  if (message->peer() == kAnySource)
    ++receives.from_any;
  else if (receives.from_any == 0)
    speak(receives);
}

// Words of those that wait for a rank that they know, behind no other one.
void PairMessages::speak(Receives& receives) {
  for (auto next = receives.waiting.begin(); next != receives.waiting.end();) {
    const MessagePtr message = *next++;
    if (message->peer() == kAnySource) return;
    if (message->has_spoken) continue;
    FromRank& arrivals = arrivals_[message->way];
    if (arrivals.failed.count(arrivals.next) > 0) {
      receives.waiting.remove(message);
      stop_waiting(*message);
      has_failed(message, arrivals);
      continue;
    }
    message->number = arrivals.next++;
    say_own(*message);
  }
}

// Whether the other end of the next message has failed. Then this one does.
bool PairMessages::has_failed(const MessagePtr& receive, FromRank& arrivals) {
  const auto failed = arrivals.failed.find(arrivals.next);
  if (failed == arrivals.failed.end()) return false;
  receive->number = arrivals.next++;
  const Error error = failed->second;
  arrivals.failed.erase(failed);
  fail(receive, error.kind(), error.what());
  return true;
}

// Of those that take a message of any rank. The others have said that they wait.
void PairMessages::drop_given_up(Receives& receives) {
  if (receives.from_any == 0) return;
  for (auto next = receives.waiting.begin(); next != receives.waiting.end();) {
    const MessagePtr message = *next++;
    if (message->peer() != kAnySource || !message->submission->handle->is_given_up()) continue;
    stop_waiting(*message);
    receives.waiting.remove(message);
    --receives.from_any;
    fail(message, ErrorKind::stalled, title_of(*message->submission->request) + ": nobody waits for it any more");
  }
  speak(receives);
}

std::optional<PairMessages::Heard> PairMessages::take_first_heard(const Message& message, FromRank*& arrivals) {
  const auto& [process_set, tag, peer] = message.way;
  if (peer != kAnySource) {
    arrivals = &arrivals_[message.way];
  } else {
    for (auto it = arrivals_.lower_bound({process_set, tag, INT_MIN}); it != arrivals_.end(); ++it) {
      if (std::get<0>(it->first) != process_set || std::get<1>(it->first) != tag) break;
      if (it->second.heard.empty()) continue;
      if (!arrivals || it->second.heard.front().order < arrivals->heard.front().order) arrivals = &it->second;
    }
  }
  if (!arrivals || arrivals->heard.empty()) return std::nullopt;
  std::optional<Heard> heard = std::move(arrivals->heard.front());
  arrivals->heard.pop_front();
  return heard;
}

// ------------------------------------------------------------------------------------ ends that a thread carries
// itself

bool PairMessages::begin_directly(const DirectEnds& ends) {
  if (is_held_ || !rings_ || inbox_.has_new_messages() || inbox_.has_timeline()) return false;
  if (!std::all_of(ends.begin(), ends.end(), [&](const DirectEnd& one) {
        turn.assert_held();
        return can_begin(one);
      }))
    return false;
  rings_->hold_calls();
  const std::optional<Error> error = error_of([&] {
    turn.assert_held();
    for (DirectEnd& one : ends) begin(one);
  });
  rings_->call_now();
  if (error) throw Error(*error);
  return true;
}

// Nothing of its way may be ahead of it, and what has been heard of it must fit.
bool PairMessages::can_begin(const DirectEnd& end) {
  if (!rings_->reaches(end.peer) || end.bytes() > rings_->most_bytes()) return false;
  const auto fits = [&](const std::deque<Heard>& heard, int64_t number) {
    if (heard.empty()) return true;
    const Heard& first = heard.front();
    const int64_t* const shape = first.spec.shape.data();
    return first.number == number && end.has(first.spec.dtype, shape, shape + first.spec.shape.size());
  };
  if (end.sends) {
    const auto sends = sends_.find(way_of(end));
    return sends != sends_.end() && sends->second.is_used && sends->second.waiting.empty() &&
           sends->second.failed.empty() && fits(sends->second.heard, sends->second.next);
  }
  const auto arrivals = arrivals_.find(way_of(end));
  if (arrivals == arrivals_.end() || !arrivals->second.is_used || !arrivals->second.failed.empty() ||
      !arrivals->second.given_up.empty() || !fits(arrivals->second.heard, arrivals->second.next))
    return false;
  const auto receives = receives_.find({end.process_set, end.tag});
  return receives == receives_.end() || receives->second.waiting.empty();
}

void PairMessages::begin(DirectEnd& end) {
  Sends* const sends = end.sends ? &sends_.find(way_of(end))->second : nullptr;
  FromRank* const arrivals = end.sends ? nullptr : &arrivals_.find(way_of(end))->second;
  std::deque<Heard>& heard = sends ? sends->heard : arrivals->heard;
  end.number = sends ? sends->next++ : arrivals->next++;
  say_own(end);
  if (heard.empty()) return direct_.push_back(&end);
  if (arrivals && end.bytes() > 0) std::memcpy(end.memory, heard.front().values.data(), end.bytes());
  heard.pop_front();
  inbox_.note_direct(end.bytes());
  end.state.store(DirectEnd::State::done, std::memory_order_release);
}

void PairMessages::listen_for(const DirectEnds& ends) {
  if (is_held_) return;
  for (const DirectEnd& one : ends)
    if (!one.is_settled())
      rings_->listen_to(one.peer, [&](const MessageLink::Word& word) {
        turn.assert_held();
        hear(word);
      });
}

void PairMessages::say_own(const DirectEnd& end) {
  Word word;
  word.say = end.sends ? Say::sends : Say::awaits;
  word.dtype = end.dtype;
  word.dimensions = end.dimensions;
  word.process_set = end.process_set;
  word.tag = end.tag;
  word.number = end.number;
  word.core = sched_getcpu();
  say(end.peer, word, end.shape.data(), end.memory, end.sends ? end.bytes() : 0);
}

bool PairMessages::has_settled_directly(int from, const Word& word, const char* shape, const char* values) {
  if (word.say != Say::sends && word.say != Say::awaits) return false;
  const auto found = std::find_if(direct_.begin(), direct_.end(), [&](const DirectEnd* one) {
    return one->number == word.number && one->peer == from && one->tag == word.tag &&
           one->process_set == word.process_set && one->sends == (word.say == Say::awaits);
  });
  if (found == direct_.end()) return false;
  DirectEnd& end = **found;
  std::array<int64_t, DirectEnd::kMostDimensions> dimensions;
  const size_t count = std::min<size_t>(word.dimensions, dimensions.size());
  std::memcpy(dimensions.data(), shape, count * sizeof(int64_t));
  if (word.dimensions > count || !end.has(word.dtype, dimensions.data(), dimensions.data() + count)) {
    hand_over_all();
    return false;
  }
  direct_.erase(found);
  if (!end.sends && end.bytes() > 0) std::memcpy(end.memory, values, end.bytes());
  inbox_.note_direct(end.bytes());
  end.state.store(DirectEnd::State::done, std::memory_order_release);
  return true;
}

void PairMessages::hand_over(const DirectEnds& ends) {
  if (!ends.are_settled()) hand_over_all();
}

// Those of a way keep their order, and are ahead of all that began later.
void PairMessages::hand_over_all() {
  for (; !direct_.empty(); direct_.pop_back()) hand_over(*direct_.back());
}

void PairMessages::hand_over(DirectEnd& end) {
  auto submission = std::make_shared<Submission>();
  submission->request = std::make_shared<Request>();
  submission->request->site = end.site;
  Operation& operation = submission->request->operation;
  operation.kind = OpKind::transfer;
  operation.process_set = end.process_set;
  const int source = end.sends ? world_.rank : end.peer, destination = end.sends ? end.peer : world_.rank;
  operation.numbers = {source, destination, end.tag};
  operation.tensors = {end.spec()};
  submission->inputs.push_back(end.memory);
  if (!end.sends) submission->outputs.push_back(end.memory);
  submission->is_awaited = true;
  end.handle = submission->handle;
  end.handle->set_process_set(Handle::kMessage);
  const std::optional<Error> error = error_of([&] {
    turn.assert_held();
    inbox_.add_begun(submission);
  });
  if (error) {
    end.handle->fail(error->kind(), error->what());
  } else {
    const auto message = std::make_shared<Message>();
    message->submission = std::move(submission);
    message->sends = end.sends;
    message->way = way_of(end);
    message->number = end.number;
    message->memory = end.memory;
    message->since_s = now_s();
    message->has_spoken = true;
    if (end.sends)
      sends_[message->way].waiting.push_front(message);
    else
      receives_[{end.process_set, end.tag}].waiting.push_front(message);
    wait_for_other_end(message);
  }
  end.state.store(DirectEnd::State::handed_over, std::memory_order_release);
}

// ---------------------------------------------------------------------------------------------------------- the words

void PairMessages::say(int to, const Word& word, const int64_t* shape, const void* values, size_t bytes) {
  MessageLink::Text text;
  text.put(&word, sizeof(word));
  text.put(shape, word.dimensions * sizeof(int64_t));
  MessageLink& link = link_to(to);
  link.say(to, text, values, bytes);
  ++said_;
  if (&link == network_.get() && word.say < Say::asks_for_confirmation) ++told_[to].said;
}

void PairMessages::say_own(Message& message) {
  message.has_spoken = true;
  const TensorSpec& spec = message.spec();
  Word word;
  word.say = message.sends ? Say::sends : Say::awaits;
  word.dtype = spec.dtype;
  word.dimensions = static_cast<uint16_t>(spec.shape.size());
  word.process_set = std::get<0>(message.way);
  word.tag = std::get<1>(message.way);
  word.number = message.number;
  const bool is_few = this->is_few(message);
  if (!message.sends && !is_few) {
    message.values.emplace();
    message.values->peer = message.peer();
    message.values->memory = message.memory;
    message.values->bytes = spec.bytes();
    link_to(message.peer()).expect(*message.values);
    word.place = message.values->place;
  }
  say(message.peer(), word, spec.shape.data(), message.memory, message.sends && is_few ? spec.bytes() : 0);
}

void PairMessages::hear(const MessageLink::Word& heard) {
  constexpr size_t kMostDimensions = 64;
  Word word;
  const auto require = [&](bool holds) {
    if (!holds) throw invalid_from(heard.from, "a word of a message that is invalid");
  };
  require(heard.bytes >= sizeof(word));
  std::memcpy(&word, heard.data, sizeof(word));
  const size_t shape_bytes = word.dimensions * sizeof(int64_t);
  require(word.say <= Say::confirms && static_cast<int>(word.dtype) < kDTypes && word.dimensions <= kMostDimensions &&
          heard.bytes >= sizeof(word) + shape_bytes);
  ++heard_;
  if (word.core >= 0) core_of_direct_peer_ = word.core;
  if (word.say == Say::asks_for_confirmation) {
    word.say = Say::confirms;
    word.dimensions = 0;
    return say(heard.from, word, nullptr, nullptr, 0);
  }
  if (word.say == Say::confirms) {
    told_[heard.from].confirmed = static_cast<uint64_t>(word.number);
    return;
  }
  const char* const shape = heard.data + sizeof(word);
  if (has_settled_directly(heard.from, word, shape, shape + shape_bytes)) return;
  const Way way = {word.process_set, word.tag, heard.from};
  if (word.say == Say::refuses_sender || word.say == Say::refuses_receiver)
    return hear_refusal(way, word.number, word.say == Say::refuses_sender);
  if (word.say == Say::explains_to_sender || word.say == Say::explains_to_receiver) {
    const size_t most = std::min(heard.bytes - sizeof(word) - shape_bytes, kMostOfSite);
    const char* const site = heard.data + sizeof(word) + shape_bytes;
    return hear_explanation(way, word.number, word.say == Say::explains_to_sender, {site, strnlen(site, most)});
  }
  Heard one;
  one.source = heard.from;
  one.number = word.number;
  one.place = word.place;
  one.spec.dtype = word.dtype;
  one.spec.shape.resize(word.dimensions);
  std::memcpy(one.spec.shape.data(), shape, shape_bytes);
  if (word.say == Say::awaits) return hear_receiver(way, std::move(one));
  const size_t bytes = one.spec.bytes();
  one.has_values = bytes <= link_to(heard.from).most_bytes();
  require(!one.has_values || heard.bytes >= sizeof(word) + shape_bytes + bytes);
  hear_sender(way, std::move(one), shape + shape_bytes);
}

void PairMessages::hear_receiver(const Way& way, Heard heard) {
  Sends& sends = sends_[way];
  if (sends.waiting.empty() || sends.waiting.front()->number != heard.number) {
    if (heard.number < sends.next) return;  // it has failed
    if (refuses_) refuse(way, heard.number, false);
    sends.heard.push_back(std::move(heard));
    return;
  }
  const MessagePtr send = sends.waiting.front();
  sends.waiting.pop_front();
  stop_waiting(*send);
  meet_receiver(send, heard);
}

void PairMessages::hear_sender(const Way& way, Heard heard, const char* values) {
  FromRank& arrivals = arrivals_[way];
  if (arrivals.given_up.erase(heard.number) > 0 || arrivals.failed.count(heard.number) > 0) return;
  Receives& receives = receives_[{std::get<0>(way), std::get<1>(way)}];
  drop_given_up(receives);
  const auto found = std::find_if(receives.waiting.begin(), receives.waiting.end(), [&](const MessagePtr& one) {
    return one->peer() == std::get<2>(way) || one->peer() == kAnySource;
  });
  if (found == receives.waiting.end()) {
    if (heard.has_values) heard.values.assign(values, values + heard.spec.bytes());
    heard.order = ++heard_words_;
    if (refuses_) refuse(way, heard.number, true);
    arrivals.heard.push_back(std::move(heard));
    return;
  }
  const MessagePtr receive = *found;
  receives.waiting.erase(found);
  stop_waiting(*receive);
  const bool was_from_any = receive->peer() == kAnySource;
  receive->way = way;
  meet_sender(receive, arrivals, heard, values);
  if (!was_from_any) return;
  --receives.from_any;
  speak(receives);
}

// Their ends wait for what never comes.
void PairMessages::refuse_others() {
  refuses_ = true;
  for (const auto& [way, sends] : sends_)
    for (const Heard& heard : sends.heard) refuse(way, heard.number, false);
  for (const auto& [way, arrivals] : arrivals_)
    for (const Heard& heard : arrivals.heard) refuse(way, heard.number, true);
}

void PairMessages::refuse(const Way& way, int64_t number, bool of_sender) {
  Word word;
  word.say = of_sender ? Say::refuses_sender : Say::refuses_receiver;
  word.process_set = std::get<0>(way);
  word.tag = std::get<1>(way);
  word.number = number;
  say(std::get<2>(way), word, nullptr, nullptr, 0);
}

// It is announced at once, as if it were overdue.
void PairMessages::hear_refusal(const Way& way, int64_t number, bool of_sender) {
  hand_over_all();
  const auto is_it = [&](const MessagePtr& one) {
    return one->way == way && one->number == number && one->sends == of_sender && !one->is_announced;
  };
  if (std::any_of(pending_.begin(), pending_.end(), is_it)) oldest_s_ = -kNever;
}

// ------------------------------------------------------------------------------------------------------ ends that meet

void PairMessages::meet_sender(const MessagePtr& receive, FromRank& arrivals, const Heard& heard, const char* values) {
  if (receive->peer() == kAnySource) std::get<2>(receive->way) = heard.source;
  receive->number = heard.number;
  arrivals.next = std::max(arrivals.next, heard.number + 1);
  arrivals.failed.erase(arrivals.failed.begin(), arrivals.failed.lower_bound(arrivals.next));
  if (!receive->has_spoken) say_own(*receive);
  if (!fits(receive, heard)) return;
  if (!heard.has_values) return carried_.push_back(receive);
  copy(receive->memory, values, heard.spec.bytes());
  finish(receive);
}

void PairMessages::meet_receiver(const MessagePtr& send, const Heard& heard) {
  if (!fits(send, heard)) return;
  if (is_few(*send)) return finish(send);
  send->values.emplace();
  send->values->peer = send->peer();
  send->values->place = heard.place;
  send->values->memory = send->memory;
  send->values->bytes = send->spec().bytes();
  link_to(send->peer()).send(*send->values);
  carried_.push_back(send);
}

bool PairMessages::fits(const MessagePtr& message, const Heard& heard) {
  inbox_.note_begun(*message->submission, now_s());
  if (message->spec() == heard.spec) return true;
  unexplained_.push_back({message, heard.spec});
  Word word;
  word.say = message->sends ? Say::explains_to_receiver : Say::explains_to_sender;
  word.process_set = std::get<0>(message->way);
  word.tag = std::get<1>(message->way);
  word.number = message->number;
  const auto& site = message->submission->request->site;
  const std::string text = (site ? *site : "").substr(0, kMostOfSite - 1);
  say(message->peer(), word, nullptr, text.c_str(), text.size() + 1);
  return false;
}

// The other end has seen that it does not fit either, and has said where it is.
void PairMessages::hear_explanation(const Way& way, int64_t number, bool of_sender, const std::string& site) {
  const auto found = std::find_if(unexplained_.begin(), unexplained_.end(), [&](const Unexplained& one) {
    return one.message->way == way && one.message->number == number && one.message->sends == of_sender;
  });
  if (found == unexplained_.end()) return;
  const auto [message, spec] = std::move(*found);
  unexplained_.erase(found);
  const Request& request = *message->submission->request;
  Request other = request;
  other.operation.tensors = {spec};
  const RankSet own({world_.rank, world_.rank}), peer({message->peer(), message->peer()});
  const std::string text = find_mismatch({{request, own}, {std::move(other), peer}});
  const std::map<int, std::string> sites = {{message->peer(), site}, {world_.rank, request.site ? *request.site : ""}};
  std::string lines;
  for (const auto& [rank, line] : sites)
    if (!line.empty()) lines += (lines.empty() ? " (rank " : "; rank ") + std::to_string(rank) + " at " + line;
  fail(message, ErrorKind::mismatch, lines.empty() ? text : text + lines + ")");
}

void PairMessages::wait_for_other_end(const MessagePtr& message) {
  message->pending = pending_.insert(pending_.end(), message);
  message->is_pending = true;
  oldest_s_ = std::min(oldest_s_, message->since_s);
}

// They are in the order of submission. Where all were announced and none was since, this goes through all of them.
void PairMessages::find_oldest() {
  const auto oldest =
      std::find_if(pending_.begin(), pending_.end(), [](const MessagePtr& one) { return !one->is_announced; });
  oldest_s_ = oldest == pending_.end() ? kNever : (*oldest)->since_s;
}

void PairMessages::stop_waiting(Message& message) {
  if (!std::exchange(message.is_pending, false)) return;
  if (message.is_announced) {
    const Key key = key_of(message.submission->operation());
    announced_.erase(key);
    withdrawn_.push_back(key);
  }
  pending_.erase(message.pending);
  if (message.since_s <= oldest_s_) find_oldest();
}

void PairMessages::finish(const MessagePtr& message) {
  Result result;
  if (!message->sends) result.number = message->peer();
  message->values.reset();
  inbox_.remove(std::vector<SubmissionPtr>{message->submission});
  ++ended_;
  // The history keeps the submission, but not its result.
  const std::shared_ptr<Handle> handle = std::move(message->submission->handle);
  handle->finish(std::move(result));
}

void PairMessages::fail(const MessagePtr& message, ErrorKind kind, const std::string& text) {
  forget_values(*message);
  inbox_.remove(std::vector<SubmissionPtr>{message->submission}, kind);
  ++ended_;
  message->submission->handle->fail(kind, text);
}

// The Network may still use the memory for a while.
void PairMessages::forget_values(Message& message) {
  if (!message.values) return;
  if (message.values->loan) message.submission->handle->lend_until_gone(message.values->loan);
  link_to(message.peer()).forget(*message.values);
  message.values.reset();
}

// ------------------------------------------------------------------------------------------- ends that wait for long

bool PairMessages::has_news(double now) const { return !withdrawn_.empty() || now >= next_deadline(); }

// Younger ones are announced along with the first overdue one, so that one warning counts them all.
void PairMessages::announce(bool all, std::vector<Pending>& to_announce, std::vector<Key>& withdrawn) {
  is_held_ = true;
  for (Key& key : std::exchange(withdrawn_, {})) withdrawn.push_back(std::move(key));
  if (!all && now_s() < next_deadline()) return;
  turn.assert_held();
  hand_over_all();
  for (const MessagePtr& message : pending_) {
    if (std::exchange(message->is_announced, true)) continue;
    auto request = std::make_shared<Request>(*message->submission->request);
    request->operation.numbers.push_back(message->number);
    announced_[key_of(request->operation)] = message;
    to_announce.push_back({std::move(request), message->since_s});
  }
  oldest_s_ = kNever;
}

// So are messages that this rank has not looked at yet.
int64_t PairMessages::on_their_way() const {
  return said_ - heard_ + static_cast<int64_t>(carried_.size()) + (inbox_.has_new_messages() ? 1 : 0);
}

// A thread may have seen no work meanwhile, and gone to sleep.
void PairMessages::settled() {
  if (!std::exchange(is_held_, false)) return;
  bell_.ring_all();
  message_bell_.ring();
}

void PairMessages::note_failure(const Agreement& agreement) {
  hand_over_all();
  const Operation& operation = agreement.operation;
  const auto own = announced_.find(key_of(operation));
  if (own == announced_.end()) return note_failure_of_other_end(operation, {agreement.error, agreement.message});
  const MessagePtr message = own->second;
  announced_.erase(own);
  message->is_announced = false;
  stop_waiting(*message);
  forget_values(*message);
  if (message->sends) {
    std::deque<MessagePtr>& waiting = sends_[message->way].waiting;
    waiting.erase(std::find(waiting.begin(), waiting.end(), message));
    return;
  }
  if (message->number >= 0) arrivals_[message->way].given_up.insert(message->number);
  drop_receive(message);
}

void PairMessages::drop_receive(const MessagePtr& message) {
  Receives& receives = receives_[{std::get<0>(message->way), std::get<1>(message->way)}];
  receives.waiting.remove(message);
  if (message->peer() != kAnySource) return;
  --receives.from_any;
  speak(receives);
}

// This rank's end fails as well, at once or when it is submitted.
void PairMessages::note_failure_of_other_end(const Operation& operation, const Error& error) {
  const std::vector<int64_t>& numbers = operation.numbers;
  const auto source = static_cast<int>(numbers[0]), destination = static_cast<int>(numbers[1]);
  const int64_t number = numbers[3];
  const auto is_it = [&](const MessagePtr& one) { return one->number == number; };
  const auto has_number = [&](const Heard& heard) { return heard.number == number; };
  if (number < 0) return;
  if (source == world_.rank) {
    Sends& sends = sends_[{operation.process_set, numbers[2], destination}];
    sends.heard.erase(std::remove_if(sends.heard.begin(), sends.heard.end(), has_number), sends.heard.end());
    if (number >= sends.next) sends.failed.emplace(number, error);
    const auto found = std::find_if(sends.waiting.begin(), sends.waiting.end(), is_it);
    if (found == sends.waiting.end()) return;
    const MessagePtr message = *found;
    sends.waiting.erase(found);
    stop_waiting(*message);
    return fail(message, error.kind(), error.what());
  }
  if (destination != world_.rank) return;
  const Way way = {operation.process_set, numbers[2], source};
  FromRank& arrivals = arrivals_[way];
  const auto heard = std::find_if(arrivals.heard.begin(), arrivals.heard.end(), has_number);
  const bool was_heard = heard != arrivals.heard.end();
  if (was_heard) arrivals.heard.erase(heard);
  if (number >= arrivals.next) arrivals.failed.emplace(number, error);
  for (const MessagePtr& message : receives_[{operation.process_set, numbers[2]}].waiting) {
    if (message->way != way || message->number != number) continue;
    const MessagePtr failing = message;
    arrivals.given_up.insert(number);
    stop_waiting(*failing);
    drop_receive(failing);
    return fail(failing, error.kind(), error.what());
  }
}

void PairMessages::forget_waiting() {
  unexplained_.clear();
  for (const MessagePtr& message : pending_) forget_values(*message);
  sends_.clear();
  arrivals_.clear();
  receives_.clear();
  pending_.clear();
  announced_.clear();
  withdrawn_.clear();
  oldest_s_ = kNever;
}

void PairMessages::forget(int process_set) {
  hand_over_all();
  const auto is_of_it = [&](const MessagePtr& message) { return std::get<0>(message->way) == process_set; };
  for (auto it = pending_.begin(); it != pending_.end();) {
    const MessagePtr message = *it++;
    if (!is_of_it(message)) continue;
    message->is_announced = false;  // the negotiation forgets it by itself
    announced_.erase(key_of(message->submission->operation()));
    stop_waiting(*message);
    forget_values(*message);
  }
  for (const MessagePtr& message : carried_)
    if (is_of_it(message)) forget_values(*message);
  carried_.erase(std::remove_if(carried_.begin(), carried_.end(), is_of_it), carried_.end());
  unexplained_.erase(std::remove_if(unexplained_.begin(), unexplained_.end(),
                                    [&](const Unexplained& one) { return is_of_it(one.message); }),
                     unexplained_.end());
  const auto forget_ways = [&](auto& ways) {
    for (auto it = ways.begin(); it != ways.end();)
      it = std::get<0>(it->first) == process_set ? ways.erase(it) : std::next(it);
  };
  forget_ways(sends_);
  forget_ways(arrivals_);
  forget_ways(receives_);
}

// ------------------------------------------------------------------------------------------------------------ the end

// Words to a rank come in order, so its confirmation of the last one is that of all.
bool PairMessages::are_all_told() {
  bool are_told = !rings_ || !rings_->any();
  for (auto& [rank, told] : told_) {
    if (told.confirmed == told.said) continue;
    are_told = false;
    if (std::exchange(told.asked, told.said) == told.said) continue;
    Word word;
    word.say = Say::asks_for_confirmation;
    word.number = static_cast<int64_t>(told.said);
    say(rank, word, nullptr, nullptr, 0);
  }
  is_asking_ = !are_told;
  return are_told;
}

void PairMessages::finish(int process_set) {
  constexpr double kLongest_s = 2;  // without one that ends
  bool has_failed = false;
  const auto is_carried = [&] {
    return std::any_of(carried_.begin(), carried_.end(),
                       [&](const MessagePtr& one) { return std::get<0>(one->way) == process_set; });
  };
  const auto is_over = [&] {
    turn.assert_held();
    has_failed = has_failed || error_of([&] {
                   turn.assert_held();
                   work(now_s());
                 });
    return has_failed || !is_carried() || ended_ > 0;
  };
  is_over();
  while (!has_failed && is_carried() && Waiter::comes_true(is_over, kLongest_s)) continue;
  forget(process_set);
}

void PairMessages::abandon() {
  error_of([&] {
    turn.assert_held();
    hand_over_all();
  });
  for (const MessagePtr& message : carried_) error_of([&] { forget_values(*message); });
  carried_.clear();
  error_of([&] {
    turn.assert_held();
    forget_waiting();
  });
}

}  // namespace ringtrain
