"""Random messages of a worker that knows the secret to a server of stores, under AddressSanitizer."""

import subprocess
import time
from pathlib import Path

import pytest
from harness.compiling import DoubleUnavailable, store_program

pytestmark = pytest.mark.alike

_SOURCE = Path(__file__).resolve().parent / "fuzz" / "main.cc"
_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "RINGTRAIN_LOG_LEVEL": "error",
}


def survives(seconds, seed, way):
    try:
        program = store_program(_SOURCE, "address")
    except DoubleUnavailable as error:
        pytest.skip(str(error))
    command = [str(program), str(seconds), str(seed), way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 90, env=_ENVIRONMENT)
    assert ended.returncode == 0, f"seed {seed}, {way}, ended with {ended.returncode}:\n{ended.stderr[-6000:]}"
    assert int(ended.stdout.split()[0]) > 100, ended.stdout


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_random_messages_of_a_worker_do_not_harm_a_server(way):
    survives(2, 1, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_random_messages_for_ten_seconds_do_not_harm_a_server(way):
    survives(10, time.time_ns() % 10**9, way)
