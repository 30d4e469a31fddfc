"""ringrun --bind: each rank has its share of the processors of its host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.ringrun_job import TIMEOUT_S, needs_mpi, on_each_network, ringrun

from ringtrain.runner.supervise.binding import cpus_of, threads


@pytest.fixture
def system(tmp_path: Path) -> str:
    """Two nodes of two cores of two threads: processor N and N + 4 are one core."""
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{cpu % 4 // 2}").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    "kind, ranks, expected",
    [
        ("core", 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        ("core", 4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        ("core", 3, [{0, 4}, {1, 5}, {2, 3, 6, 7}]),
        ("core", 8, [{core, core + 4} for core in range(4) for _ in range(2)]),
        ("numa", 1, [set(range(8))]),
        ("numa", 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        ("numa", 4, [{0, 1, 4, 5}] * 2 + [{2, 3, 6, 7}] * 2),
    ],
)
def test_whole_cores_and_nodes_are_shared_out(system: str, kind: str, ranks: int, expected: list[set[int]]) -> None:
    assert [cpus_of(kind, rank, ranks, set(range(8)), system) for rank in range(ranks)] == expected


def test_only_processors_that_the_job_may_use_are_shared_out(system: str) -> None:
    assert [cpus_of("core", rank, 2, {1, 2, 6}, system) for rank in range(2)] == [{1}, {2, 6}]


def test_a_kernel_without_a_topology_has_cores_of_one_processor_and_one_node(tmp_path: Path) -> None:
    assert [cpus_of("core", rank, 2, {4, 5}, str(tmp_path)) for rank in range(2)] == [{4}, {5}]
    assert cpus_of("numa", 1, 2, {4, 5}, str(tmp_path)) == {4, 5}


@needs_mpi
@on_each_network
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_ringrun_binds_its_ranks() -> None:
    words = ["python", "-c", "import os; print(*sorted(os.sched_getaffinity(0)))"]
    allowed = set(map(str, os.sched_getaffinity(0)))
    bound = [
        set(line.split())
        for line in ringrun("-np", "2", "--no-prefix-output", "--bind", "core", *words).stdout.splitlines()
    ]
    assert len(bound) == 2 and bound[0] | bound[1] == allowed and not bound[0] & bound[1]
    free = [set(line.split()) for line in ringrun("-np", "2", "--no-prefix-output", *words).stdout.splitlines()]
    assert free == [allowed] * 2


def test_two_binders_are_refused() -> None:
    done = ringrun("-np", "2", "--bind", "core", "--binding-args=--bind-to core", "true")
    assert done.returncode == 2 and "--bind core and --binding-args" in done.stderr


@needs_mpi
@on_each_network
def test_rank_0_reads_nothing_with_no_stdin() -> None:
    script = "import sys; print(repr(sys.stdin.read()))"
    words = ["-np", "2", "--no-prefix-output", "--no-stdin", "python", "-c", script]
    command = [sys.executable, "-m", "ringtrain.run", *words]
    done = subprocess.run(command, input="text", capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout == "''\n''\n"


def test_ranks_of_a_host_share_its_processors_among_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = [threads({"HOROVOD_LOCAL_SIZE": str(ranks)}) for ranks in (1, 2, 3, 16)]
    assert [those.get("OMP_NUM_THREADS") for those in found] == [None, "4", "2", "1"]
    assert threads({"HOROVOD_LOCAL_SIZE": "2", "OMP_NUM_THREADS": "7"}) == {}  # the user's own stays
