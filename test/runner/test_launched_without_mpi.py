"""Ranks that others than ringrun start, without an MPI: srun, torchrun, a shell, and who sets ringtrain's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.hosts import SimulatedHosts
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi
from harness.socket_ranks import free_port

from ringtrain.job import launched_by, network
from ringtrain.job.launched_by import Launch
from ringtrain.options import table

pytestmark = needs_mpi

TRAIN = """
import sys, numpy, ringtrain as hvd
from ringtrain.job import launched_by
hvd.init()
total = hvd.allreduce(numpy.arange(3.0) + hvd.rank(), op=hvd.Sum)
words = launched_by.detect().launcher, hvd.rank(), hvd.size(), hvd.local_rank(), total.tolist(), hvd.mpi_enabled()
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece: both ranks write to one pipe
"""

# The behaviour of Slurm's srun on one node, by its command line.
SRUN = """\
import os, subprocess, sys
words = sys.argv[1:]
options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
command = words[len(options):]
size = options["--ntasks"]
of_step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": size, "SLURM_NODEID": "0"}
of_step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": size, "SAW_MPI": options["--mpi"]}
tasks = [
    subprocess.Popen(command, env={**os.environ, **of_step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
    for rank in range(int(size))
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a user who has no secret yet."""
    (home := tmp_path / "home").mkdir()
    return {**os.environ, "PYTHONPATH": ROOT, "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}


@pytest.fixture
def train(tmp_path: Path) -> str:
    (script := tmp_path / "train.py").write_text(TRAIN)
    return str(script)


def expected(launcher: str, size: int = 2, local_ranks: list[int] | None = None) -> list[str]:
    total = [float(size * number + sum(range(size))) for number in range(3)]
    places = local_ranks or list(range(size))
    return [f"{launcher} {rank} {size} {places[rank]} {total} False" for rank in range(size)]


def run(words: list[str], environment: dict[str, str], **more: str) -> list[str]:
    done = subprocess.run(
        words, env={**environment, **more}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def run_together(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(words, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        for words, environment in zip(commands, environments, strict=True)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), printed
    return sorted(line for out, _ in printed for line in out.splitlines())


# --- srun -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def allocation(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a shell in an allocation of Slurm."""
    (folder := tmp_path / "bin").mkdir()
    (srun := folder / "srun").write_text(f"#!{sys.executable}\n{SRUN}")
    srun.chmod(0o755)
    of_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_CPUS_PER_NODE": "2"}
    return {
        **environment,
        **of_job,
        "PATH": f"{folder}{os.pathsep}{environment['PATH']}",
        "RINGTRAIN_NETWORK": "sockets",
    }


@pytest.mark.parametrize("starter", [["srun", "--ntasks=2", "--mpi=none"], ["ringrun", "--no-prefix-output"]])
def test_the_tasks_of_srun_meet(starter: list[str], allocation: dict[str, str], train: str) -> None:
    words = [sys.executable, "-m", "ringtrain.run", *starter[1:]] if starter[0] == "ringrun" else starter
    check = "import os, sys; assert os.environ['SAW_MPI'] == 'none'; exec(open(sys.argv[1]).read())"
    assert run([*words, sys.executable, "-c", check, train], allocation) == expected("Slurm")


def test_the_tasks_of_srun_use_sockets_where_mpi4py_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(launched_by.SlurmStep.NAME, 0, 2, 0, 2)
    assert network.choose(table.resolve({}), None, launch).network == "mpi"
    monkeypatch.setattr(network.importlib.util, "find_spec", lambda name: None)
    assert network.choose(table.resolve({}), None, launch) == (
        "sockets",
        "Slurm has started this process, and mpi4py is not installed",
    )


# --- torchrun ---------------------------------------------------------------------------------------------------------


def test_torchrun_needs_nothing_more(environment: dict[str, str], train: str) -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    assert run([*words, train], environment, OMP_NUM_THREADS="1") == expected("torchrun")


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_processes_of_a_shell_meet_beside_the_port_of_torch(
    environment: dict[str, str], train: str, tmp_path: Path
) -> None:
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environments = [{**environment, **own, "RANK": str(rank)} for rank in range(2)]
    assert run_together([[sys.executable, train]] * 2, environments) == expected("MASTER_ADDR and RANK")
    (secret,) = tmp_path.rglob("secret")
    assert secret.stat().st_mode & 0o777 == 0o600


def test_processes_of_two_hosts_meet_where_ringtrains_variables_say(
    two_hosts: SimulatedHosts, environment: dict[str, str], train: str, tmp_path: Path
) -> None:
    (secret := tmp_path / "secret").write_bytes(os.urandom(32))
    secret.chmod(0o600)
    own = {"RINGTRAIN_SIZE": "4", "RINGTRAIN_RENDEZVOUS": f"{two_hosts.names[0]}:29400"}
    own["RINGTRAIN_SECRET_FILE"] = str(secret)
    commands = [two_hosts.command_on(rank // 2, [sys.executable, train]) for rank in range(4)]
    environments = [{**environment, **own, "RINGTRAIN_RANK": str(rank)} for rank in range(4)]
    assert run_together(commands, environments) == expected("ringrun", 4, [0, 1, 0, 1])
