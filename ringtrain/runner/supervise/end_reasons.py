"""Why a job ended: the sentences for where no rank failed first, and the prefix that they all get."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ringtrain.failure.ranks_in_words import list_of_ranks
from ringtrain.runner.job import Job
from ringtrain.runner.supervise.first_failure import Ends
from ringtrain.runner.supervise.names import RANKS, Names


def spoken(text: str, speaker: str = "ringrun") -> str:
    """`text` with the speaker's name before each line that is not indented, as quoted lines are."""
    return "\n".join(line if line.startswith(" ") else f"{speaker}: {line}" for line in text.splitlines())


def of_late_ranks(job: Job, missing: list[int], timeout_s: float, names: Names = RANKS) -> str:
    """For the ranks `missing`, at least one, that did not start within `timeout_s`."""
    remedies = [*_remedies(job), "a longer start timeout"]
    return f"{names.listed(missing)} did not start in {timeout_s:g} s; try {', or '.join(remedies)}"


def of_launcher(job: Job, code: int, missing: list[int], ends: Ends, named_hosts: Sequence[str] = ()) -> str:
    """For a launcher that ended with `code`, negative for a signal, although no rank had failed.

    Args:
        missing: the ranks that did not start.
        ends: how the others ended; if `code` is 0, not all of them with exit code 0.
        named_hosts: other hosts of lost ranks that the launcher has named in its last lines.
    """
    if code < 0:
        return f"the launcher was ended by {signal.Signals(-code).name}"
    if missing:
        remedies = _remedies(job)
        hint = f"try {', or '.join(remedies)}" if remedies else "the launcher's own words say why"
        return f"{list_of_ranks(missing)} did not start; {hint}"
    if ends.returned_0 == job.num_proc:
        return f"all ranks ended with exit code 0, but the launcher with exit code {code}"
    if ends.lost:
        lost = f"{list_of_ranks(ends.lost)} got lost: the launcher ended with exit code {code} before they did"
        has_heard = ends.early or ends.told or ends.returned_0
        hosts = ", ".join(named_hosts or (ends.silent_hosts if has_heard else []))
        if hosts:
            return f"{lost}; is {hosts} up, and the network to it?"
        if len(ends.hosts_of_lost) < 2:
            return lost
        remedy = next(iter(_remedies(job)), "")
        hint = f"; try {remedy}" if remedy else ""
        return f"{lost}. It may have lost one of its hosts {', '.join(ends.hosts_of_lost)}{hint}"
    if ends.early:
        rank, host = ends.early[0]
        return f"rank {rank} on {host} ended early with exit code 0, while the others still ran"
    if ends.told:
        return f"somebody other than ringrun told {list_of_ranks(ends.told)} to end"
    return f"the launcher ended with exit code {code} before any rank had ended"


def exit_code_of_launcher(code: int, num_proc: int, missing: list[int], ends: Ends) -> int:
    """The exit code of a job for which `of_launcher` has the words."""
    if code < 0:
        return 128 - code
    if missing or (ends.returned_0 < num_proc and (ends.lost or (ends.told and not ends.early))):
        return 1
    return code or 1


def of_unkillable(pids: list[int]) -> str:
    """For processes of this host, at least one, that outlive SIGKILL."""
    outlive = "process {} outlives" if len(pids) == 1 else "processes {} outlive"
    return f"{outlive.format(', '.join(map(str, pids)))} SIGKILL, waiting in the kernel, perhaps for a disk or a GPU"


def _remedies(job: Job) -> list[str]:
    """What to try where ranks do not start, from what was asked for."""
    found = []
    if job.hosts:
        port = [] if job.ssh_port is None else ["--ssh-port", str(job.ssh_port)]
        identity = [] if job.ssh_identity_file is None else ["--ssh-identity-file", job.ssh_identity_file]
        found.append(" ".join(["ringrun -H", ",".join(map(str, job.hosts)), *port, *identity, "--check"]))
    if job.network_interfaces is not None:
        found.append(f"another network interface than {job.network_interfaces}")
    return found
