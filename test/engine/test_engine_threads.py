"""Engines of several ranks and threads: ThreadSanitizer looks for races, and a wake-up that is lost is waited for."""

import os
import subprocess

import pytest
from harness.compiling import CORE, SANITIZED, program
from simulate.programs import Patch, patched_folders

pytestmark = pytest.mark.slow

_SOURCE = CORE.parent / "test" / "engine" / "threads" / "main.cc"
_WRAPPED = ("pthread_mutex_lock", "pthread_mutex_trylock", "pthread_mutex_unlock")
_LINKING = [f"-Wl,--wrap={name}" for name in _WRAPPED]
_FOLDERS = ("base", "kernels", "network", "gpu", "memory", "coordination", "record", "collectives", "runtime")
_ENDS = ["well", "tuned", "failure", "loss", "shutdown"]

_WORKPLACE = "runtime/workplace.cc"
# Threads that sleep look around now and then, which makes good for a wake-up that is lost. Not here.
_NOBODY_LOOKS_AROUND = [
    Patch(
        "runtime/workplace.h",
        "kLookAround_s = 0.2, kLookAroundInWait_s = 0.05;",
        "kLookAround_s = 1e3, kLookAroundInWait_s = 1e3;",
    ),
    Patch("runtime/engine.cc", "kLookAround_s = 0.2;", "kLookAround_s = 1e3;"),
    Patch("runtime/peer_watch.cc", "kLongestInterval_s = 0.02;", "kLongestInterval_s = 1e3;"),
]
# By the run that finds them.
_PLANTED = {
    "a thread keeps the turn while it waits": (
        ["shared", "0"],
        Patch("base/wait.cc", "      const Aside aside(watch);\n", ""),
    ),
    "a caller that has what it waited for calls no other one": (
        ["shared", "0"],
        Patch(_WORKPLACE, "if (!waiting_callers_.call_next() && is_left_with_work)", "if (is_left_with_work)"),
    ),
    "a caller that others have not come to does not ask to be called": (
        ["shared", "0"],
        Patch(_WORKPLACE, "    if (is_stuck()) be_called();\n", ""),
    ),
    "who comes last to a round calls nobody": (
        ["shared", "0"],
        Patch("coordination/shm_channel.cc", "== number && have_all_come())", "== number && false)"),
    ),
    "a caller keeps its place while it helps others": (
        ["shared", "0"],
        Patch(
            _WORKPLACE,
            "      let_go(true);\n      wait.neighbours->help(*this, wait);\n      wait.now = now_s();\n"
            "      if (!begin_work()) return;\n",
            "      wait.neighbours->help(*this, wait);\n      wait.now = now_s();\n",
        ),
    ),
    "the thread on the lookout does not look for work when it lies down": (
        ["alone"],
        Patch(_WORKPLACE, "const bool is_idle = !has_work();", "const bool is_idle = true;"),
    ),
}


_NETWORK_GROUP = "collectives/network/network_group.cc"
# Each makes the bits of a sum follow from what shares a plan.
_PLANTED_IN_SUMS = {
    "a plan chooses by its size": Patch(
        _NETWORK_GROUP,
        "return chooser_.summing(reduction, piece.count);",
        "return chooser_.summing(reduction, count_of(pieces));",
    ),
    "arrays are cut together": Patch(
        _NETWORK_GROUP, "if (has_owners(summing.order)) return reduce_by_owners(way, summing, reduction, pieces);\n", ""
    ),
    "an exchange adds up in the order of the ranks": Patch(
        "collectives/network/exchange.cc", "if (order_ == Order::tree)", "if (false)"
    ),
}


def test_a_handle_calls_each_callback_once_while_it_is_finished(tmp_path):
    run(checked(), tmp_path, "handles")


@pytest.mark.parametrize("how", range(5), ids=_ENDS)
@pytest.mark.parametrize("way", ["sockets", "shared"])
def test_threads_of_engines_have_no_races(way, how, tmp_path):
    run(checked(), tmp_path, way, str(how), "0")


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("words", [["alone"], ["sockets", "0"], ["shared", "0"]], ids="-".join)
def test_each_sleep_ends_by_a_wake_up(words, seed, tmp_path):
    run(plain(), tmp_path, *words, str(seed))


@pytest.mark.parametrize("seed", range(1, 4))
def test_sums_have_the_same_bits_in_stories_with_other_pauses(seed, tmp_path):
    run(plain(), tmp_path, "stories", str(seed))


@pytest.mark.parametrize("bug", _PLANTED)
def test_a_planted_bug_lets_a_thread_wait_without_end(bug, tmp_path):
    words, patch = _PLANTED[bug]
    built = plain(patch)
    for seed in range(1, 120):  # of which few seeds find a bug that needs callers and others at one moment
        if ended(built, tmp_path, *words, str(seed)).returncode != 0:
            return
    pytest.fail("nothing has found it")


@pytest.mark.parametrize("bug", _PLANTED_IN_SUMS)
def test_a_planted_bug_changes_the_bits_of_a_story(bug, tmp_path):
    built = plain(_PLANTED_IN_SUMS[bug])
    for seed in range(1, 20):
        if "other bits" in ended(built, tmp_path, "stories", str(seed)).stderr:
            return
    pytest.fail("nothing has found it")


def checked():
    return with_core([*SANITIZED["thread"], *_LINKING])


def plain(*bugs):
    flags = ["-std=c++17", "-O1", "-pthread", "-ffp-contract=off", *_LINKING]
    return with_core(flags, patched_folders(CORE, [*_NOBODY_LOOKS_AROUND, *bugs]))


def with_core(flags, patched=None):
    """A program of the core. `patched`: by the name of a file, the folder with the one that takes its place."""
    folders = patched or {}
    names = [str(path.relative_to(CORE)) for name in _FOLDERS for path in sorted((CORE / name).rglob("*.cc"))]
    of_core = [folders.get(name, CORE) / name for name in names]
    including = [*(f"-I{own}" for own in folders.values()), f"-I{CORE}"]
    return program("engine-threads", [*flags, *including], [_SOURCE, *of_core], CORE.rglob("*.h"))


def run(built, folder, *words):
    done = ended(built, folder, *words)
    assert done.returncode == 0 and done.stdout == "well\n", done.stderr[:6000]


def ended(built, folder, *words):
    # its own maps are at fixed places, which a kernel with more random bits takes for others
    command = ["setarch", os.uname().machine, "-R", str(built), *words]
    settings = {**os.environ, "TSAN_OPTIONS": "exitcode=66"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=settings)
