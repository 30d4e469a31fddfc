"""Which processes an elastic job should have, and where: without processes, and at times that the test chooses."""

from __future__ import annotations

import math
import random

import pytest

from ringtrain.runner.hosts import Host
from ringtrain.runner.start.elastic_starter import RESTARTS, WITHIN_S, Fleet


def fleet_on(hosts: list[Host], first: int, most: float = math.inf, **more: tuple[float, float]) -> Fleet:
    fleet = Fleet(first, most, **more)
    assert fleet.set_hosts(hosts) == ([], [])
    return fleet


def start(fleet: Fleet, now: float = 0.0) -> list[tuple[int, str]]:
    return [(process.number, process.host) for process in fleet.start(now)]


def fail(fleet: Fleet, number: int, now: float) -> bool:
    return fleet.ended(number, now, has_failed=True)


def test_the_job_begins_with_what_it_was_told_and_then_fills_the_slots() -> None:
    fleet = fleet_on([Host("h1", 2), Host("h2", 2)], first=3)
    assert start(fleet) == [(0, "h1"), (1, "h1"), (2, "h2")]
    assert start(fleet) == []
    fleet.begun()
    assert start(fleet) == [(3, "h2")]


def test_as_many_as_may_be_in_a_generation_wait_beside_it() -> None:
    fleet = fleet_on([Host("h1", 64)], first=2, most=3)
    assert len(start(fleet)) == 2
    fleet.begun()
    assert len(start(fleet)) == 4


def test_a_process_is_replaced_in_its_slot_by_one_with_a_new_number() -> None:
    fleet = fleet_on([Host("h1", 2), Host("h2", 1)], first=3)
    start(fleet)
    assert not fail(fleet, 0, 1.0)
    assert start(fleet, 1.0) == [(3, "h1")]
    assert sorted(process.number for process in fleet.running) == [1, 2, 3]


def test_a_slot_that_fails_again_and_again_costs_its_host_and_others_do_not_add_up() -> None:
    fleet = fleet_on([Host("h1", 4), Host("h2", 1)], first=5)
    start(fleet)
    # each of four slots once: nothing of it is again
    assert not any(fail(fleet, number, 1.0) for number in range(4))
    number = start(fleet, 1.0)[0][0]
    for restart in range(1, RESTARTS):
        assert not fail(fleet, number, 1.0 + restart)
        ((number, host),) = start(fleet, 1.0 + restart)
        assert host == "h1"
    assert fail(fleet, number, 1.0 + RESTARTS)
    assert start(fleet, 1e9) == [] and fleet.closed_for_s("h1", 4.0) == math.inf
    # those that still run there go on, but nobody takes their place
    assert fleet.most_from_now_on() == 4
    assert not fail(fleet, 6, 5.0)
    assert start(fleet, 1e9) == [] and fleet.most_from_now_on() == 3


def test_failures_that_are_long_ago_do_not_count() -> None:
    fleet = fleet_on([Host("h1", 1)], first=1)
    for turn in range(20):
        ((number, _),) = start(fleet, turn * WITHIN_S)
        assert not fail(fleet, number, turn * WITHIN_S)


def test_a_host_that_was_given_up_comes_back_after_a_time_that_doubles() -> None:
    fleet = fleet_on([Host("h1", 1)], first=1, cooldown_s=(10.0, 25.0))
    now = 0.0
    for pause in (10.0, 20.0, 25.0, 25.0):
        for _ in range(RESTARTS):
            ((number, _),) = start(fleet, now)
            assert not fail(fleet, number, now)
        ((number, _),) = start(fleet, now)
        assert fail(fleet, number, now) and fleet.closed_for_s("h1", now) == pause
        assert start(fleet, now + pause - 0.001) == [] and fleet.most_from_now_on() == 1
        now += pause
    assert len(start(fleet, now)) == 1


def test_a_lost_host_is_tried_again_after_a_pause_that_grows_and_then_given_up() -> None:
    fleet = fleet_on([Host("h1", 2), Host("h2", 1)], first=3)
    start(fleet)
    now = 0.0
    for pause in (1.0, 5.0, 15.0):
        assert not fleet.lost("h1", now) and fleet.most_from_now_on() == 3
        assert start(fleet, now + pause - 0.001) == []
        now += pause
        assert [host for _, host in start(fleet, now)] == ["h1", "h1"]
    assert fleet.lost("h1", now) and start(fleet, 1e9) == [] and fleet.most_from_now_on() == 1


