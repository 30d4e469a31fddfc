"""Bugs to plant in the product, each of which the simulation must find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulate.programs import Patch

_COORDINATOR, _LEDGER = "coordination/coordinator.cc", "coordination/ledger.cc"
_ALARM, _CHANNEL = "network/alarm.cc", "coordination/tree_channel.cc"
_CONNECTOR, _DIALLING, _NETWORK = "network/connector.cc", "network/dialling.cc", "network/sockets.cc"

NEGOTIATION: dict[str, Patch | tuple[Patch, ...]] = {
    "a cached operation is not announced again when another rank announces it": Patch(
        _COORDINATOR, "    reannounce(slot);\n    evict(slot);", "    evict(slot);"
    ),
    "an evicted operation keeps its slot on rank 1": Patch(
        _COORDINATOR, "    evict(slot);\n  });", "    if (channel_.rank() != 1) evict(slot);\n  });"
    ),
    "a bit of what is evicted is left out": Patch(
        _COORDINATOR,
        "    set_bit(decision.evicted, static_cast<size_t>(*slot));",
        "    if (*slot % 8 != 7) set_bit(decision.evicted, static_cast<size_t>(*slot));",
    ),
    "what two kinds of announcements have in common is read from the other kind": Patch(
        "coordination/messages.cc",
        "std::vector<Known>& requests = of_kind_[kind];",
        "std::vector<Known>& requests = of_kind_[0];",
    ),
    "an announcement is read with the requests of the one before it": Patch(
        "coordination/messages.cc", "requests.back().end > alike", "requests.size() > 9"
    ),
    "a rank that announces later is left out of the ranks that have announced": Patch(
        _LEDGER, "  entry.announced.add(ranks);\n", "  if (entry.announced.size() < 2) entry.announced.add(ranks);\n"
    ),
    "a rank with something to announce does not come to a round by itself": Patch(
        _COORDINATOR, "if (has_been_evicted || has_just_joined_) return 0;", "if (has_just_joined_) return 0;"
    ),
    "a rank that has joined goes on without an event": Patch(
        _COORDINATOR,
        "if (has_been_evicted || has_just_joined_) return 0;",
        "for (volatile bool loops = has_just_joined_; loops;) continue;\n"
        "  if (has_been_evicted || has_just_joined_) return 0;",
    ),
    "a rank that joins leaves its bits set": Patch(
        _COORDINATOR, "if (!joining.empty()) reannounce_all_of(joining);", ""
    ),
    "plans that were remembered before a join are used after it": Patch(
        _COORDINATOR, "if (decision.tuning || !decision.joined.empty()) cache_.forget_plans();", ""
    ),
    "a deadlock is told although a rank has just been woken": Patch(
        "coordination/blockage.h",
        "if (plans_to_carry_out_ != 0 || now - carried_out_s_ < kQuietBeforeDeadlock_s) return 0;",
        "",
    ),
    "a rank leaves without a word to those that see its connection end": Patch(
        _ALARM, "if (all_.would_see_end_at(rank)) send", "if (all_.would_see_end_at(rank) && is_neighbour(rank)) send"
    ),
    "a rank that hears of a death tells nobody": Patch(
        _ALARM, "if (!std::exchange(has_heard_, true)) tell(", "if ((has_heard_ = true, false)) tell("
    ),
    "the alarm has neighbours in a hypercube": Patch(
        _ALARM,
        "  const int distance = all_.wrap(rank - all_.rank());\n"
        "  return is_power_of_two(distance) || is_power_of_two(all_.size() - distance);",
        "  return is_power_of_two(all_.rank() ^ rank);",
    ),
    "the alarm knows the two next ranks of the circle only": Patch(
        _ALARM,
        "return is_power_of_two(distance) || is_power_of_two(all_.size() - distance);",
        "return distance == 1 || all_.size() - distance == 1;",
    ),
    "an operation is complete without the last rank": Patch(
        _LEDGER,
        "return entry.announced.size() == members.size();",
        "return entry.announced.size() + 1 >= members.size();",
    ),
    "a stalled operation stays in the ledger": Patch(
        _LEDGER,
        "    it = erase(it);\n  }\n  return agreements;\n}\n\nstd::vector<Agreement> Ledger::take_deadlocked",
        "    ++it;\n  }\n  return agreements;\n}\n\nstd::vector<Agreement> Ledger::take_deadlocked",
    ),
    "an operation that was cached before a join is agreed on as before": Patch(
        _COORDINATOR, "if (known->joined == joined) return known;", "return known;"
    ),
    "a stall is told in the round of the first announcement": (
        Patch(_LEDGER, "is_new(entry) || now < next_question(entry)", "now < next_question(entry)"),
        Patch(_LEDGER, "if (!is_new(it->second)) groups", "groups"),
        Patch(_LEDGER, "|| is_new(it->second) || now - it", "|| now - it"),
    ),
    "joins are never told as stalled": Patch(
        _LEDGER,
        "limits_.shutdown_s == 0 || is_new(it->second) ||",
        "limits_.shutdown_s == 0 || is_new(it->second) || is_join(it->first) ||",
    ),
    "a call is heard by one neighbour only": Patch(
        _CHANNEL,
        "  for (int child = first_child(); child < end_of_children(); ++child) call(child);",
        "",
    ),
    "one of few ranks calls nobody": Patch(_CHANNEL, "std::isfinite(patience_s_)) call_late", "rank() != 1) call_late"),
    "one of few ranks does not wait for the last of the others": Patch(
        _CHANNEL,
        "for_each_other([&](int other) { hear(other, words); });",
        "for_each_other([&](int other) {\n"
        "    const bool is_last = rank() == 1 && (other + 1) % size() == rank();\n"
        "    if (!is_last || wire_.arrives_within(other, Tag::bits, 0)) hear(other, words);\n"
        "  });",
    ),
    "the bits of one of few ranks are left out": Patch(
        _CHANNEL,
        "for_each_other([&](int other) { hear(other, words); });",
        "for_each_other([&](int other) {\n    Words none = words;\n    hear(other, other == 1 ? none : words);\n  });",
    ),
    "words of the next round are taken for those of this one": Patch(
        _CHANNEL,
        "  receive_round(from, theirs_);\n  for",
        "  do receive_round(from, theirs_);\n  while (wire_.arrives_within(from, Tag::bits, 0));\n  for",
    ),
    "a leader does not hear the call of another node": Patch(
        "coordination/tree_channel.h",
        "return node_->is_called() || (cross_ && cross_->is_called());",
        "return node_->is_called();",
    ),
    "the sums of nodes are taken although one of them has put none": Patch(
        _CHANNEL, "if (value.slot != own.slot || value.bytes != own.bytes) return false;", ""
    ),
    "a node adds up its values although one of its ranks has put none": Patch(
        _CHANNEL,
        "if (member != node_->rank() && node_->value_of(member).slot != own_value_.slot) return false;",
        "if (member == 0 && node_->rank() != 0 && node_->value_of(0).slot != own_value_.slot) return false;",
    ),
    "a leader goes on during a plan without the words of some of its node": Patch(
        _CHANNEL, "has_come_ = node_->finish_and(words_, kAtOnce);", "has_come_ = true;"
    ),
    "a leader goes on with the words of the round before": Patch(
        _CHANNEL, "  has_come_ = false;\n  node_->begin_and(words_);", "  node_->begin_and(words_);"
    ),
    "a lane that ends forgets what other ranks know of": Patch(
        _COORDINATOR, "for (auto& [key, one] : announced_) pending.push_back(std::move(one));", ""
    ),
    "the ranks of a lane go by their places": Patch(
        _COORDINATOR, "rank_(members_.at(static_cast<size_t>(channel.rank()))),", "rank_(channel.rank()),"
    ),
    "a lane does not end when all ranks are blocked": Patch(
        _COORDINATOR, "round_.closes_lanes = are_all_blocked_ &&", "round_.closes_lanes = false &&"
    ),
}

# A bug that has several places has several patches.
SOCKETS = {
    "one refused address loses a rank although another one works": (
        Patch(_DIALLING, "  dial_next_address(stream, now);\n}", "  stream.state = State::given_up;\n}"),
        Patch(_DIALLING, "return std::all_of(streams_", "return std::any_of(streams_"),
    ),
    "a rank that ends a connection before it begins is not dialled again": (
        Patch(_DIALLING, "if (patience_s_ == 0 || *taken_s < patience_s_) return dial_again(stream, now);", ""),
    ),
    "a listener without file descriptors is looked at again at once": (
        Patch(_CONNECTOR, "else if (!refuse_one(listener.socket()))\n      break;", "else\n      return;"),
    ),
    "a rank that fails in init() keeps its listeners open": (
        Patch(
            _NETWORK, "std::vector<Descriptor> listeners, int rank,", "std::vector<Descriptor>&& listeners, int rank,"
        ),
        Patch(
            _NETWORK, "std::vector<Descriptor> listeners;  //", "auto& listeners = *new std::vector<Descriptor>;  //"
        ),
    ),
    "a rank that leaves does not wait until its messages are confirmed": (
        Patch(_NETWORK, "if (Waiter::comes_true([&] { return is_all_confirmed(); }, kByeWithin_s)) break;", "break;"),
    ),
    "a message is lost with its connection": (
        Patch(
            _NETWORK,
            "peer.unsent.insert(peer.unsent.begin(), stream.unconfirmed.begin(), stream.unconfirmed.end());",
            "",
        ),
    ),
    "a message that comes again goes where it is under way": (
        Patch(_NETWORK, "if (is_under_way(peer, frame)) return new_frame(header);", ""),
    ),
    "a broken connection is not made again": (
        Patch(_NETWORK, "connector_.heal(peer.rank, Dialling::Missing::all, now + longest_s);", "{}"),
    ),
    "an address that refuses tells more than one that accepts": (
        Patch(
            _CONNECTOR,
            "{DialFailure::turned_away, DialFailure::no_descriptor, DialFailure::refused}",
            "{DialFailure::refused, DialFailure::turned_away, DialFailure::no_descriptor}",
        ),
    ),
    "nobody dials a rank that is waited for": (Patch(_CONNECTOR, "  wanted_.push_back(rank);\n}", "}"),),
    "a receive that was given up keeps its memory": (Patch(_NETWORK, "if (in) in->place = nullptr;", ""),),
    "a send that was given up keeps the memory of its caller": (
        Patch(_NETWORK, "if (out && !out->is_confirmed) out->keep_data();", ""),
    ),
    "a stream that is full is not written to again": (
        Patch(_NETWORK, "stream, stream.frames.queued_bytes() > 0);", "stream, false);"),
    ),
    "the proof of a rank that dials is not checked": (
        Patch(
            "network/handshake.cc",
            "if (!are_equal(Reader(in_).get<Sha256>(), proof(kDials))) return false;",
            "",
        ),
    ),
    "bytes that were changed on their way are taken": (
        Patch(
            "network/sealing.cc",
            "return crypto.open_final(context, bytes_of(text) + bytes, &done) == 1;",
            "return true;",
        ),
    ),
    "a length that was changed on its way is believed": (Patch("network/sealing.cc", "head[0] == ~head[1] && ", ""),),
    "a frame is complete when its header has come": (
        Patch("network/frame_stream.cc", "if (incoming_->came < incoming_->header.bytes) return;\n  const", "const"),
    ),
}

_ACTOR, _PART, _STORES = "kvstore/store/actor.cc", "kvstore/store/part.cc", "kvstore/server/server_stores.cc"
_REMOTE_SERVER, _SESSION = "kvstore/worker/remote_server.cc", "kvstore/server/session.cc"

STORE: dict[str, Patch | tuple[Patch, ...]] = {
    "chunks of a push over TCP are applied as they come": Patch(
        _SESSION, "if (pushes && actor.part().layout().is_pushed_as_a_whole(chunk.piece))", "if (pushes && false)"
    ),
    "a worker that dies leaves a push in memory half applied": Patch(
        _STORES, "is_done = actor->finish_push_of(static_cast<size_t>(*worker)) && is_done;", "(void)actor;"
    ),
    "a connection that ends drops the rest of a push that is applied": Patch(
        _SESSION, "if (!late.empty()) home_.shared().stores.finish(std::move(late));", ""
    ),
    "what a dead process has left of a change counts": Patch(
        _PART, "if (record.journal.load(std::memory_order_acquire) != 0) restore(part_, chunk_);", "record.journal = 0;"
    ),
    "a push that comes again counts again": Patch(
        _ACTOR,
        "    if (seq <= before)\n      outcome = Outcome::duplicate;\n    else if (seq != before + 1)",
        "    if (seq > before + 1)",
    ),
    "a value that is assigned again undoes pushes": Patch(
        _ACTOR, "change_number(term_, change) <= part_", "change_number(term_, change) < part_"
    ),
    "what the next process of a worker assigns is taken for what the one before has assigned": Patch(
        "kvstore/store/records.h", "return term * kChangesOfProcess + count;", "return 0 * term + count;"
    ),
    "rounds pass each worker that waits": Patch(
        _STORES, "if (!part.header().is_restored.load() && part.first_term(place) == 0) continue;", ""
    ),
    "a server that comes back takes a worker that has joined for one that pushes": Patch(
        _REMOTE_SERVER, "if (join != joins_.end()) ask", "if (false) ask"
    ),
    "pushes of an expelled worker count": Patch(
        _ACTOR, "if (is_server() || part_->first_term(number_) <= term_) return;", "return;"
    ),
    # No worker waits for one of a later term, which would hide the bug.
    "a key that is made waits for a worker that has died before": (
        Patch(_STORES, "    if (dead < workers) actor.part()", "    if (false) actor.part()"),
        Patch(_ACTOR, " && part_->first_term(worker) == 0;", ";"),
    ),
    "a push that comes before the one before it counts": Patch(
        _ACTOR, "    else if (seq != before + 1)\n      return Outcome::early;\n", ""
    ),
    "a request that waits keeps the number that it came with first": Patch(
        _SESSION, "if (deferred_.count(id)) renumber(id, head.number);", ""
    ),
}

_MEMBERSHIP, _ROUNDS = (f"kvstore/servers/{name}.py" for name in ("membership", "rounds"))

SCHEDULER = {
    "a process that was refused a place is not understood": Patch(
        _MEMBERSHIP,
        "place = self._places.get(member)\n        if place is None:",
        "place = self._places[member]\n        if not place:",
    ),
    "a worker that comes back holds a round alone that the others have not held yet": Patch(
        _ROUNDS, "if is_alone and label in self._held and self._held[label].issuperset(originals):", "if is_alone:"
    ),
    "a round ends without one of its workers": Patch(
        _ROUNDS, "elif awaited <= said.keys():", "elif len(awaited - said.keys()) <= 1:"
    ),
    "a worker that waited in a round is said not to have come": Patch(
        _ROUNDS,
        "late = [number for number in workers if number not in self.came]",
        "late = list(workers)",
    ),
    "a request is answered with the entry before": Patch(
        _MEMBERSHIP, '["version"] < version]', '["version"] + 1 < version]'
    ),
    "a request waits for worker 0, which is gone": Patch(
        _MEMBERSHIP,
        'return answers if answers or not self._lost else self.lose(Place("worker", 0), self._lost)',
        "return answers",
    ),
}

_GENERATIONS, _CONVERSATION = (f"job/rendezvous/{name}.py" for name in ("generations", "conversation"))

ELASTIC = {
    "a generation is formed while a process is still at work": Patch(
        _GENERATIONS, "if not self._failure and not self._busy:", "if not self._failure and len(self._busy) < 2:"
    ),
    "the newest state is not the first one": Patch(
        _GENERATIONS, "return -one.arrival.commits, one.rank", "return one.arrival.commits, one.rank"
    ),
    "ranks wait in init() for the answer of one that has come again": Patch(
        _GENERATIONS,
        "self._tell_all([*(one for one in self._said if one in self._members), *asking],",
        "self._tell_all(asking,",
    ),
    "a message that was under way at a reset is not said again": Patch(
        _CONVERSATION, "return list(self._kept)", "return []"
    ),
    "a message that has come before a reset comes again": Patch(
        _CONVERSATION, "        self.forget(heard)\n        return list", "        return list"
    ),
    "a process whose connection was reset is lost at once": Patch(
        _CONVERSATION, "if line not in self._tokens or not is_reset(error):", "if is_reset(error):"
    ),
    "a process that was given up comes back without its state": Patch(
        _GENERATIONS, "known.has_committed |= arrival.has_state", "known.has_committed |= False"
    ),
}

_STEPS = "training/local_steps.py"
DILOCO: dict[str, Patch | tuple[Patch, ...]] = {
    "what the codes leave out is lost": Patch(_STEPS, "            difference += error_before\n", "            pass\n"),
    "a state from before the first step leaves the errors of later ones": Patch(
        _STEPS,
        "            fragment.error, fragment.arriving = error, None\n",
        "            fragment.error, fragment.arriving = error if content else fragment.error, None\n",
    ),
    "all ranks take the errors of one": (
        Patch("elastic/states.py", "share_object(replicated_state_of(holder),", "share_object(holder.state_dict(),"),
        Patch(_STEPS, 'is_own = rank in saved["ranks"]', "is_own = True"),
    ),
    "a rank that has lost its last commit keeps its errors": Patch(
        _STEPS,
        'self.inner_steps == int(state["inner_steps"])\n        if is_at and all(fragment.is_at(one)',
        "True\n        if is_at and all(True",
    ),
    "a rank that has dropped a difference keeps its errors where it arrives": Patch(
        _STEPS, "has_same = self.arriving is other", "has_same = True"
    ),
    "a rank with another number in the new generation loses its errors": Patch(
        _STEPS,
        'self._rank_in.get(saved["generation"], self._rank_in[self._generation])',
        "self._rank_in[self._generation]",
    ),
    "the ranks of an island keep different errors": Patch(_STEPS, "            self._share_errors()\n", ""),
    "a fragment is taken as soon as it has come": Patch(_STEPS, "fragment.arriving.due <= self.inner_steps:", "True:"),
    "a newcomer begins with a new state of the outer optimizer": Patch(
        _STEPS,
        'fragment.outer_state = copy.deepcopy(dict(one["outer_state"]))',
        "fragment.outer_state = self._settings.outer.create_state(0, fragment.outer)",
    ),
    "fragments are sent at the same step": Patch(
        _STEPS, "(number + 1) * every // count % every", "0 * (number + count)"
    ),
    "the oldest commit is taken": Patch("elastic/states.py", "int(of_ranks.max())", "int(of_ranks.min())"),
    "the end of a generation drops the means of a commit": Patch(
        _STEPS,
        "            if fragment.arriving is not None and not fragment.arriving.transfer.has_come:\n",
        "            if fragment.arriving is not None:\n",
    ),
    "a commit that fails has saved the parameters": Patch(
        "elastic/states.py",
        "        super().save()\n"
        "        self._copies = {name: self._kept(arrays, self._copies[name]) for name, arrays in found.items()}\n",
        "        self._copies = {name: self._kept(arrays, self._copies[name]) for name, arrays in found.items()}\n"
        "        super().save()\n",
    ),
    "a difference that is under way is not in a checkpoint": Patch(
        _STEPS,
        '            arriving = {"due": fragment.arriving.due, "mean": fragment.arriving.transfer.mean().copy()}',
        "            fragment.arriving.transfer.mean()",
    ),
}

PLANTED: Mapping[str, Mapping[str, Sequence[Patch]]] = {
    "negotiation": {bug: (patch,) if isinstance(patch, Patch) else patch for bug, patch in NEGOTIATION.items()},
    "sockets": SOCKETS,
    "store": {bug: (patch,) if isinstance(patch, Patch) else patch for bug, patch in STORE.items()},
    "scheduler": {bug: (patch,) for bug, patch in SCHEDULER.items()},
    "diloco": {bug: (patch,) if isinstance(patch, Patch) else patch for bug, patch in DILOCO.items()},
    "elastic": {bug: (patch,) for bug, patch in ELASTIC.items()},
}
