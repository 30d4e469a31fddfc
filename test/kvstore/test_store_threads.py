"""Workers and servers of a store as threads of one process, in which ThreadSanitizer looks for races."""

import os
import subprocess
from pathlib import Path

import pytest
from harness.compiling import store_program

pytestmark = pytest.mark.slow

_SOURCE = Path(__file__).resolve().parent / "threads" / "main.cc"


@pytest.mark.parametrize(("way", "threads"), [("shared", 2), ("tcp", 1), ("tcp", 2), ("tcp", 3)])
def test_threads_of_workers_and_servers_have_no_races(way, threads):
    # its own maps are at fixed places, which a kernel with more random bits takes for others
    command = ["setarch", os.uname().machine, "-R", str(store_program(_SOURCE, "thread")), way, str(threads)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"TSAN_OPTIONS": "exitcode=66"})
    assert ended.returncode == 0 and ended.stdout == "exact\n", ended.stderr[:6000]
