"""The doctor's topics are plain data, its findings follow from that data alone."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from harness import gpu_double

from ringtrain import doctor
from ringtrain.job import launched_by
from ringtrain.job.host import cgroup_quota, physical_cores
from ringtrain.job.launched_by import Launch
from ringtrain.options import table

ROOT = str(Path(doctor.__file__).parents[1])
TIMEOUT_S = 120

HEALTHY: dict[str, Any] = {
    "ringtrain": {"version": "1.0", "path": "/v/_core.so", "simd": "avx2", "error": None},
    "launcher": Launch("Open MPI", 0, 4, 0, 4)._asdict(),
    "network": {
        "network": "mpi",
        "reason": "Open MPI has started this process",
        "over_mpi": True,
        "of_ringrun": None,
        "error": None,
    },
    "mpi": {
        "library": "Open MPI",
        "version": "5.0.11",
        "path": "/v/lib/libmpi.so.40",
        "standard": "3.1",
        "handle_bytes": 8,
        "thread_level": "multiple",
        "ulfm": True,
        "cuda_aware": False,
        "mpi4py": "4.1.2",
        "mpirun": "/v/bin/mpirun",
        "error": None,
    },
    "topology": {
        "size": 4,
        "nodes": [
            {
                "host": "h1",
                "ranks": [0, 1, 2, 3],
                "cpus": 8,
                "gpus": ["GPU-a", "GPU-b", "GPU-c", None],
                "visible_gpus": 3,
            }
        ],
    },
    "cpu": {"machine": "x86_64", "cpus": 8, "quota_cpus": None},
    "shared_memory": {"path": "/dev/shm", "size_mb": 1000, "free_mb": 900, "error": None},
    "cuda": {
        "driver": "12.8",
        "gpus": [{"name": "H200", "uuid": uuid} for uuid in ("GPU-a", "GPU-b", "GPU-c")],
        "visible": None,
        "error": None,
    },
    "nccl": {
        "version": "2.27.3",
        "path": "/v/libnccl.so.2",
        "origin": "package",
        "packages": [{"name": "nvidia-nccl-cu12", "path": "/v/libnccl.so.2", "cuda": 12}],
        "error": None,
    },
    "packages": {
        "numpy": {"version": "2.4.6", "path": "/v/numpy"},
        "ml_dtypes": {"version": "0.6.0", "path": "/v/ml_dtypes"},
        "torch": {"version": "2.9.0", "path": "/v/torch"},
        "mxnet": None,
    },
}


CUDA_13 = [{"name": "nvidia-nccl-cu13", "path": "/v/libnccl.so.2", "cuda": 13}]


def changed(topic: str, **values: Any) -> dict[str, Any]:
    report = copy.deepcopy(HEALTHY)
    report[topic].update(values)
    return report


def test_a_healthy_report_has_no_findings() -> None:
    assert doctor.judge(HEALTHY) == []
    alone = {**HEALTHY, "launcher": None, "topology": None}
    assert doctor.judge(alone) == []


@pytest.mark.parametrize(
    ("topic", "values", "level", "what", "remedy"),
    [
        ("ringtrain", {"error": "no _core"}, "error", "no _core", "install"),
        ("mpi", {"error": "no libmpi", "remedy": "get one"}, "error", "no libmpi", "get one"),
        ("network", {"error": "nobody is there"}, "error", "do not meet: nobody is there", "RINGTRAIN_RENDEZVOUS"),
        ("mpi", {"thread_level": "single"}, "error", "thread level single", "mpi4py.rc.thread_level"),
        ("mpi", {"mpirun": None}, "warning", "no mpirun of Open MPI", "PATH"),
        ("mpi", {"library": "MPICH"}, "error", "mpi4py uses MPICH 5.0.11", "start with /v/bin/mpirun"),
        ("launcher", {"size": 3}, "error", "started 3 ranks", "ringrun -np 3"),
        ("cpu", {"quota_cpus": 1.5}, "warning", "4 ranks of h1 share 1.5 CPUs", "fewer ranks"),
        ("cpu", {"cpus": 1}, "warning", "bound to one CPU", "--bind-to none"),
        ("shared_memory", {"error": "Read-only file system"}, "warning", "Read-only", "RINGTRAIN_SHARED_MEMORY=off"),
        ("shared_memory", {"free_mb": 60}, "warning", "only 60 MB free", "--shm-size"),
        ("cuda", {"error": "cuInit answers error 999"}, "warning", "error 999", "nvidia-smi"),
        ("cuda", {"driver": "11.2"}, "warning", "speaks CUDA 11.2", "update the driver"),
        ("nccl", {"version": None, "error": "too old"}, "warning", "no NCCL: too old", "nvidia-nccl-cu12"),
        ("nccl", {"version": None, "packages": CUDA_13}, "warning", "this one speaks CUDA 12.8", "nvidia-nccl-cu12"),
        ("packages", {"torch": None}, "note", "arrays on a GPU", "cupy-cuda12x"),
        ("packages", {"numpy": None}, "error", "NumPy", "pip install numpy"),
        ("packages", {"mxnet": {"version": "1.9.1", "path": "/v"}}, "warning", "mxnet 1.9.1", "numpy<1.24"),
        ("packages", {"ml_dtypes": None}, "note", "bfloat16", "ml_dtypes"),
    ],
)
def test_each_trouble_is_found_with_its_remedy(
    topic: str, values: dict[str, Any], level: str, what: str, remedy: str
) -> None:
    (finding,) = doctor.judge(changed(topic, **values))
    assert finding.level == level
    assert what in finding.what and remedy in finding.remedy


def test_a_user_who_needs_no_mpi_is_not_asked_to_install_one() -> None:
    report = changed("mpi", error="mpi4py is not installed", remedy="install it")
    of_sockets = {"network": "sockets", "reason": "mpi4py is not installed", "over_mpi": False, "error": None}
    report["network"] = {**of_sockets, "of_ringrun": None}
    assert doctor.judge(report) == []
    alone = {**of_sockets, "network": "none", "of_ringrun": {"network": "mpi", "reason": "network=mpi"}}
    (finding,) = doctor.judge({**report, "network": alone, "launcher": None, "topology": None})
    assert finding.level == "error" and finding.what == "mpi4py is not installed"


def test_without_gpus_nobody_is_asked_to_install_nccl() -> None:
    report = changed("cuda", driver=None, gpus=[])
    report["nccl"].update(version=None, path=None, origin=None, packages=[], error="no libnccl.so.2")
    assert doctor.judge(report) == []


@pytest.mark.parametrize(
    ("used", "visible", "level", "what"),
    [
        (["GPU-a", "GPU-b", "GPU-a", "GPU-b"], 4, "warning", "ranks 0, 2 of h1 would share GPU-a, although they see 4"),
        (["GPU-a", "GPU-b", "GPU-a", "GPU-b"], 2, "note", "ranks 0, 2 of h1 would share GPU-a"),
    ],
)
def test_ranks_that_share_a_gpu_are_told(used: list[str], visible: int, level: str, what: str) -> None:
    report = copy.deepcopy(HEALTHY)
    report["topology"]["nodes"][0].update(gpus=used, visible_gpus=visible)
    (finding,) = doctor.judge(report)
    assert finding.level == level and finding.what.startswith(what)


def test_the_worst_finding_comes_first() -> None:
    report = changed("packages", ml_dtypes=None)
    report["shared_memory"]["free_mb"] = 1
    report["ringtrain"]["error"] = "no _core"
    assert [finding.level for finding in doctor.judge(report)] == ["error", "warning", "note"]


def test_the_table_is_aligned_and_holds_every_finding() -> None:
    report = changed("shared_memory", free_mb=60)
    report["findings"] = [finding._asdict() for finding in doctor.judge(report)]
    lines = doctor.as_table(report).splitlines()
    width = len("ml_dtypes")
    assert all(line[width : width + 2] == "  " and line[width + 2] != " " for line in lines if line)
    assert any(line.startswith("MPI        Open MPI 5.0.11, /v/lib/libmpi.so.40") for line in lines)
    assert any(line.startswith("warning") and "60 MB" in line for line in lines)
    assert "nothing is wrong" in doctor.as_table({**HEALTHY, "findings": []})


# --- topics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "own_cgroup", "expected"),
    [
        ({}, "0::/\n", None),
        ({"cpu.max": "150000 100000"}, "0::/\n", 1.5),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"cpu.max": "400000 100000", "a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, "0::/a/b\n", 0.5),
        ({"cpu.max": "200000 100000"}, "0::/path/of/the/host\n", 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/\n0::/\n", None),
        (
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
            "4:memory:/x\n3:cpuset:/\n2:cpu,cpuacct:/job\n0::/\n",
            3.0,
        ),
    ],
)
def test_the_tightest_cpu_quota_counts(
    tmp_path: Path, files: dict[str, str], own_cgroup: str, expected: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cgroup_quota(str(tmp_path), own_cgroup) == expected


def test_cores_are_at_most_the_cpus() -> None:
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))


def test_shared_memory_is_measured_or_its_error_said(tmp_path: Path) -> None:
    usable = doctor.shared_memory(str(tmp_path))
    assert usable["error"] is None and usable["size_mb"] >= usable["free_mb"] >= 0
    missing = doctor.shared_memory(str(tmp_path / "missing"))
    assert missing["error"] == "No such file or directory" and missing["free_mb"] is None


def test_packages_are_found_without_importing_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "heavyweight").mkdir()
    (tmp_path / "heavyweight" / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    (tmp_path / "heavyweight_gpu-1.2.dist-info").mkdir()
    (tmp_path / "heavyweight_gpu-1.2.dist-info" / "METADATA").write_text("Name: heavyweight-gpu\nVersion: 1.2\n")
    (tmp_path / "heavyweight_gpu-1.2.dist-info" / "top_level.txt").write_text("heavyweight\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.packages(["heavyweight", "no_such_package"]) == {
        "heavyweight": {"version": "1.2", "path": str(tmp_path / "heavyweight")},
        "no_such_package": None,
    }


def test_packages_are_found_where_python_does_not_know_whose_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # as in Python 3.10, which looks for top_level.txt alone; NumPy has none
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)
    (tmp_path / "homemade").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = doctor.packages(["numpy", "homemade"])
    assert found["numpy"]["version"] == numpy.__version__
    assert found["homemade"] == {"version": None, "path": str(tmp_path / "homemade")}


@pytest.mark.parametrize("numpy_version", [None, "2.4.6"])
def test_a_package_of_unknown_version_is_shown_and_not_judged(numpy_version: str | None) -> None:
    report = changed("packages", numpy={"version": numpy_version, "path": "/v/numpy"})
    report["packages"]["mxnet"] = {"version": "1.9.1", "path": "/v/mxnet"}
    report["findings"] = [finding._asdict() for finding in doctor.judge(report)]
    assert len(report["findings"]) == (0 if numpy_version is None else 1)
    lines = doctor.as_table(report).splitlines()
    assert f"numpy      {numpy_version or 'version unknown'}, /v/numpy" in lines


# --- the command itself -----------------------------------------------------------------------------------------------


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": ROOT, **variables},
    )


needs_mpi = pytest.mark.skipif(
    launched_by.detect() is not None, reason="a launcher cannot be started by a rank of another one"
)


@needs_mpi
def test_the_json_is_the_data_and_the_exit_code_says_whether_there_is_an_error() -> None:
    result = run("ringtrain.doctor", "--json")
    report = json.loads(result.stdout)
    assert set(report) == {*HEALTHY, "findings"}
    assert report["launcher"] is None and report["topology"] is None
    assert report["mpi"]["error"] is None and report["mpi"]["thread_level"] == "multiple"
    assert report["mpi"]["handle_bytes"] == (8 if report["mpi"]["library"] == "Open MPI" else 4)
    assert result.returncode == int(any(finding["level"] == "error" for finding in report["findings"]))


@needs_mpi
@pytest.mark.usefixtures("network")
def test_under_a_launcher_only_rank_0_prints_and_knows_the_topology() -> None:
    result = run("ringtrain.run", "-np", "2", "--no-prefix-output", "python", "-m", "ringtrain.doctor", "--json")
    report = json.loads(result.stdout)
    assert (report["launcher"]["rank"], report["launcher"]["size"]) == (0, 2)
    assert report["topology"]["size"] == 2
    assert [node["ranks"] for node in report["topology"]["nodes"]] == [[0, 1]]


# --- on the fake driver -----------------------------------------------------------------------------------------------


def on_the_double(*words: str, more: Mapping[str, str] = {}, **settings: object) -> subprocess.CompletedProcess[str]:
    variables = gpu_double.environment(**settings)
    gpu_double.prepare(variables)
    return run(*words, **{**variables, **more})


@needs_mpi
def test_the_gpus_their_driver_and_nccl_are_shown() -> None:
    lines = on_the_double("ringtrain.doctor", gpus=2, driver_version=12080).stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("CUDA")]
    assert lines[at].endswith("driver for CUDA 12.8, 2 GPUs")
    uuids = [
        re.fullmatch(rf" +GPU {number}: Double of a GPU, (GPU-[0-9a-f-]+)", lines[at + 1 + number]) for number in (0, 1)
    ]
    assert uuids[0] and uuids[1] and uuids[0][1] != uuids[1][1]
    assert lines[at + 3].startswith("NCCL") and lines[at + 3].endswith("/libnccl.so.2, found by the loader")
    assert lines[at + 3].split()[1] == "2.27.3,"


@needs_mpi
def test_the_doctor_shows_the_driver_of_the_core() -> None:
    report = json.loads(on_the_double("ringtrain.doctor", "--json", more={"CUDA_VISIBLE_DEVICES": "2,0"}).stdout)
    code = "from ringtrain import _core; print([_core.gpu_uuid(device) for device in range(_core.gpu_count())])"
    variables = {**os.environ, **gpu_double.environment(), "PYTHONPATH": ROOT, "CUDA_VISIBLE_DEVICES": "2,0"}
    uuids = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert str([gpu["uuid"] for gpu in report["cuda"]["gpus"]]) == uuids.stdout.strip()
    assert report["cuda"]["visible"] == "2,0"


@needs_mpi
@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"driver_version": 11020}, "speaks CUDA 11.2"),
        ({"nccl_version": 21705}, "NCCL 2.17.5"),
        ({"fail": "cuInit:*:999"}, "cuInit answers error 999"),
    ],
)
def test_unusable_gpus_and_libraries_are_reported(settings: dict[str, object], what: str) -> None:
    report = json.loads(on_the_double("ringtrain.doctor", "--json", **settings).stdout)
    assert sum(what in finding["what"] for finding in report["findings"]) == 1


@needs_mpi
@pytest.mark.parametrize(("per_rank", "shared"), [("1", 0), ("2", 1)])
def test_under_a_launcher_ranks_that_would_share_a_gpu_are_told(per_rank: str, shared: int) -> None:
    words = ("ringtrain.run", "-np", "3", "--no-prefix-output", "--gpus-per-rank", per_rank)
    report = json.loads(on_the_double(*words, "python", "-m", "ringtrain.doctor", "--json").stdout)
    assert sum("share GPU-" in finding["what"] for finding in report["findings"]) == shared


def choices(ranks: str, **options: str) -> dict[str, list[tuple[int, str]]]:
    """By operation: from which size on, which algorithm."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RINGTRAIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "ringtrain.doctor", "--algorithms", ranks, "--json"],
        env={
            **environment,
            "PYTHONPATH": ROOT,
            **{f"RINGTRAIN_{name.upper()}": text for name, text in options.items()},
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    found: dict[str, list[tuple[int, str]]] = {}
    for row in json.loads(done.stdout):
        found.setdefault(row["operation"], []).append((row["from_bytes"], row["algorithm"]))
    return found


def test_the_algorithms_of_one_host_are_those_of_shared_memory_unless_an_option_turns_it_off() -> None:
    assert [size for size, _ in choices("4")["allreduce"]] == [0, 16 * 1024 + 1]
    assert all("shared memory" in algorithm for rows in choices("4").values() for _, algorithm in rows)
    off = choices("4", shared_memory="off", ring_from_kb="7")
    assert off["allreduce"] == [(0, "recursive doubling"), (7 * 1024, "ring")]
    assert off["broadcast"] == [(0, "binomial tree"), (4 * 8 * 1024, "chain")]
    assert choices("1") == {}


def test_the_algorithms_of_several_hosts_depend_on_the_ranks_of_each() -> None:
    alone = choices("1,1")
    assert alone["allgather"] == [(0, "recursive doubling"), (79 * 1024, "ring")]
    assert alone["reducescatter"] == [(0, "recursive halving"), (86 * 1024, "ring")]
    even, uneven = choices("2,2"), choices("2,1")
    assert even["allgather"][1] == (128 * 1024, "shared memory in each host; between hosts: ring")
    assert even["reducescatter"][0] == (0, "shared memory in each host; between hosts: recursive halving")
    assert uneven["allgather"][1] == (64 * 1024, "ring")
    assert [size for size, _ in even["alltoall"]] == [0, 16 * 1024] and len(uneven["alltoall"]) == 1
    assert even["allreduce"][-1] == (
        1024 * 1024,
        "shared memory in each host, and at the same time a ring between hosts",
    )
    forced = choices("2,2", allreduce_algorithm="ring", wire_format="bf16")
    exchange = "each rank gets its slice of all others, and sends its sum to all"
    assert forced["allreduce"] == [(0, f"{exchange}; sums of float32 travel as bfloat16")]
    by_ranks = choices("2,2", reduction_order="ranks")
    assert by_ranks["allreduce"] == by_ranks["reducescatter"] == [(0, exchange)]
    assert by_ranks["allgather"] == even["allgather"]
    assert choices("8,8", cross_algorithm="mpi")["allreduce"][-1][1].endswith(
        "that of MPI; a ring for what MPI cannot reduce"
    )


def test_under_a_launcher_the_algorithms_are_those_of_the_job() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ringtrain.run", "-np", "3", "--network", "sockets"),
            *(sys.executable, "-m", "ringtrain.doctor", "--algorithms"),
        ],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith("3 ranks on 1 host: 3") and done.stdout.count("ranks on") == 1


