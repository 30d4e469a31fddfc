"""Who belongs to each generation of an elastic job, without any process."""

import random

import pytest

from ringtrain.job.rendezvous import generations
from ringtrain.job.rendezvous.generations import Arrival, Done, Drop, Failed, Formed, Generations, Left, Limits, Tell

LIMITS = Limits(first=3, least=2, most=4, timeout_s=600.0)


def arrival(commits=0, host="h", patience_s=600.0):
    return Arrival(host, 1, commits, patience_s)


def kinds_of(output, member):
    return [one.message["kind"] for one in output if isinstance(one, Tell) and one.member == member]


def formed(output):
    return [one for one in output if isinstance(one, Formed)]


def all_come(machine, members, now_s=0.0, **more):
    return [one for member in members for one in machine.come(member, arrival(**more), now_s)]


def test_the_first_generation_waits_for_as_many_as_were_started():
    machine = Generations(LIMITS)
    assert not formed(all_come(machine, "ab"))
    output = all_come(machine, "c")
    assert formed(output) == [Formed(1, ["a", "b", "c"], 3)]
    assert [kinds_of(output, member) for member in "abc"] == [["world"]] * 3


def test_a_generation_ends_when_all_that_live_have_come():
    machine = Generations(LIMITS)
    all_come(machine, "abc")
    output = machine.lose("b", "killed", 1.0)
    assert Left("b", "killed") in output and kinds_of(output, "a") == kinds_of(output, "c") == ["lost"]
    assert not formed(machine.come("c", arrival(), 1.1))
    assert formed(machine.come("a", arrival(), 1.5)) == [Formed(2, ["a", "c"], 2)]
    assert machine.summary() == (2, 0.5, [("b", "killed")])


def test_rank_0_has_the_newest_commit_and_the_others_keep_their_order():
    machine = Generations(LIMITS._replace(first=4))
    all_come(machine, "abcd")
    for member, commits in zip("abcd", (7, 8, 7, 8), strict=True):
        output = machine.come(member, arrival(commits), 1.0)
    assert formed(output)[0].members == ["b", "d", "a", "c"]


def test_ranks_of_a_host_are_beside_each_other():
    machine = Generations(LIMITS._replace(first=4))
    for member, host in zip("abcd", "xyxy", strict=True):
        output = machine.come(member, arrival(host=host), 0.0)
    assert formed(output)[0].members == ["a", "c", "b", "d"]


def test_a_newcomer_waits_until_the_others_have_heard_of_it():
    machine = Generations(LIMITS)
    all_come(machine, "abc")
    output = machine.come("d", arrival(), 1.0)
    assert [kinds_of(output, member) for member in "abcd"] == [["news"]] * 3 + [[]]
    assert not any(isinstance(one, Tell) for one in machine.tick(2.0))  # once is enough
    assert formed(all_come(machine, "abc", commits=1)) == [Formed(2, ["a", "b", "c", "d"], 4)]


def test_who_finds_no_room_stays_as_a_spare_and_goes_in_when_one_is_lost():
    machine = Generations(LIMITS._replace(first=4, most=4))
    all_come(machine, "abcd")
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
    machine = Generations(LIMITS)
    all_come(machine, "abc")
    output = machine.retire(["b"], 1.0)
    assert [kinds_of(output, member) for member in "abc"] == [["news"]] * 3
    assert formed(all_come(machine, "abc")) == [Formed(2, ["a", "c"], 2)]
    assert kinds_of(machine.tick(2.0), "b") == []
    assert kinds_of(machine.done("a", 3.0), "b") == ["over"]


def test_what_all_say_is_answered_in_the_order_of_the_ranks():
    machine = Generations(LIMITS)
    all_come(machine, "abc")
    assert not machine.say("c", 1, "of c", 0.0)
    assert not machine.say("a", 1, "of a", 0.0)
    output = machine.say("b", 1, "of b", 0.0)
    assert output == [Tell(member, {"kind": "heard", "values": ["of a", "of b", "of c"]}) for member in "abc"]


@pytest.mark.parametrize("how", ["lose", "come", "done"])
def test_who_says_something_in_a_broken_generation_is_told_to_come_again(how):
    machine = Generations(LIMITS)
    all_come(machine, "abc")
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
    machine = Generations(LIMITS._replace(timeout_s=5.0))
    all_come(machine, "abc")
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
    machine = Generations(LIMITS._replace(least=1, reset_limit=1))
    all_come(machine, "abc")
    machine.lose("a", "killed", 1.0)
    assert formed(all_come(machine, "bc"))
    machine.lose("b", "killed", 1.0)
    (failed,) = [one for one in machine.come("c", arrival(), 2.0) if isinstance(one, Failed)]
    assert "another generation 1 times" in failed.text