def test_processes_of_hosts_and_slots_that_are_gone_leave_once_and_are_not_missed() -> None:
    fleet = fleet_on([Host("h1", 2), Host("h2", 2)], first=4)
    start(fleet)
    fleet.begun()
    assert [process.number for process in fleet.set_hosts([Host("h1", 1)]).leaving] == [1, 2, 3]
    assert fleet.set_hosts([Host("h1", 1)]) == ([], []) and not fleet.has("h2")
    assert start(fleet) == [] and fleet.most_from_now_on() == 1
    assert not any(fail(fleet, number, 1.0) for number in (1, 2, 3))
    assert [process.number for process in fleet.running] == [0]
    fleet.set_hosts([Host("h1", 1), Host("h3", 1)])
    assert start(fleet) == [(4, "h3")]


def test_a_slot_is_free_when_its_process_has_left_and_not_before() -> None:
    fleet = fleet_on([Host("h1", 2)], first=2)
    start(fleet)
    fleet.set_hosts([Host("h1", 1)])
    fleet.end(1)
    assert fleet.set_hosts([Host("h1", 2)]) == ([], [])
    assert start(fleet) == []
    assert not fail(fleet, 1, 1.0)
    assert start(fleet) == [(2, "h1")]


def test_processes_whose_host_is_named_again_stay_if_they_were_not_told_to_end() -> None:
    fleet = fleet_on([Host("h1", 3)], first=3)
    start(fleet)
    assert [process.number for process in fleet.set_hosts([]).leaving] == [0, 1, 2]
    fleet.end(1)
    assert [process.number for process in fleet.set_hosts([Host("h1", 3)]).staying] == [0, 2]
    assert start(fleet) == []
    assert not fail(fleet, 1, 1.0)
    assert start(fleet) == [(3, "h1")]
    # those that stayed fail as others do
    for restart in range(RESTARTS):
        number = max(process.number for process in fleet.running if process.slot == 0)
        assert not fail(fleet, number, 2.0 + restart)
        start(fleet, 2.0 + restart)
    assert fail(fleet, max(process.number for process in fleet.running if process.slot == 0), 9.0)


def test_a_host_that_was_away_begins_anew() -> None:
    fleet = fleet_on([Host("h1", 1)], first=1)
    for _ in range(RESTARTS + 1):
        ((number, _),) = start(fleet)
        is_given_up = fail(fleet, number, 0.0)
    assert is_given_up
    fleet.set_hosts([])
    fleet.set_hosts([Host("h1", 1)])
    assert len(start(fleet)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_slot_has_two_processes_and_no_number_comes_twice(seed: int) -> None:
    chance = random.Random(seed)
    names = ["h1", "h2", "h3"]
    fleet = Fleet(3, chance.choice([2.0, 4.0, math.inf]), chance.choice([None, (1.0, 8.0)]))
    slots: dict[str, int] = {}
    seen: set[int] = set()
    limit = 3.0
    for step in range(500):
        now = step * 0.5
        what = chance.random()
        if what < 0.1:
            slots = {name: chance.randint(1, 3) for name in names if chance.random() < 0.8}
            fleet.set_hosts([Host(*item) for item in slots.items()])
        elif what < 0.12 and fleet.running:
            fleet.end(chance.choice(fleet.running).number)
        elif what < 0.15 and slots:
            fleet.lost(chance.choice(sorted(slots)), now)
        elif what < 0.5 and fleet.running:
            fleet.ended(chance.choice(fleet.running).number, now, chance.random() < 0.5)
        elif what < 0.52:
            fleet.begun()
            limit = math.inf
        running_before = {process.number for process in fleet.running}
        started = fleet.start(now)
        assert not {process.number for process in started} & seen
        seen |= {process.number for process in started}
        assert {process.number for process in fleet.running} == running_before | {one.number for one in started}
        taken = [(process.host, process.slot) for process in fleet.running]
        assert len(set(taken)) == len(taken)
        assert all(process.slot < slots[process.host] for process in started)
        assert not started or len(started) <= limit
