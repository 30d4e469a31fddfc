"""What runs a command on another host: ssh, or what the launchers are told to use in its place."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

# Who is to be used instead of ssh, if anybody: ringrun's own variable, and those of the launchers.
_AGENTS = (
    "RINGTRAIN_SSH_AGENT",
    *("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)


def remote_shell(environment: Mapping[str, str], options: Sequence[str], own_options: Sequence[str] = ()) -> list[str]:
    """The words before the name of a host, which a command for its shell follows.

    `own_options` are for ssh alone, `options` for whatever is used.
    """
    agent = next((environment[name] for name in _AGENTS if name in environment), None)
    if agent is not None:
        return [*shlex.split(agent), *options]
    # never a question for a password, which nobody would see
    return ["ssh", "-oBatchMode=yes", "-oConnectTimeout=10", *own_options, *options]
