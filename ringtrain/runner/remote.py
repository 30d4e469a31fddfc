"""Commands that run another command on a host, and the variables of this one that go there."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

# Variables that name a program to use instead of ssh: ringrun's own, and those of the launchers.
_AGENTS = (
    "RINGTRAIN_SSH_AGENT",
    *("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)


class _BatchShell(NamedTuple):
    """How a batch system reaches the hosts of a job, where ssh is often forbidden and would escape its accounting.

    `variable` tells that this is such a job; `hydra` is Hydra's name of it.
    """

    variable: str
    words: tuple[str, ...]
    hydra: str


_BATCH_SHELLS = (_BatchShell("PE_HOSTFILE", ("qrsh", "-inherit"), "sge"), _BatchShell("LSB_JOBID", ("blaunch",), "lsf"))


def remote_shell(environment: Mapping[str, str], options: Sequence[str], own_options: Sequence[str] = ()) -> list[str]:
    """The words before the name of a host, which a command for its shell follows.

    `own_options` are for ssh alone, `options` for whatever is used but the batch system's, which knows none.
    """
    agent = next((environment[name] for name in _AGENTS if name in environment), None)
    if agent is not None:
        return [*shlex.split(agent), *options]
    of_batch_system = _batch_shell(environment)
    if of_batch_system is not None:
        return list(of_batch_system.words)
    # never a question for a password, which nobody would see
    return ["ssh", "-oBatchMode=yes", "-oConnectTimeout=10", *own_options, *options]


def agents_of_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which launchers of all MPIs reach the hosts as the batch system does; none where ssh is right."""
    if any(name in environment for name in _AGENTS):
        return {}
    of_batch_system = _batch_shell(environment)
    if of_batch_system is None:
        return {}
    line = shlex.join(of_batch_system.words)
    return {
        "PRTE_MCA_plm_ssh_agent": line,
        "OMPI_MCA_plm_rsh_agent": line,
        "HYDRA_LAUNCHER": of_batch_system.hydra,
        "I_MPI_HYDRA_BOOTSTRAP": of_batch_system.hydra,
    }


def _batch_shell(environment: Mapping[str, str]) -> _BatchShell | None:
    """That of the job in which this process runs, where it is installed."""
    for shell in _BATCH_SHELLS:
        if shell.variable in environment and shutil.which(shell.words[0], path=environment.get("PATH")) is not None:
            return shell
    return None


# --- variables --------------------------------------------------------------------------------------------------------


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
