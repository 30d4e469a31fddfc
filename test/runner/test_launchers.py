"""Launchers are recognised by the environment of their ranks, and a world of another size is refused."""

from __future__ import annotations

import pytest

from ringtrain.job import launched_by
from ringtrain.job.launched_by import Launch

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h1",
    "MASTER_PORT": "29500",
}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
OURS = {
    "RINGTRAIN_RANK": "3",
    "RINGTRAIN_SIZE": "4",
    "RINGTRAIN_LOCAL_RANK": "1",
    "RINGTRAIN_LOCAL_SIZE": "2",
}
# Hydra and Open MPI start one daemon per node with srun, whose step the ranks inherit
DAEMON_STEP = {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "OMPI_MCA_btl": "self"}, None),
        (OPEN_MPI, Launch("Open MPI", 3, 4, 1, 2)),
        ({**DAEMON_STEP, **OPEN_MPI}, Launch("Open MPI", 3, 4, 1, 2)),
        (HYDRA, Launch("Hydra (MPICH or Intel MPI)", 3, 4, 1, 2)),
        ({**DAEMON_STEP, **HYDRA}, Launch("Hydra (MPICH or Intel MPI)", 3, 4, 1, 2)),
        (SLURM_STEP, Launch("Slurm", 5, 7, 1, 3)),
        ({**SLURM_STEP, "PMI_RANK": "5", "PMI_SIZE": "7"}, Launch("Slurm", 5, 7, 1, 3)),
        ({**SLURM_STEP, "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, Launch("Slurm", 5, 7, 1, 3)),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-host-1@1"}, Launch("PMIx", 1, None, None, None)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("PMI", 1, 2, None, None)),
        (OURS, Launch("ringrun", 3, 4, 1, 2)),
        # each in an allocation, or in the shell of another job
        ({**SLURM_STEP, **OPEN_MPI, **OURS}, Launch("ringrun", 3, 4, 1, 2)),
        (TORCHRUN, Launch("torchrun", 3, 4, 1, 2)),
        ({**DAEMON_STEP, **TORCHRUN}, Launch("torchrun", 3, 4, 1, 2)),
        (BY_HAND, Launch("MASTER_ADDR and RANK", 3, 4, None, None)),
        ({**BY_HAND, "MASTER_PORT": ""}, None),
        ({**BY_HAND, **OPEN_MPI}, Launch("Open MPI", 3, 4, 1, 2)),
    ],
)
def test_each_launcher_is_read_from_its_variables(environ: dict[str, str], expected: Launch | None) -> None:
    assert launched_by.detect(environ) == expected


def test_an_allocation_without_a_step_is_no_rank() -> None:
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert launched_by.detect(batch_script) is None


@pytest.mark.parametrize("service_step", [0xFFFFFFFA, 0xFFFFFFFB])
def test_the_shell_of_an_allocation_is_no_rank(service_step: int) -> None:
    shell = {**SLURM_STEP, "SLURM_STEP_ID": str(service_step), "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert launched_by.detect(shell) is None


@pytest.mark.parametrize("launch", [None, Launch("Open MPI", 0, 4, 0, 4), Launch("PMIx", 0, None, None, None)])
def test_a_world_of_the_launched_size_is_accepted(launch: Launch | None) -> None:
    launched_by.require_world(launch, 4, "MPICH 5.0.2")


def test_a_world_of_another_size_is_refused_with_the_way_out() -> None:
    library = "MPICH Version:      5.0.2\nMPICH Release date: today\n"
    with pytest.raises(RuntimeError) as caught:
        launched_by.require_world(Launch("Open MPI", 2, 4, 2, 4), 1, library)
    message = str(caught.value)
    assert "Open MPI started 4 ranks" in message
    assert "MPICH Version:      5.0.2, whose world has 1 rank:" in message
    assert "mpirun" in message and "`ringrun -np 4 python ...`" in message
    assert "Release date" not in message and "\n" not in message


def test_the_mpirun_beside_python_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(RuntimeError, match=str(tmp_path / "bin" / "mpirun")):
        launched_by.require_world(Launch("Open MPI", 0, 2, 0, 2), 1, "MPICH 5.0.2")


def test_under_srun_the_remedy_is_its_own_flag() -> None:
    with pytest.raises(RuntimeError) as caught:
        launched_by.require_world(Launch("Slurm", 0, 2, 0, 2), 1, "Open MPI v5.0.11, package: Open MPI")
    message = str(caught.value)
    assert "Slurm started 2 ranks, but mpi4py found Open MPI v5.0.11, whose world has 1 rank: " in message
    assert "`srun --mpi=pmix` for Open MPI and Intel MPI, `srun --mpi=pmi2` for MPICH" in message
    assert "`ringrun --launcher srun -np 2 python ...`" in message and "mpirun" not in message


@pytest.mark.parametrize(
    ("launcher", "library", "expected"),
    [
        ("Open MPI", "Open MPI", False),
        ("Open MPI", "MPICH", True),
        ("Open MPI", "Intel MPI", True),
        ("Hydra (MPICH or Intel MPI)", "Open MPI", True),
        ("Hydra (MPICH or Intel MPI)", "MPICH", False),
        ("Hydra (MPICH or Intel MPI)", "Intel MPI", False),
        ("Slurm", "Open MPI", False),
        ("PMIx", "MPICH", False),
    ],
)
def test_a_launcher_of_another_mpi_is_known_before_mpi_starts(launcher: str, library: str, expected: bool) -> None:
    assert launched_by.is_of_another_mpi(Launch(launcher, 0, 2, 0, 2), library) is expected
