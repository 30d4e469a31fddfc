"""The members of each generation of an elastic job, without any process."""

import random

import pytest

from ringtrain.job.rendezvous import generations
from ringtrain.job.rendezvous.generations import (
    Arrival,
    Done,
    Drop,
    Failed,
    Formed,
    Generations,
    Left,
    Limits,
    Released,
    StateLost,
    Stuck,
    Tell,
    Waiting,
)

LIMITS = Limits(first=3, least=2, most=4, timeout_s=600.0)


def arrival(commits=0, host="h", patience_s=600.0):
    return Arrival(host, 1, commits, patience_s)


def kinds_of(output, member):
    return [one.message["kind"] for one in output if isinstance(one, Tell) and one.member == member]


def formed(output):
    return [one for one in output if isinstance(one, Formed)]


def all_come(machine, members, now_s=0.0, **more):
    return [one for member in members for one in machine.come(member, arrival(**more), now_s)]


def job_of(members, limits=LIMITS, **more):
    """A job whose first generation has these members."""
    machine = Generations(limits)
    all_come(machine, members, **more)
    return machine


def after_the_loss_of_all():
    """A job whose three members are dead, one of which had made a commit."""
    machine = job_of("abc")
    machine.committed("a")
    for member in "abc":
        machine.lose(member, "killed", 1.0)
    return machine


def test_the_first_generation_waits_for_as_many_as_were_started():
    machine = Generations(LIMITS)
    assert not formed(all_come(machine, "ab"))
    output = all_come(machine, "c")
    assert formed(output) == [Formed(1, ["a", "b", "c"], 3)]
    assert [kinds_of(output, member) for member in "abc"] == [["world"]] * 3


def test_a_generation_ends_when_all_that_live_have_come():
    machine = job_of("abc")
    output = machine.lose("b", "killed", 1.0)
    assert Left("b", "killed") in output and kinds_of(output, "a") == kinds_of(output, "c") == ["lost"]
    assert not formed(machine.come("c", arrival(), 1.1))
    assert formed(machine.come("a", arrival(), 1.5)) == [Formed(2, ["a", "c"], 2)]
    assert machine.summary() == (2, 0.5, [("b", "killed")])


def test_rank_0_has_the_newest_commit_and_the_others_keep_their_order():
    machine = job_of("abcd", LIMITS._replace(first=4))
    for member, commits in zip("abcd", (7, 8, 7, 8), strict=True):
        output = machine.come(member, arrival(commits), 1.0)
    assert formed(output)[0].members == ["b", "d", "a", "c"]


def test_ranks_of_a_host_are_beside_each_other():
    machine = Generations(LIMITS._replace(first=4))
    for member, host in zip("abcd", "xyxy", strict=True):
        output = machine.come(member, arrival(host=host), 0.0)
    assert formed(output)[0].members == ["a", "c", "b", "d"]


def test_a_newcomer_waits_until_the_others_have_heard_of_it():
    machine = job_of("abc")
    output = machine.come("d", arrival(), 1.0)
    assert [kinds_of(output, member) for member in "abcd"] == [["news"]] * 3 + [[]]
    output = machine.tick(2.0)
    assert not any("news" in kinds_of(output, member) for member in "abcd")  # once is enough
    assert formed(all_come(machine, "abc", commits=1)) == [Formed(2, ["a", "b", "c", "d"], 4)]


def test_a_process_without_a_place_is_a_spare_and_joins_when_one_is_lost():
    machine = job_of("abcd", LIMITS._replace(first=4, most=4))
    output = machine.come("e", arrival(), 1.0)
    assert not any(isinstance(one, Tell) for one in output)
    machine.lose("a", "killed", 2.0)
    assert formed(all_come(machine, "bcd", commits=1)) == [Formed(2, ["b", "c", "d", "e"], 4)]


def test_the_number_in_its_name_places_a_process_that_was_in_no_generation():
    machine = Generations(LIMITS)
    output = all_come(machine, ["x/2", "x/0", "x/1"])
    assert formed(output)[0].members == ["x/0", "x/1", "x/2"]
    machine.come("x/10", arrival(), 1.0)
    assert formed(all_come(machine, ["x/1", "x/2", "x/0"]))[0].members == ["x/0", "x/1", "x/2", "x/10"]


