"""A real Slurm: jobs of srun, salloc and sbatch on two hosts, their signals, their ends, and what is left of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.frameworks import need
from harness.hosts import HostsUnavailable
from harness.ringrun_job import ROOT, wait_until
from slurm import SlurmCluster, slurm_cluster
from test_ends import ENDS, SCRIPT
from test_run_inherited import SAVER

from ringtrain.runner import mpi_library

WHERE = """
import os
import numpy as np
import ringtrain as hvd
hvd.init()
print("rank", hvd.rank(), "of", hvd.size(), "on", os.uname().nodename, hvd.allreduce(np.ones(1), op=hvd.Sum)[0])
"""
# Until the file is there that the test makes.
LOOP = """
import os, sys, time
import numpy as np
import ringtrain as hvd
hvd.init()
print("ready", hvd.rank(), flush=True)
while not hvd.allreduce(np.array([os.path.exists(sys.argv[1])]), op=hvd.Max)[0]:
    time.sleep(0.05)
print("done", hvd.rank(), flush=True)
"""
SHARDED = """
import os
import ringtrain.jax as hvd
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

hvd.distributed.init()
rank, devices = jax.process_index(), jax.devices()
by_rank = NamedSharding(Mesh(np.array(devices), ("ranks",)), PartitionSpec("ranks"))
ones = jax.make_array_from_callback((len(devices),), by_rank, lambda part: np.ones(1, "f"))
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(by_rank.mesh, PartitionSpec()))(ones)
print("rank", rank, "of", len(devices), "on", os.uname().nodename, float(total))
"""
FAILS = "import ringtrain as hvd; hvd.init(); assert hvd.rank() != 3, 'three'"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    try:
        with slurm_cluster(2) as cluster:
            yield cluster
    except HostsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def process_manager() -> str:
    """Returns the value of srun's --mpi for the MPI of these tests."""
    try:
        library = mpi_library.probe()["library"]
    except mpi_library.MpiNotFound as reason:
        pytest.skip(str(reason))
    return {"Open MPI": "pmix", "Intel MPI": "pmix"}.get(library, "pmi2")


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: SlurmCluster) -> Iterator[None]:
    yield
    end = time.monotonic() + 10
    while left := cluster.jobs_on(0) + cluster.jobs_on(1):
        assert time.monotonic() < end, left
        time.sleep(0.1)


# The network of these tests themselves is not that of the jobs.
VARIABLES = {
    "RINGTRAIN_NETWORK": "auto",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": ROOT,
}


def run(cluster: SlurmCluster, *words: str, **more: str) -> tuple[int, str]:
    done = cluster.run(*words, **{**VARIABLES, **more})
    return done.returncode, done.stdout


def lines_of_where(cluster: SlurmCluster) -> list[str]:
    """Returns what WHERE prints on four ranks, if srun and salloc fill the first host, which has four CPUs, last."""
    first, second = cluster.names
    return [f"rank {rank} of 4 on {first if rank < 3 else second} 4.0" for rank in range(4)]


def found_in(output: str) -> list[str]:
    return sorted(line[line.index("rank") :] for line in output.splitlines() if "rank" in line and " of " in line)


FOUR = ("-N", "2", "-n", "4")


@pytest.mark.fast
def test_srun_starts_ranks_of_the_mpi(cluster: SlurmCluster, process_manager: str) -> None:
    code, output = run(cluster, "srun", *FOUR, f"--mpi={process_manager}", sys.executable, "-c", WHERE)
    assert (code, found_in(output)) == (0, lines_of_where(cluster)), output
    assert "Sorry" not in output


def test_srun_starts_ranks_without_mpi(cluster: SlurmCluster) -> None:
    words = ("srun", *FOUR, "--mpi=none", sys.executable, "-c", WHERE)
    code, output = run(cluster, *words, RINGTRAIN_NETWORK="sockets")
    assert (code, found_in(output)) == (0, lines_of_where(cluster)), output


@pytest.mark.slow
def test_srun_starts_ranks_of_jaxs_own_sharding(cluster: SlurmCluster) -> None:
    need("jax")
    words = ("srun", *FOUR, "--mpi=none", sys.executable, "-c", SHARDED)
    code, output = run(cluster, *words, RINGTRAIN_NETWORK="sockets")
    assert (code, found_in(output)) == (0, lines_of_where(cluster)), output