def test_nobody_is_let_in_after_the_first_is_done():
    machine = Generations(LIMITS._replace(first=4))
    all_come(machine, "abcd")
    all_come(machine, "e")
    output = machine.done("a", 1.0)
    assert output[0] == Done("a") and kinds_of(output, "e") == ["over"]
    assert kinds_of(machine.come("f", arrival(), 1.0), "f") == ["over"]
    # those who are left still end what they have begun, also fewer than the least
    machine.lose("b", "killed", 1.0)
    machine.done("c", 1.0)
    assert formed(machine.come("d", arrival(3), 1.0)) == [Formed(2, ["d"], 1)]


def test_a_silent_process_that_all_wait_for_is_stuck():
    machine = Generations(LIMITS)
    all_come(machine, "abc")
    machine.lose("a", "killed", 0.0)
    machine.come("b", arrival(), 0.0)
    assert kinds_of(machine.tick(1.0), "c") == ["ping"]
    assert generations.Stuck("c") not in machine.tick(9.9)
    assert generations.Stuck("c") in machine.tick(10.1)
    assert not any(isinstance(one, Drop) for one in machine.tick(20.0))
    output = machine.tick(20.2)
    assert Drop("c") in output and any(isinstance(one, Left) and one.member == "c" for one in output)


def test_a_process_that_answers_is_waited_for_as_long_as_it_wants():
    machine = Generations(LIMITS)
    all_come(machine, "abc", patience_s=60.0)
    machine.lose("a", "killed", 0.0)
    machine.come("b", arrival(), 0.0)
    for second in range(60):
        machine.answer("c", float(second))
        assert generations.Stuck("c") not in machine.tick(float(second))
    machine.answer("c", 61.0)
    assert generations.Stuck("c") in machine.tick(61.0)


class Simulated:
    """What processes may do, in any order, and what each of them may rely on."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.limits = Limits(self.random.randint(1, 4), self.random.randint(1, 3), self.random.randint(3, 5), 1e9)
        self.machine = Generations(self.limits)
        self.places = {}  # member -> "waiting", "at work", "saying"
        self.generation_of = {}
        self.commits = {}
        self.is_ending = False
        self.now_s = 0.0
        self.next = 0

    def take(self, output):
        for one in output:
            if isinstance(one, Formed):
                self.require_good(one)
            elif isinstance(one, Tell):
                self.hear(one.member, one.message)

    def hear(self, member, message):
        kind = message["kind"]
        assert member in self.places, (member, message)
        if kind == "world":
            assert self.places[member] == "waiting"
            self.places[member], self.generation_of[member] = "at work", message["generation"]
        elif kind in ("heard", "again"):
            assert self.places[member] == "saying"
            self.places[member] = "at work"
            if kind == "again":
                self.come(member)
        elif kind == "over":
            assert self.places.pop(member) == "waiting" and self.is_ending
        else:
            assert kind in ("news", "lost")

    def require_good(self, formed):
        assert formed.size == len(formed.members) == len(set(formed.members)) <= self.limits.most
        enough = self.limits.first if formed.generation == 1 else self.limits.least
        assert formed.size >= (1 if self.is_ending else enough) or formed.size == self.limits.most
        assert set(formed.members) <= set(self.places)
        newest = max(self.commits[member] for member, place in self.places.items())
        assert self.commits[formed.members[0]] == newest
        assert all(self.generation_of.get(member) == formed.generation for member in formed.members)

    def come(self, member):
        self.places[member] = "waiting"
        self.take(self.machine.come(member, arrival(self.commits[member]), self.now_s))

    def start(self):
        member, self.next = f"m{self.next}", self.next + 1
        self.commits[member] = 0
        self.come(member)

    def step(self):
        self.now_s += 0.01
        at_work = [member for member, place in self.places.items() if place == "at work"]
        member = self.random.choice(list(self.places)) if self.places else None
        what = self.random.random()
        if what < 0.15 or member is None:
            self.start()
        elif what < 0.3:
            del self.places[member]
            self.take(self.machine.lose(member, "killed", self.now_s))
        elif what < 0.31 and at_work:
            member = self.random.choice(at_work)
            del self.places[member]
            self.is_ending = True
            self.take(self.machine.done(member, self.now_s))
        elif what < 0.33:
            self.take(self.machine.hosts_changed(self.now_s))
        elif what < 0.4:
            self.take(self.machine.tick(self.now_s))
        elif at_work:
            member = self.random.choice(at_work)
            if what < 0.7:
                self.commits[member] += self.random.random() < 0.5
                self.come(member)
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
        for _ in range(60):
            try:
                simulated.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
        simulated.require_progress()