def test_the_next_generation_is_formed_without_those_that_are_to_go():
    machine = job_of("abc")
    output = machine.retire(["b"], 1.0)
    assert [kinds_of(output, member) for member in "abc"] == [["news"]] * 3
    output = all_come(machine, "abc")
    assert formed(output) == [Formed(2, ["a", "c"], 2)] and Released(["b"]) in output
    assert kinds_of(machine.tick(2.0), "b") == []
    assert kinds_of(machine.done("a", 3.0), "b") == ["over"]


def test_messages_of_all_are_answered_in_the_order_of_the_ranks():
    machine = job_of("abc")
    assert not machine.say("c", 1, "of c", 0.0)
    assert not machine.say("a", 1, "of a", 0.0)
    output = machine.say("b", 1, "of b", 0.0)
    assert output == [Tell(member, {"kind": "heard", "values": {"rows": ["of a", "of b", "of c"]}}) for member in "abc"]
    assert len({id(one.message) for one in output}) == 1  # so it is packed once


@pytest.mark.parametrize("how", ["lose", "come", "done"])
def test_a_message_in_a_broken_generation_is_answered_with_again(how):
    machine = job_of("abc")
    machine.say("a", 1, 0, 0.0)
    arguments = {"lose": ("c", "killed", 1.0), "come": ("c", arrival(), 1.0), "done": ("c", 1.0)}[how]
    assert "again" in kinds_of(getattr(machine, how)(*arguments), "a")
    assert kinds_of(machine.say("b", 1, 0, 1.0), "b") == ["again"]


def test_hosts_that_are_new_or_have_failed_without_a_loss_are_to_be_looked_at():
    machine = Generations(LIMITS._replace(first=2, most=3))

    def generation(output):
        worlds = [one.message for one in output if isinstance(one, Tell) and one.message["kind"] == "world"]
        return {(world["generation"], world["may_be_cut"]) for world in worlds}

    assert generation(all_come(machine, "ab")) == {(1, False)}
    assert generation(all_come(machine, "ab")) == {(2, True)}  # nobody is lost
    all_come(machine, "c")
    assert generation(all_come(machine, "ab")) == {(3, True)}  # c is new
    machine.lose("a", "killed", 1.0)
    assert generation(all_come(machine, "bc")) == {(4, False)}


def test_too_few_may_wait_for_a_time():
    machine = job_of("abc", LIMITS._replace(timeout_s=5.0))
    machine.lose("a", "killed", 1.0)
    machine.lose("b", "killed", 1.0)
    machine.come("c", arrival(), 1.5)
    assert not machine.tick(6.4)
    output = machine.tick(6.6)
    assert "1 process of at least 2 have come in 5 s (--elastic-timeout)" in str(output)
    assert kinds_of(output, "c") == ["failed"] and any(isinstance(one, Failed) for one in output)
    assert kinds_of(machine.come("d", arrival(), 7.0), "d") == ["failed"]


def test_the_first_generation_begins_with_fewer_when_the_others_do_not_come():
    machine = Generations(LIMITS._replace(timeout_s=5.0))
    machine.tick(0.0)
    all_come(machine, "ab", 1.0)
    assert not formed(machine.tick(4.9))
    assert formed(machine.tick(5.1)) == [Formed(1, ["a", "b"], 2)]


def test_the_number_of_resets_is_limited():
    machine = job_of("abc", LIMITS._replace(least=1, reset_limit=1))
    machine.lose("a", "killed", 1.0)
    assert formed(all_come(machine, "bc"))
    machine.lose("b", "killed", 1.0)
    (failed,) = [one for one in machine.come("c", arrival(), 2.0) if isinstance(one, Failed)]
    assert "another generation 1 times" in failed.text


