"""Single parts of the core, in small programs: test/engine/parts/."""

import subprocess

import pytest
from harness.compiling import CORE, SANITIZED, program

_OWN = CORE.parent / "test" / "engine" / "parts"


def run(name, sources):
    """Builds a program of these sources, in this order, and returns its exit code."""
    built = program(name, [*SANITIZED["address"], f"-I{CORE}"], sources, CORE.rglob("*.h"))
    return subprocess.run([str(built)], timeout=60).returncode


@pytest.mark.parametrize("comes_first", ["fork.cc", "the other source"])
def test_a_forked_child_leaves_resources_alone_in_whatever_order_the_core_is_linked(comes_first):
    sources = [CORE / "base" / "fork.cc", _OWN / "fork_order.cc"]
    assert run(f"fork-order-{comes_first[:4].strip()}", sources if comes_first == "fork.cc" else sources[::-1]) == 0


def test_a_frame_whose_rest_finds_no_memory_ends_its_connection_alone():
    of_network = [CORE / "network" / f"{name}.cc" for name in ("byte_stream", "frame_stream", "sealing")]
    sources = [*of_network, *sorted((CORE / "base").glob("*.cc")), _OWN / "no_memory.cc"]
    assert run("no-memory", sources) == 0
