"""Workers and servers of a store as threads of one process, in which ThreadSanitizer looks for races."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.compiling import filled, folder_of, run_compiler

pytestmark = pytest.mark.slow

_SOURCE = Path(__file__).resolve().parent / "store_threads" / "main.cc"
_CORE = _SOURCE.parent.parent.parent / "csrc"
_FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-ffp-contract=off", "-fsanitize=thread", f"-I{_CORE}"]
_FOLDERS = ("base", "kernels", "network", "gpu", "kvstore")
# Memory that processes share, and the timeline, which knows operations of ranks, too.
_FILES = (
    "memory/shm.cc",
    "coordination/operation.cc",
    "runtime/handle.cc",
    "runtime/submission.cc",
    "runtime/timeline.cc",
    "runtime/current_timeline.cc",
)


def program():
    """Where it lies, compiled with all that a store needs."""
    of_core = [path for folder in _FOLDERS for path in sorted((_CORE / folder).glob("*.cc"))]
    sources = [_SOURCE, *of_core, *(_CORE / name for name in _FILES)]

    def build(folder):
        objects = [str(folder / f"{path.parent.name}-{path.stem}.o") for path in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            lines = [[*_FLAGS, "-c", str(path), "-o", out] for path, out in zip(sources, objects, strict=True)]
            list(pool.map(run_compiler, lines))
        run_compiler(["-fsanitize=thread", "-pthread", *objects, "-ldl", "-o", str(folder / "threads")])

    return filled(folder_of("storethreads", _FLAGS, [*sources, *sorted(_CORE.rglob("*.h"))]), build) / "threads"


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_threads_of_workers_and_servers_have_no_races(way):
    # its own maps are at fixed places, which a kernel with more random bits takes for others
    command = ["setarch", os.uname().machine, "-R", str(program()), way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"TSAN_OPTIONS": "exitcode=66"})
    assert ended.returncode == 0 and ended.stdout == "exact\n", ended.stderr[:6000]