def test_nobody_is_let_in_after_the_first_is_done():
    machine = job_of("abcd", LIMITS._replace(first=4))
    all_come(machine, "e")
    output = machine.done("a", 1.0)
    assert output[0] == Done("a") and kinds_of(output, "e") == ["over"]
    assert kinds_of(machine.come("f", arrival(), 1.0), "f") == ["over"]
    # those who are left still end what they have begun, also fewer than the least
    machine.lose("b", "killed", 1.0)
    machine.done("c", 1.0)
    assert formed(machine.come("d", arrival(3), 1.0)) == [Formed(2, ["d"], 1)]


def test_a_silent_process_that_all_wait_for_is_stuck():
    machine = job_of("abc")
    machine.lose("a", "killed", 0.0)
    machine.come("b", arrival(), 0.0)
    assert kinds_of(machine.tick(1.0), "c") == ["ping"]
    assert generations.Stuck("c") not in machine.tick(9.9)
    assert generations.Stuck("c") in machine.tick(10.1)
    assert not any(isinstance(one, Drop) for one in machine.tick(20.0))
    output = machine.tick(20.2)
    assert Drop("c") in output and any(isinstance(one, Left) and one.member == "c" for one in output)


def test_a_process_that_answers_is_waited_for_as_long_as_it_wants():
    machine = job_of("abc", patience_s=60.0)
    machine.lose("a", "killed", 0.0)
    machine.come("b", arrival(), 0.0)
    for second in range(60):
        machine.answer("c", float(second))
        assert generations.Stuck("c") not in machine.tick(float(second))
    machine.answer("c", 61.0)
    assert generations.Stuck("c") in machine.tick(61.0)


def waits(machine, seconds, begin_s=0.0):
    """Returns what is reported while the time goes on, each as (seconds, what, late, silent)."""
    reports = []
    for tenth in range(int(10 * seconds) + 1):
        for one in machine.tick(begin_s + tenth / 10):
            if isinstance(one, Waiting):
                reports.append((round(one.seconds), one.what, one.late, one.silent))
    return reports


def all_join(machine, members, generation, now_s=0.0):
    for member in members:
        machine.joined(member, generation, now_s)


# --- hosts that are no longer named -----------------------------------------------------------------------------------


def test_retired_members_go_on_until_enough_others_have_come():
    machine = job_of("abc")
    assert not machine.retire(["b", "c"], 1.0)  # one of at least two would be left
    output = machine.come("d", arrival(), 2.0)
    assert [kinds_of(output, member) for member in "abcd"] == [["news"]] * 3 + [[]]
    output = all_come(machine, "abc", 3.0)
    assert formed(output) == [Formed(2, ["a", "d"], 2)] and Released(["b", "c"]) in output


def test_members_whose_hosts_are_named_again_stay():
    machine = job_of("abc")
    machine.retire(["a", "b", "c"], 1.0)
    assert not machine.retire([], 5.0)
    assert not any(isinstance(one, Released | Failed) for one in machine.tick(1e6))
    machine.lose("a", "killed", 1e6)
    assert formed(all_come(machine, "bc", 1e6)) == [Formed(2, ["b", "c"], 2)]


def test_retired_members_fill_the_gap_when_too_few_others_are_left():
    machine = job_of("abc")
    machine.retire(["a", "b", "c"], 1.0)
    machine.lose("c", "killed", 2.0)
    output = all_come(machine, "ab", 3.0)
    assert formed(output) == [Formed(2, ["a", "b"], 2)] and not any(isinstance(one, Released) for one in output)


