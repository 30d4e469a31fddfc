"""Which variables of ringrun's environment go to the ranks: all, as with horovodrun, but what belongs to this host."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

# Shell functions have names such as BASH_FUNC_module%%, which launchers cannot say.
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OF_THIS_HOST = re.compile(
    "|".join(
        [
            # the shell that ringrun was typed into
            *("OLDPWD", "SHLVL", "_", "BASH_FUNC_.*"),
            # Names, sockets and screens of this host: with this host's DISPLAY, matplotlib would look for a window.
            *("HOST", "HOSTNAME", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "SSH_.*"),
            *("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR", "XDG_SESSION_.*", "TMUX.*", "STY"),
            # Its GPUs. A batch system that has allotted others there says so itself.
            *(".*_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
            # what a launcher tells each rank, or its own daemons: it hands its parameters on by itself
            *("OMPI_.*", "PRTE_.*", "PMIX_.*", "PMI_.*", "PMI2_.*", "HYDRA_.*", "HYDI_.*", "MPI_LOCAL(RANKID|NRANKS)"),
            # Slurm's words about this task or step, in which frameworks would look for their rank; those of the job go
            *("SLURMD_.*", "SLURM_(STEP.*|PROCID|LOCALID|NODEID|TASK_PID|GTIDS|SRUN_.*|LAUNCH_NODE_.*|TOPOLOGY_.*)"),
            *("SLURM_(CPU|MEM)_BIND.*", "SLURM_(CPUS|GPUS)_ON_NODE", "SLURM_JOB_GPUS", "SLURM_PTY_.*"),
        ]
    )
)


def travelling(names: Iterable[str], exported: Collection[str]) -> list[str]:
    """Those that go to the ranks, in order; what the user has named in `exported` does in any case."""
    return sorted(
        name for name in names if name in exported or (_NAME.fullmatch(name) and not _OF_THIS_HOST.fullmatch(name))
    )
