"""Engines of several ranks and threads, in which ThreadSanitizer looks for races."""

import os
import subprocess

import pytest
from harness.compiling import CORE, SANITIZED, program

pytestmark = pytest.mark.slow

_SOURCE = CORE.parent / "test" / "engine" / "threads" / "main.cc"
_FLAGS = [*SANITIZED["thread"], f"-I{CORE}"]
_FOLDERS = ("base", "kernels", "network", "gpu", "memory", "coordination", "record", "collectives", "runtime")


def test_a_handle_calls_each_callback_once_while_it_is_finished(tmp_path):
    run(tmp_path, "handles")


@pytest.mark.parametrize("how", range(5), ids=["well", "tuned", "failure", "loss", "shutdown"])
@pytest.mark.parametrize("way", ["sockets", "shared"])
def test_threads_of_engines_have_no_races(way, how, tmp_path):
    run(tmp_path, way, str(how))


def run(folder, *words):
    of_core = [path for name in _FOLDERS for path in sorted((CORE / name).rglob("*.cc"))]
    built = program("engine-threads", _FLAGS, [_SOURCE, *of_core], CORE.rglob("*.h"))
    # its own maps are at fixed places, which a kernel with more random bits takes for others
    command = ["setarch", os.uname().machine, "-R", str(built), *words]
    settings = {**os.environ, "TSAN_OPTIONS": "exitcode=66"}
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=settings)
    assert ended.returncode == 0 and ended.stdout == "well\n", ended.stderr[:6000]