def test_a_job_whose_hosts_are_not_named_again_fails_in_time():
    machine = job_of("abc", LIMITS._replace(timeout_s=20.0))
    all_join(machine, "abc", 1)
    machine.retire(["a", "b", "c"], 1.0)
    assert waits(machine, 19.9, 1.0) == [(seconds, "replacements", ("a", "b", "c"), ()) for seconds in (5, 10)]
    (failed,) = [one for one in machine.tick(21.1) if isinstance(one, Failed)]
    assert failed.text == "0 processes of at least 2 have been on named hosts for 20 s (--elastic-timeout)"


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_the_state_is_handed_over_when_all_members_are_replaced(most):
    machine = Generations(Limits(first=min(most, 2), least=1, most=most, timeout_s=600.0))
    all_come(machine, "ab"[:most])
    machine.retire(["a", "b"], 1.0)
    output = all_come(machine, "yz")
    assert kinds_of(output, "a") == ["news"]
    output = all_come(machine, "ab"[:most], 1.0, commits=7)
    (handover,) = formed(output)
    assert handover.members[0] == "a" and "y" in handover.members and "b" not in handover.members
    assert kinds_of(output, "a") == ["world", "news"] and not any(isinstance(one, Released) for one in output)
    output = all_come(machine, handover.members, 2.0, commits=8)
    (last,) = formed(output)
    assert set(last.members) == set("yz"[:most])
    assert [set(one.members) for one in output if isinstance(one, Released)] == [set("ab"[:most])]


def test_the_state_is_handed_over_again_when_the_one_that_has_it_dies():
    machine = job_of("abc")
    machine.retire(["a", "b", "c"], 1.0)
    all_come(machine, "xy")
    assert formed(all_come(machine, "abc", 2.0, commits=7))[0].members == ["a", "x", "y"]
    machine.lose("a", "killed", 3.0)
    assert formed(all_come(machine, "xy", 4.0))[0].members == ["b", "x", "y"]


def test_a_handover_is_no_further_reset():
    machine = job_of("abc", LIMITS._replace(reset_limit=1))
    machine.retire(["a", "b", "c"], 1.0)
    all_come(machine, "xy")
    members = formed(all_come(machine, "abc", 2.0, commits=7))[0].members
    assert formed(all_come(machine, members, 3.0, commits=8))[0].generation == 3


def test_a_retired_process_that_waits_beside_a_generation_is_released_at_once():
    machine = job_of("ab", LIMITS._replace(most=2, first=2))
    machine.come("c", arrival(), 1.0)
    machine.come("d", arrival(commits=5), 1.0)
    assert formed(all_come(machine, "ab", 2.0)) == [Formed(2, ["d", "a"], 2)]
    assert machine.retire(["b", "c"], 3.0) == [Released(["b"])]  # c was in no generation, as its launcher knows


# --- the state --------------------------------------------------------------------------------------------------------


def lost_states(output):
    return [one for one in output if isinstance(one, StateLost)]


def all_ask(machine, members, generation, commits=0, now_s=9.0):
    return [one for member in members for one in machine.ready(member, generation, commits, True, now_s)]


def are_in_doubt(output):
    return {one.message["may_have_lost_state"] for one in output if isinstance(one, Tell) and "size" in one.message}


def test_the_loss_of_the_state_is_reported_once_and_told_to_the_ranks():
    machine = Generations(LIMITS)
    assert are_in_doubt(all_come(machine, "abc")) == {False}
    machine.committed("a")
    for member in "abc":
        machine.lose(member, "killed", 1.0)
    assert are_in_doubt(all_come(machine, "de", 2.0)) == {True}
    output = all_ask(machine, "de", 2)
    assert lost_states(output) == [StateLost(2, 0)]
    verdicts = [one.message for one in output if isinstance(one, Tell) and one.message["kind"] == "verdict"]
    assert verdicts == [{"kind": "verdict", "commits": 0}] * 2
    machine.lose("d", "killed", 3.0)
    machine.come("f", arrival(), 4.0)
    assert are_in_doubt(machine.come("e", arrival(), 4.0)) == {False}  # nobody has made a commit since


def test_the_state_is_lost_too_when_only_a_newcomer_survives():
    machine = job_of("abc", LIMITS._replace(least=1))
    machine.committed("b")
    machine.come("d", arrival(), 1.0)
    all_come(machine, "abc", 2.0, commits=5)
    for member in "abc":
        machine.lose(member, "killed", 3.0)
    assert are_in_doubt(machine.come("d", arrival(), 4.0)) == {True}
    assert lost_states(all_ask(machine, "d", 3)) == [StateLost(3, 0)]


