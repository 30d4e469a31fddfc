"""What runs a command on another host: ssh, or what the launchers are told to use in its place."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Who is to be used instead of ssh, if anybody: ringrun's own variable, and those of the launchers.
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