def test_the_table_of_one_rank_says_that_it_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--algorithms=1"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "1 rank on 1 host: 1",
        "one rank has nothing to send: every operation is a copy",
    ]


def test_the_table_of_a_thousand_ranks_has_predicted_times_and_connections(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--algorithms", "--ranks", "1024"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1024 ranks on 1024 hosts: one on each"
    rows = {line[:8].strip(): line[8:].split() for line in lines if line[:8].strip().endswith("KiB")}
    assert rows["256 KiB"][0] == "float32" and float(rows["256 KiB"][1]) > 0
    settings = table.resolve({})
    for row in doctor.predictions([1] * 1024, settings):
        for kind in ("float32", "float16"):
            assert row[kind]["connections"] <= 20 and row[kind]["seconds"] > 0
    assert doctor.predictions([4], settings) == []  # shared memory


def test_a_number_of_ranks_needs_the_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--ranks", "3"], ["--algorithms=2,2", "--ranks", "3"], ["--algorithms", "--ranks", "0"]):
        with pytest.raises(SystemExit):
            doctor.main(words)
    assert "is not a number of ranks from 1 to" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0", "2,", "-1", "two"])
def test_numbers_of_ranks_that_are_none_are_refused(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main([f"--algorithms={ranks}"])
    assert "is not the number of ranks of each host, such as 4 or 8,8" in capsys.readouterr().err