def test_a_rank_that_asks_for_the_state_hears_when_another_one_is_lost():
    machine = after_the_loss_of_all()
    all_come(machine, "def", 2.0)
    all_come(machine, "de", 2.0)
    assert not all_ask(machine, "d", 3)
    assert kinds_of(machine.lose("f", "killed", 3.0), "d") == ["lost", "again"]
    assert kinds_of(all_ask(machine, "e", 3), "e") == ["again"]
    assert are_in_doubt(all_come(machine, "de", 4.0)) == {True}


def test_a_rank_that_does_not_train_is_stuck_when_the_others_ask_for_the_state():
    machine = after_the_loss_of_all()
    all_come(machine, "de", 2.0, patience_s=30.0)
    all_join(machine, "de", 2)
    all_ask(machine, "d", 2, now_s=2.0)
    stuck = {one.member: second for second in range(2, 40) for one in machine.tick(second) if isinstance(one, Stuck)}
    assert stuck == {"e": 33}


def test_no_state_is_lost_where_none_was_or_one_is_left():
    machine = job_of("abc")
    for member in "abc":
        machine.lose(member, "killed", 1.0)
    assert are_in_doubt(all_come(machine, "def", 2.0)) == {False}
    machine.committed("e")
    machine.lose("d", "killed", 3.0)
    assert are_in_doubt(all_come(machine, "ef", 4.0, commits=1)) == {False}


def test_training_that_goes_on_from_a_file_is_told_apart():
    machine = after_the_loss_of_all()
    strict = Arrival("h", 1, 0, 600.0, must_keep_state=True)
    machine.come("d", strict, 2.0)
    machine.come("e", strict, 2.0)
    assert lost_states([*all_ask(machine, "d", 2, 40), *all_ask(machine, "e", 2)]) == [StateLost(2, 40)]


def test_a_state_that_was_read_from_a_file_is_no_survivor_when_its_generation_breaks():
    machine = after_the_loss_of_all()
    all_come(machine, "de", 2.0)
    machine.come("f", arrival(), 2.0)
    machine.lose("d", "killed", 3.0)
    assert are_in_doubt(machine.come("e", arrival(commits=40), 4.0)) == {True}
    assert lost_states([*all_ask(machine, "e", 3, 40), *all_ask(machine, "f", 3, 40)]) == [StateLost(3, 40)]


def test_a_job_that_must_keep_its_state_fails_without_it():
    machine = after_the_loss_of_all()
    strict = Arrival("h", 1, 0, 600.0, must_keep_state=True)
    machine.come("d", strict, 2.0)
    machine.come("e", strict, 2.0)
    output = all_ask(machine, "de", 2)
    (failed,) = [one for one in output if isinstance(one, Failed)]
    assert "on_state_lost=fail" in failed.text and not lost_states(output)
    assert kinds_of(output, "d") == kinds_of(output, "e") == ["failed"]


def test_a_newcomer_does_not_train_anew_what_others_have_completed():
    machine = job_of("ab")
    all_come(machine, "c")
    machine.committed("a")
    machine.done("a", 1.0)
    machine.done("b", 1.0)
    output = machine.come("c", arrival(), 2.0)
    assert kinds_of(output, "c") == ["over"] and not formed(output)


# --- who is waited for ------------------------------------------------------------------------------------------------


def test_too_few_processes_are_reported_while_they_are_waited_for():
    machine = job_of("abc")
    for member in "ab":
        machine.lose(member, "killed", 1.0)
    machine.come("c", arrival(), 1.0)
    reports = [one for tenth in range(1, 200) for one in machine.tick(1 + tenth / 10) if isinstance(one, Waiting)]
    assert [round(one.seconds) for one in reports] == [5, 10]
    assert reports[0][2:] == ("processes", (), (), ("c",), 1)


def test_a_process_that_is_stopped_in_init_is_named_and_then_stuck():
    machine = job_of("abc")
    for member in "ab":
        machine.say(member, 1, 0, 0.0)
    stuck_at = 0.0
    for tenth in range(1, 320):
        for member in "ab":
            machine.answer(member, tenth / 10)
        output = machine.tick(tenth / 10)
        if any(isinstance(one, Waiting) for one in output):
            (report,) = [one for one in output if isinstance(one, Waiting)]
            assert report[2:5] == ("init", ("c",), ("c",))
        if Stuck("c") in output:
            stuck_at = tenth / 10
    assert 30.0 < stuck_at < 30.3


