"""`horovod.runner.common.util.env`: environment variables of ranks."""

from __future__ import annotations

import os

from ringtrain.job import launched_by
from ringtrain.runner.hosts import travelling

KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"
_REMOTE_SHELL_VARIABLE = "OMPI_MCA_plm_rsh_agent"


def is_exportable(v: str) -> bool:
    """Whether ringrun gives a variable of this name to ranks on other hosts."""
    return bool(travelling([v], ()))


def get_env_rank_and_size() -> tuple[int, int]:
    """The rank of this process and how many there are, as its launcher says; 0 and 1 without a launcher."""
    launch = launched_by.detect()
    if launch is not None:
        return launch.rank, launch.size or 1
    return int(os.environ.get("HOROVOD_RANK", "0")), int(os.environ.get("HOROVOD_SIZE", "1"))


def is_kubeflow_mpi() -> bool:
    """Whether an MPIJob of Kubeflow before version 2 started this process."""
    return os.environ.get(_REMOTE_SHELL_VARIABLE) == KUBEFLOW_MPI_EXEC
