"""Strangers without the secret, and ranks that lie, against the real code of the core under AddressSanitizer.

The programs are in test/engine/hostile/. Each prints the seed of the trial that has failed.
"""

import os
import subprocess
import time

import pytest
from harness.compiling import CORE, SANITIZED, program

pytestmark = pytest.mark.slow  # a minute goes to the compiler

_OWN = CORE.parent / "test" / "engine" / "hostile"
_WIRE = CORE.parent / "test" / "engine" / "simulation"
_FLAGS = [*SANITIZED["address"], f"-I{CORE}", f"-I{_WIRE}", f"-I{_OWN}"]
# They need shared memory, or MPI.
_NOT_NEEDED = ("shm_channel.cc", "mpi.cc")
# A frame that claims a length that no memory has is refused by what the allocator says.
_SETTINGS = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:exitcode=66"}


def run(*words, within_s=60):
    """The trial ends well, and says nothing of the sanitizers. Returns what it has printed."""
    of_core = [path for folder in ("base", "network", "coordination") for path in sorted((CORE / folder).glob("*.cc"))]
    of_core = [path for path in of_core if path.name not in _NOT_NEEDED]
    sources = [*sorted(_OWN.glob("*.cc")), _WIRE / "memory_wire.cc", *of_core]
    headers = [path for folder in (_OWN, _WIRE, CORE) for path in folder.rglob("*.h")]
    command = [str(program("hostile", _FLAGS, sources, headers)), *(str(word) for word in words)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=within_s, env={**os.environ, **_SETTINGS}, errors="replace"
    )
    assert ended.returncode == 0 and ended.stdout.endswith("well\n"), ended.stderr[-6000:]
    return ended.stdout


# ----------------------------------------------------------------------------------------------------------- strangers


def test_a_rank_is_dialled_until_all_its_addresses_have_failed():
    run("dialling", 0, 20_000)


@pytest.mark.parametrize(("ranks", "strangers"), [(300, 0), (2, 600)])
def test_more_connections_than_a_rank_answers_at_a_time_reach_it_all(ranks, strangers):
    run("dials", ranks, strangers)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("first", [0, 1], ids=["last", "first"])
def test_a_rank_with_one_bad_address_is_reached_by_the_other(first, streams):
    run("two-addresses", first, streams)


def test_a_rank_whose_descriptors_have_run_out_is_dialled_again():
    run("full-rank")


def test_a_rank_that_stops_in_the_middle_of_a_handshake_dials_again():
    run("late-proof")


def test_a_thread_may_open_and_close_descriptors_until_the_process_has_ended():
    run("exit")


# --------------------------------------------------------------------------------------------------- ranks that lie


def test_frames_that_nobody_expects_end_in_an_error_at_most():
    run("frames", 3, 1)


def test_frames_that_nobody_expects_end_in_an_error_at_most_for_20_seconds():
    run("frames", 20, time.time_ns() % 10**9, within_s=200)


def test_announcements_and_decisions_that_are_nonsense_end_in_an_error_that_names_the_rank():
    run("negotiation", 5000, 1)


def test_announcements_and_decisions_that_are_nonsense_end_in_an_error_that_names_the_rank_for_20_seconds():
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        run("negotiation", 10_000, time.time_ns() % 10**9, within_s=300)
