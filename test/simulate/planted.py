"""Bugs to plant in the product, each of which the simulation must find."""

from __future__ import annotations

from simulate.programs import Patch

_COORDINATOR, _LEDGER = "coordination/coordinator.cc", "coordination/ledger.cc"

NEGOTIATION = {
    "a cached operation is not announced again when another rank announces it": Patch(
        _COORDINATOR, "    reannounce(*slot);\n    cache_.evict(*slot);", "    cache_.evict(*slot);"
    ),
    "an evicted operation keeps its slot on rank 1": Patch(
        _COORDINATOR, "    cache_.evict(*slot);\n  }", "    if (channel_.rank() != 1) cache_.evict(*slot);\n  }"
    ),
    "a rank with something to announce does not come to a round by itself": Patch(
        _COORDINATOR, "if (has_been_evicted || has_just_joined_) return 0;", "if (has_just_joined_) return 0;"
    ),
    "a rank that joins leaves its bits set": Patch(
        _COORDINATOR, "reannounce_all_of(request->operation.process_set);", ";"
    ),
    "plans that were remembered before a join are used after it": Patch(
        _COORDINATOR, "if (decision.tuning || !decision.joined.empty()) cache_.forget_plans();", ""
    ),
    "a deadlock is told although a rank has just been woken": Patch(
        _COORDINATOR,
        "return plans_to_carry_out_ == 0 && now - carried_out_s_ >= kQuietBeforeDeadlock_s;",
        "return true;",
    ),
    "an operation is complete without the last rank": Patch(
        _LEDGER,
        "[&](int rank) { return entry.announced.count(rank) ||",
        "[&](int rank) { return rank == members.back() || entry.announced.count(rank) ||",
    ),
    "a stalled operation stays in the ledger": Patch(
        _LEDGER,
        "    it = entries_.erase(it);\n  }\n  return agreements;\n}\n\nstd::vector<Agreement> Ledger::take_deadlocked",
        "    ++it;\n  }\n  return agreements;\n}\n\nstd::vector<Agreement> Ledger::take_deadlocked",
    ),
    "an operation that was cached before a join is agreed on as before": Patch(
        _COORDINATOR, "if (known->joined == joined) return known;", "return known;"
    ),
    "a stall is told in the round of the first announcement": Patch(
        "coordination/ledger.h", "return entry.order >= first_of_round_;", "return false;"
    ),
    "joins are never told as stalled": Patch(
        _LEDGER,
        "limits_.shutdown_s == 0 || is_new(it->second) ||",
        "limits_.shutdown_s == 0 || is_new(it->second) || is_join(it->first) ||",
    ),
    "a call is heard by one neighbour only": Patch(
        "coordination/tree_channel.cc",
        "  for (int child = first_child(); child < end_of_children(); ++child)\n"
        "    wire_.send(child, Tag::call, &round_, sizeof(round_));",
        "",
    ),
}