@pytest.mark.slow
def test_pmix_without_munge_prints_nothing(cluster: SlurmCluster, process_manager: str) -> None:
    if process_manager != "pmix":
        pytest.skip("this MPI has no PMIx")
    words = ("env", "PMIX_SECURITY_MODE=munge,native", sys.executable, "-c", WHERE)
    code, output = run(cluster, "srun", *FOUR, "--mpi=pmix", *words)
    assert code == 0 and "Sorry" not in output, output


@pytest.mark.fast
def test_a_process_manager_that_does_not_fit_is_refused_with_the_one_that_does(
    cluster: SlurmCluster, process_manager: str
) -> None:
    wrong = "pmix" if process_manager == "pmi2" else "none"
    code, output = run(cluster, "srun", *FOUR, f"--mpi={wrong}", sys.executable, "-c", WHERE)
    assert code == 1 and f"`srun --mpi={process_manager}`" in output, output
    assert "`ringrun --launcher srun -np 4 python ...`" in output


@pytest.mark.fast
@pytest.mark.parametrize("launcher", ["auto", "srun"])
def test_ringrun_starts_a_rank_for_each_task_of_an_allocation(
    cluster: SlurmCluster, process_manager: str, launcher: str
) -> None:
    words = ("ringrun", "--launcher", launcher, "python", "-c", WHERE)
    code, output = run(cluster, "salloc", *FOUR, *words)
    assert (code, found_in(output)) == (0, lines_of_where(cluster)), output


@pytest.mark.parametrize(
    "words",
    [[], pytest.param(["--launcher", "srun"], marks=pytest.mark.slow), ["--network", "sockets"]],
    ids=" ".join,
)
def test_the_hosts_of_an_allocation_are_checked_without_ssh(
    cluster: SlurmCluster, process_manager: str, words: list[str]
) -> None:
    code, output = run(cluster, "salloc", *FOUR, "ringrun", *words, "--check")
    assert code == 0 and f"jobs on {', '.join(cluster.names)}\n" in output, output


@pytest.mark.slow
def test_a_batch_job_is_written_and_submitted(
    cluster: SlurmCluster, process_manager: str, request: pytest.FixtureRequest
) -> None:
    out = cluster.folder / "batch.txt"
    asked = ("--launcher", "slurm", "-np", "4", f"--mpi-args=--nodes=2 --wait --output={out}")
    code, shown = run(cluster, "ringrun", *asked, "--dry-run", "python", "train.py")
    lines = shown.splitlines()
    assert code == 0 and lines[0] == "#!/bin/bash" and lines[-1].endswith(" python train.py")
    assert lines[1:-1] == [
        f"#SBATCH {word}" for word in ("--job-name=train.py", "--ntasks=4", "--nodes=2", "--wait", f"--output={out}")
    ]

    code, output = run(cluster, "ringrun", *asked, "python", "-c", WHERE)
    assert (code, found_in(out.read_text())) == (0, lines_of_where(cluster)), output + out.read_text()


