"""The simulation: what it has found stays mended, what is planted is found, and a seed tells one story."""

import functools
import re
from pathlib import Path

import pytest
from harness.compiling import DoubleUnavailable

from simulate import __main__ as command
from simulate.former import FORMER, program_of
from simulate.planted import PLANTED
from simulate.programs import NAMES, program

_KEPT = [line.split(maxsplit=2) for line in Path(__file__).with_name("kept.txt").read_text().splitlines()]
_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "inside" / "simulation.md").read_text()
_SEEDS_OF_PLANTED = 20_000
# The stories that a core tells in 20 s: always the same ones, so that a run that fails fails again. At its end .ci/run
# tells others, and prints what they find.
STORIES = {
    "negotiation": 20_000,
    "sockets": 12_000,
    "store": 16_000,
    "scheduler": 300,
    "diloco": 400,
    "elastic": 500,
}


def of_world(world, *more):
    """One process has all tests of a world, since it builds the programs of that one."""
    return pytest.param(world, *more, marks=pytest.mark.xdist_group(f"world {world}"))


WORLDS = list(map(of_world, NAMES))


def built(world, *patches):
    try:
        return program(world, patches)
    except DoubleUnavailable as reason:
        pytest.skip(str(reason))


def require_no_finding(findings):
    assert not findings, "\n".join(f"seed {one.seed}: {one.text}" for one in findings)


@pytest.mark.fast
@pytest.mark.alike
@pytest.mark.parametrize("world", WORLDS)
def test_a_second_of_stories_breaks_no_rule(world):
    findings, _ = built(world).run(range(STORIES[world] // 20))
    require_no_finding(findings)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_twenty_seconds_of_stories_break_no_rule(world):
    findings, _ = built(world).run(range(STORIES[world]))
    require_no_finding(findings)


@pytest.mark.parametrize(("world", "seed", "bug"), [of_world(*words) for words in _KEPT if words[0] != "#"])
def test_a_seed_that_once_found_a_bug_finds_none(world, seed, bug):
    findings, _ = built(world).run(range(int(seed), int(seed) + 1))
    require_no_finding(findings)


@pytest.mark.parametrize("world", WORLDS)
def test_a_seed_tells_the_same_story_each_time(world):
    _, first = built(world).run(range(100, 140))
    _, again = built(world).run(range(100, 140))
    assert (first.hash, first.events) == (again.hash, again.events)
    _, another = built(world).run(range(140, 150))
    assert another.hash != first.hash


def first_finding(program, bug):
    """The seed of docs/inside/simulation.md first. Then others, at first few: with some bugs a story takes 5 s."""
    told = re.findall(rf"^\| (\d+) \| {re.escape(bug)} \|$", _PAGE, re.MULTILINE)
    ranges = [range(int(seed), int(seed) + 1) for seed in told]
    first, end = 0, 10
    while first < _SEEDS_OF_PLANTED:
        ranges.append(range(first, end))
        first, end = end, min(2 * end, _SEEDS_OF_PLANTED)
    return next((findings[0] for findings, _ in map(program.run, ranges) if findings), None)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "bug"), [of_world(world, bug) for world in PLANTED for bug in PLANTED[world]])
def test_a_planted_bug_is_found(world, bug):
    assert first_finding(built(world, *PLANTED[world][bug]), bug) is not None


@pytest.mark.slow
@pytest.mark.parametrize("number", FORMER)
def test_a_bug_of_the_past_is_found_on_the_code_before_its_mend(number):
    try:
        world = program_of(FORMER[number])
    except DoubleUnavailable as reason:
        pytest.skip(str(reason))
    findings, _ = world.run(range(FORMER[number].seed, FORMER[number].seed + 1))
    assert findings


@pytest.mark.parametrize(
    ("world", "bug", "event"),
    [
        of_world("negotiation", "an evicted operation keeps its slot on rank 1", "begins round 1"),
        of_world("scheduler", "a request waits for worker 0, which is gone", "worker 0         says come role=worker"),
    ],
)
def test_a_finding_is_told_with_the_faults_that_it_needs(monkeypatch, capfd, world, bug, event):
    with_bug = built(world, *PLANTED[world][bug])
    seed = first_finding(with_bug, bug).seed
    monkeypatch.setattr(with_bug, "needed_faults", functools.cache(with_bug.needed_faults))
    monkeypatch.setattr(command, "program", lambda name: with_bug)
    assert command.main([world, "--seed", str(seed), "--trace"]) == 1
    printed = capfd.readouterr().out
    assert event in printed and "finding: " in printed
    told = [line for line in printed.splitlines() if re.match(r"fault \d+: ", line)]
    assert len(with_bug.needed_faults(seed)) == sum(not line.endswith(", left out") for line in told)
    assert command.main([world, "--seeds", f"{seed}:{seed + 1}"]) == 1
    assert f"seed {seed}: " in capfd.readouterr().out