def test_a_process_that_is_stopped_while_ranks_connect_is_stuck_and_one_that_answers_is_not():
    machine = job_of("abc")
    all_join(machine, "a", 1)
    stuck = []
    for tenth in range(600):
        machine.answer("b", tenth / 10)
        stuck += [one.member for one in machine.tick(tenth / 10) if isinstance(one, Stuck)]
    assert stuck == ["c"]


def test_a_rank_whose_word_does_not_come_is_stuck_when_its_patience_is_over():
    machine = job_of("abc", patience_s=30.0)
    for member in "ab":
        machine.say(member, 1, 0, 0.0)
    stuck = {}
    for second in range(40):
        machine.answer("c", float(second))
        stuck |= {one.member: second for one in machine.tick(float(second)) if isinstance(one, Stuck)}
    assert stuck == {"c": 31}


def test_a_newcomer_that_keeps_the_others_from_training_is_named_and_told():
    machine = job_of("abc")
    all_join(machine, "abc", 1)
    for member in "ab":
        machine.ready(member, 1, 0, False, 0.0)
    reports, told = [], 0
    for second in range(30):
        machine.answer("c", float(second))
        output = machine.tick(float(second))
        reports += [one for one in output if isinstance(one, Waiting)]
        told += kinds_of(output, "c").count("awaited")
        assert not any(isinstance(one, Stuck) for one in output)
    assert [one[2:5] for one in reports] == [("train", ("c",), ())] * len(reports)
    assert [round(one.seconds) for one in reports] == [5, 10, 20] and told == 3
    machine.ready("c", 1, 0, False, 30.0)
    assert waits(machine, 60, 30.0) == []


def test_seconds_are_lost_until_all_are_ready_to_train():
    machine = job_of("abc")
    for member in "abc":
        machine.ready(member, 1, 0, False, 0.0)
    machine.lose("a", "killed", 10.0)
    all_come(machine, "bc", 10.5)
    machine.ready("b", 2, 0, False, 10.6)
    machine.tick(12.0)
    assert machine.summary().seconds_lost == 2.0  # until now
    output = machine.ready("c", 2, 0, False, 13.0)
    assert machine.summary().seconds_lost == 3.0
    assert [one.message["seconds_lost"] for one in output if isinstance(one, Tell)] == [3.0, 3.0]
    # nobody trains in a generation that ends before all are ready
    machine.come("d", arrival(), 20.0)
    all_come(machine, "bc", 20.0)
    machine.ready("b", 3, 0, False, 20.1)
    machine.lose("d", "killed", 21.0)
    all_come(machine, "bc", 21.5)
    machine.ready("b", 4, 0, False, 21.5)
    machine.ready("c", 4, 0, False, 22.0)
    assert machine.summary().seconds_lost == 5.0


