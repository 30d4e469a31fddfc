"""`horovod.runner.common.util`: hosts, secrets, time limits and the like.

Its modules are here, and `finder` finds this one under each of their names; but `host_hash` is in a file of its own,
since the function in it has the name of the module.
"""

from __future__ import annotations

import base64
import hmac
import os
import pickle
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain.job import launched_by
from ringtrain.pickling import pickler
from ringtrain.runner import hosts as own
from ringtrain.runner.hosts import travelling

# --- `horovod.runner.common.util.codec`: objects as text --------------------------------------------------------------


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """The pickle of an object in base64."""
    encoded = base64.b64encode(pickler().dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The object. The text must be as trustworthy as the script: it is read by pickle."""
    return pickle.loads(base64.b64decode(encoded))


# --- `horovod.runner.common.util.env`: environment variables of ranks -------------------------------------------------


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


# --- `horovod.runner.common.util.hosts`: hosts, and which rank each of their slots gets -------------------------------


@dataclass
class HostInfo:
    """A host and how many ranks it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Reads "host:2". Raises UsageError."""
        (host,) = own.parse_hosts(host_string, "hosts")
        return HostInfo(host.name, host.slots)


@dataclass
class SlotInfo:
    """The place of one rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int | None = None
    local_size: int | None = None
    cross_size: int | None = None

    def to_response_string(self) -> str:
        """All numbers in one line, as the rendezvous of Horovod answers."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(str(number) for number in numbers)

    @staticmethod
    def from_response_string(response_string: str) -> SlotInfo:
        """Reads what `to_response_string` returns, which does not name the host."""
        rank, size, local_rank, local_size, cross_rank, cross_size = map(int, response_string.split(","))
        return SlotInfo("", rank, local_rank, cross_rank, size, local_size, cross_size)


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Reads "h1:2,h2:2". Raises UsageError."""
    return [HostInfo(host.name, host.slots) for host in own.parse_hosts(hosts_string, "hosts")]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """The names of "h1:2,h2:2", and the slots of each name. Raises UsageError."""
    found = parse_hosts(hosts)
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def parse_host_files(filename: str) -> str:
    """The hosts of a hostfile as "h1:2,h2:2". Raises UsageError."""
    return ",".join(map(str, own.read_hostfile(filename)))


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """The places of the ranks, which fill the slots of the hosts, one host after another.

    Raises ValueError where the hosts have fewer slots than `min_num_proc`.
    """
    places: list[tuple[str, int]] = []
    for host in hosts:
        places += [(host.hostname, local_rank) for local_rank in range(host.slots)]
    if len(places) < min_num_proc:
        raise ValueError(f"{min_num_proc} ranks were asked for, but the hosts have {len(places)} slots: add hosts")
    places = places[: max_num_proc or len(places)]
    return [_slot(places, rank) for rank in range(len(places))]


def _slot(places: Sequence[tuple[str, int]], rank: int) -> SlotInfo:
    host, local_rank = places[rank]
    with_local_rank = [number for number, (_, other) in enumerate(places) if other == local_rank]
    return SlotInfo(
        hostname=host,
        rank=rank,
        local_rank=local_rank,
        cross_rank=with_local_rank.index(rank),
        size=len(places),
        local_size=sum(name == host for name, _ in places),
        cross_size=len(with_local_rank),
    )


# --- `horovod.runner.common.util.secret`: keys, and digests of messages that only their owners can make ---------------


DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """A new key of 32 bytes."""
    return secrets.token_bytes(32)


def compute_digest(key: bytes, body: bytes) -> bytes:
    """Of SHA-256."""
    return hmac.digest(key, body, "sha256")


def check_digest(key: bytes, body: bytes, digest: bytes) -> bool:
    """Whether the owner of the key made the digest."""
    return hmac.compare_digest(digest, compute_digest(key, body))


# --- `horovod.runner.common.util.timeout`: a limit of time for several steps ------------------------------------------


class TimeoutException(Exception):
    """The time is over."""


class Timeout:
    """A limit that begins now.

    Args:
        timeout: in seconds.
        message: of the error; `{timeout}` and `{activity}` are filled in.
    """

    def __init__(self, timeout: float, message: str):
        self._timeout = timeout
        self._message = message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """How many seconds are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raises TimeoutException if the time is over."""
        if self.timed_out():
            raise TimeoutException(self._message.format(timeout=self._timeout, activity=activity))