@pytest.mark.slow
def test_the_batch_script_of_the_page_runs_and_shares_out_the_processors(
    cluster: SlurmCluster, process_manager: str
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    (text,) = re.findall(r"^```sh\n(#!/bin/bash\n#SBATCH --job-name=train .*?)^```", page, re.DOTALL | re.MULTILINE)
    folder = cluster.folder / "page"
    folder.mkdir()
    (folder / "train.py").write_text(WHERE + "print('threads', os.environ['OMP_NUM_THREADS'])")
    for asked, here in (("--ntasks-per-node=4", "--ntasks-per-node=2"), ("--cpus-per-task=4", "--cpus-per-task=2")):
        assert asked in text
        text = text.replace(asked, here)  # each of these hosts has four processors
    (folder / "train.sh").write_text(text.replace("source .venv/bin/activate\n", ""))
    code, output = run(cluster, "sbatch", "--wait", f"--chdir={folder}", str(folder / "train.sh"))
    (printed,) = (path.read_text() for path in folder.glob("train-*.out"))
    hosts = [cluster.names[rank // 2] for rank in range(4)]
    assert (code, found_in(printed)) == (0, [f"rank {rank} of 4 on {host} 4.0" for rank, host in enumerate(hosts)])
    threads = os.cpu_count() or 1  # as many as the machine of these hosts has
    assert printed.count(f"threads {max(threads // 2, 1)}\n") == 4, output + printed


def test_a_batch_job_inside_a_batch_job_is_refused(cluster: SlurmCluster) -> None:
    code, output = run(cluster, "salloc", *FOUR, "ringrun", "--launcher", "slurm", "-np", "2", "python", "-c", WHERE)
    assert code == 2 and "--launcher slurm submits a batch job, but this is one already" in output


class Job:
    """LOOP, which runs until `finish`, `end_within` or somebody ends it."""

    def __init__(self, cluster: SlurmCluster, words: tuple[str, ...]):
        self._cluster = cluster
        self._stop = cluster.folder / f"stop-{time.monotonic_ns()}"
        self._printed = cluster.folder / f"printed-{time.monotonic_ns()}"
        with self._printed.open("wb") as file:
            self._process = subprocess.Popen(
                cluster.command([*words, "-c", LOOP, str(self._stop)]),
                env={**os.environ, **cluster.environment, **VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._wait_for(lambda: self.printed.count("ready") == 4)
        (self.number,) = cluster.run("squeue", "--noheader", "--format=%i").stdout.split()

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def scancel(self, *words: str) -> None:
        self._cluster.run("scancel", *words, self.number)

    def finish(self) -> int:
        self._stop.touch()
        return self.end_within(30)

    def end_within(self, seconds: float) -> int:
        try:
            return self._process.wait(seconds)
        finally:
            self._process.kill()
            self.scancel("--signal=KILL", "--full")

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not is_there():
            assert time.monotonic() < end and self._process.poll() is None, self.printed
            time.sleep(0.05)


BY_SRUN = ("salloc", *FOUR, "ringrun", "--launcher", "srun", "python")
BY_MPIRUN = ("salloc", *FOUR, "ringrun", "python")


@pytest.mark.slow
def test_the_signal_for_a_checkpoint_reaches_ranks_and_ends_none(cluster: SlurmCluster, process_manager: str) -> None:
    job = Job(cluster, BY_SRUN)
    job.scancel("--signal=USR1")
    end = time.monotonic() + 10
    while job.printed.count("the last operations of rank") < 4 and time.monotonic() < end:
        time.sleep(0.05)
    assert job.finish() == 0, job.printed
    assert job.printed.count("the last operations of rank") == 4 and job.printed.count("done") == 4


@pytest.mark.slow
@pytest.mark.parametrize("words", [BY_SRUN, BY_MPIRUN], ids=["srun", "mpirun"])
def test_a_cancelled_job_is_no_success_and_leaves_nothing(
    cluster: SlurmCluster, process_manager: str, words: tuple[str, ...]
) -> None:
    job = Job(cluster, words)
    job.scancel()
    assert job.end_within(20) != 0, job.printed
    assert "done" not in job.printed


@pytest.mark.parametrize("words", [BY_SRUN, BY_MPIRUN], ids=["srun", "mpirun"])
def test_a_host_that_is_lost_is_no_success(cluster: SlurmCluster, process_manager: str, words: tuple[str, ...]) -> None:
    job = Job(cluster, words)
    with cluster.lost_host(1):
        assert job.end_within(60) != 0, job.printed
    assert "done" not in job.printed and "ringrun: " in job.printed
    of_ringrun = "".join(line for line in job.printed.splitlines() if "ringrun: " in line)
    assert "got lost" in of_ringrun or f"from {cluster.names[1]} nothing was heard" in of_ringrun, job.printed


SAVED = r"^(PeerLostError|RemoteError|ShutDownError): .*rank 1\b"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "exits", "exits at once", "is killed"])
@pytest.mark.parametrize("launcher", [["ringrun", "--launcher", "srun"], ["srun", "--mpi=none"]], ids=" ".join)
def test_the_others_are_told_who_ended_and_save(cluster: SlurmCluster, launcher: list[str], how: str) -> None:
    end, folder = ENDS[how], cluster.folder / f"ends-{time.monotonic_ns()}"
    folder.mkdir()
    words = ["salloc", "--ntasks=3", *launcher, "python", "-c", SCRIPT.format(end=end.code), str(folder)]
    code, output = run(cluster, *words, RINGTRAIN_NETWORK="sockets")
    told = [path.read_text() for path in folder.iterdir()]
    assert len(told) == 2 and all(re.match(SAVED, one, re.DOTALL) for one in told), output
    assert code == end.exit_code or (launcher[0] == "srun" and code != 0), output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "ssh", "mpirun"])
def test_scancel_tells_ranks_once_and_leaves_them_their_time(
    cluster: SlurmCluster, process_manager: str, launcher: str
) -> None:
    (folder := cluster.folder / f"saved-{time.monotonic_ns()}").mkdir()
    network = "mpi" if launcher == "mpirun" else "sockets"
    line = ["ringrun", "-np", "2", "--network", network, "--launcher", launcher, "python", "-c", SAVER, str(folder)]
    script = folder.with_suffix(".sh")
    script.write_text(f"#!/bin/bash\nexec {shlex.join(line)}\n")
    options = ["--parsable", f"--output={folder}.out", "--ntasks=2", "--nodes=1"]
    (number,) = cluster.run("sbatch", *options, str(script), **VARIABLES).stdout.split()
    wait_until(lambda: [path.read_text() for path in folder.iterdir()] == ["ready\n"] * 2)
    cluster.run("scancel", number)
    wait_until(lambda: number not in cluster.run("squeue", "--noheader", "--format=%i").stdout.split())
    assert [path.read_text() for path in folder.iterdir()] == ["ready\ntold\nsaved\n"] * 2


# --- preemption -------------------------------------------------------------------------------------------------------

# Trains until it is told to end, and once more for some steps.
PREEMPTED = """
import os, sys, time
import numpy as np
import ringtrain as hvd
hvd.init()
file = sys.argv[1]
first = int(open(file).read()) if os.path.exists(file) else 0
hvd.preempted()
print("begins at", first, "as", hvd.rank(), flush=True)
for step in range(first, first + 5 if first else 1_000_000):
    hvd.allreduce(np.ones(3), name="gradient")
    time.sleep(0.01)
    if hvd.preempted():
        if hvd.rank() == 0:
            open(file, "w").write(str(step + 1))
        print("saves", step + 1, "as", hvd.rank(), flush=True)
        hvd.exit_preempted()
print("done", flush=True)
"""
BATCH = """#!/bin/bash
#SBATCH --requeue --open-mode=append --nodes=1 --ntasks=3
{line}
code=$?
echo ended with $code
if [ $code = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


class BatchJob:
    """PREEMPTED in a batch job, by the words of a launcher."""

    def __init__(self, cluster: SlurmCluster, *launcher: str):
        self._cluster = cluster
        path = cluster.folder / f"preempted-{time.monotonic_ns()}"
        self.checkpoint, self._out = path.with_suffix(".step"), path.with_suffix(".out")
        line = shlex.join([*launcher, "python", "-c", PREEMPTED, str(self.checkpoint)])
        path.with_suffix(".sh").write_text(BATCH.format(line=line))
        words = ["sbatch", "--parsable", f"--output={self._out}", str(path.with_suffix(".sh"))]
        (self.number,) = cluster.run(*words, **{**VARIABLES, "RINGTRAIN_NETWORK": "sockets"}).stdout.split()
        wait_until(lambda: self.printed.count("begins at 0") == 3)

    @property
    def printed(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def saved(self) -> list[str]:
        return re.findall(r"saves (\d+)", self.printed)

    def ends_once_more(self) -> bool:
        # Slurm waits for two minutes before it starts a job again, unless somebody changes that when it is queued.
        self._cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        return "ended with 0" in self.printed

    def end(self) -> None:
        self._cluster.run("scancel", "--signal=KILL", self.number)
        wait_until(lambda: self.number not in self._cluster.run("squeue", "--noheader", "--format=%i").stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [["ringrun", "--launcher", "srun"], ["srun", "--mpi=none"]], ids=" ".join)
def test_a_batch_job_that_is_told_to_end_saves_and_is_queued_again(cluster: SlurmCluster, launcher: list[str]) -> None:
    job = BatchJob(cluster, *launcher)
    try:
        cluster.run("scancel", "--signal=USR1", job.number)
        wait_until(lambda: "ended with" in job.printed)
        assert job.saved() == [job.checkpoint.read_text()] * 3 and "ended with 75" in job.printed, job.printed
        wait_until(job.ends_once_more)
        assert job.printed.count(f"begins at {job.saved()[0]}") == job.printed.count("done") == 3, job.printed
    finally:
        job.end()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "ssh"])
def test_ranks_of_a_job_that_is_cancelled_save_at_one_step(cluster: SlurmCluster, launcher: str) -> None:
    job = BatchJob(cluster, "exec", "ringrun", "--launcher", launcher)
    try:
        cluster.run("scancel", job.number)
        wait_until(lambda: len(job.saved()) == 3)
        assert job.saved() == [job.checkpoint.read_text()] * 3, job.printed
    finally:
        job.end()