class Simulated:
    """Processes that do anything in any order, and the promises that each may rely on."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        most = self.random.randint(2, 5)
        self.limits = Limits(self.random.randint(1, most), self.random.randint(1, min(3, most)), most, 1e9)
        self.machine = Generations(self.limits)
        self.places = {}  # member -> "waiting", "at work", "saying"
        self.generation_of = {}
        self.commits = {}
        self.retired = set()
        self.asking = set()  # in a generation that may have lost the state
        self.is_ending = False
        self.now_s = 0.0
        self.next = 0

    def take(self, output):
        for one in output:
            if isinstance(one, Formed):
                self.require_good(one)
            elif isinstance(one, Tell):
                self.hear(one.member, one.message)
            elif isinstance(one, Released):
                assert set(one.members) <= self.retired
                for member in one.members:
                    assert self.places.pop(member) == "waiting"
                    self.take(self.machine.lose(member, "told to end", self.now_s))
            elif isinstance(one, StateLost):
                assert not any(self.commits[member] for member in self.places)
            else:
                assert isinstance(one, Left | Done | Waiting), one

    def hear(self, member, message):
        kind = message["kind"]
        assert member in self.places, (member, message)
        if kind == "world":
            assert self.places[member] == "waiting"
            self.places[member], self.generation_of[member] = "at work", message["generation"]
            self.asking -= {member}
            if message["may_have_lost_state"]:
                self.asking.add(member)
        elif kind in ("heard", "again", "verdict"):
            assert self.places[member] == "saying"
            self.places[member] = "at work"
            self.asking -= set() if kind == "heard" else {member}
            if kind == "again":
                self.come(member)
        elif kind == "over":
            assert self.places.pop(member) == "waiting" and self.is_ending
        else:
            assert kind in ("news", "lost", "begun", "ping")

    def require_good(self, formed):
        is_handover = bool(self.retired & set(formed.members))
        assert formed.size == len(formed.members) == len(set(formed.members)) <= self.limits.most
        enough = self.limits.first if formed.generation == 1 else self.limits.least
        assert formed.size >= (1 if self.is_ending else enough)
        assert set(formed.members) <= set(self.places)
        if not self.is_ending:  # then some are about to hear that it is over
            newest = max(self.commits.get(member, 0) for member in self.places)
            assert max(self.commits[member] for member in formed.members) == newest
            assert is_handover or self.commits[formed.members[0]] == newest
        assert all(self.generation_of.get(member) == formed.generation for member in formed.members)

    def come(self, member):
        self.places[member] = "waiting"
        self.take(self.machine.come(member, arrival(self.commits[member]), self.now_s))

    def start(self):
        member, self.next = f"m{self.next}", self.next + 1
        self.commits[member] = 0
        self.come(member)

    def retire(self):
        """Some hosts are named, among them perhaps some that were not."""
        self.retired = {member for member in self.generation_of if self.random.random() < 0.4}
        self.take(self.machine.retire(self.retired, self.now_s))

    def step(self):
        self.now_s += 0.01
        at_work = [member for member, place in self.places.items() if place == "at work"]
        member = self.random.choice(list(self.places)) if self.places else None
        what = self.random.random()
        if what < 0.15 or member is None:
            self.start()
        elif what < 0.25:
            del self.places[member]
            self.take(self.machine.lose(member, "killed", self.now_s))
        elif what < 0.26 and at_work:
            member = self.random.choice(at_work)
            del self.places[member]
            self.is_ending = True
            self.take(self.machine.done(member, self.now_s))
        elif what < 0.28:
            self.take(self.machine.hosts_changed(self.now_s))
        elif what < 0.33:
            self.retire()
        elif what < 0.4:
            self.take(self.machine.tick(self.now_s))
        elif at_work:
            self.work(self.random.choice(at_work))

    def work(self, member):
        what = self.random.random()
        if what < 0.4:
            if self.random.random() < 0.5:
                self.commits[member] += 1
                self.machine.committed(member)
            self.come(member)
        elif what < 0.6:
            self.machine.joined(member, self.generation_of[member], self.now_s)
            commits, is_asking = self.commits[member], member in self.asking
            if is_asking:
                self.places[member] = "saying"
            self.take(self.machine.ready(member, self.generation_of[member], commits, is_asking, self.now_s))
        else:
            self.places[member] = "saying"
            self.take(self.machine.say(member, self.generation_of[member], 0, self.now_s))

    def require_progress(self):
        """When all that live come, the next generation is formed, or there are too few for it."""
        for member in [member for member, place in self.places.items() if place == "at work"]:
            if self.places.get(member) == "at work":
                self.places[member] = "saying"
                self.take(self.machine.say(member, self.generation_of[member], 0, self.now_s))
        enough = 1 if self.is_ending else max(self.limits.first, self.limits.least)
        waiting = [member for member, place in self.places.items() if place == "waiting"]
        assert len(waiting) < enough or any(place != "waiting" for place in self.places.values()), self.places


@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_orders_keep_every_promise(part):
    for seed in range(1000 * part, 1000 * part + 1000):
        simulated = Simulated(seed)
        try:
            for _ in range(60):
                simulated.step()
            simulated.require_progress()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
