"""A process of an engine becomes a rank: for one function call, after which it is what it was, or until it ends.

The process of rank 0 opens a meeting first, where the ranks find each other. A driver tells the processes where it is.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, TypeVar

from ringtrain import failure
from ringtrain.errors import RingtrainError
from ringtrain.job import session
from ringtrain.job.rendezvous.listener import bound
from ringtrain.job.rendezvous.secret import FILE_VARIABLE
from ringtrain.job.rendezvous.server import Server
from ringtrain.job.sockets import PLACE_VARIABLE
from ringtrain.job.world import node_name

Error = TypeVar("Error", bound=BaseException)

_meetings: dict[int, Server] = {}  # by port
_is_rank = threading.Lock()


class Process(NamedTuple):
    """A process as the driver knows it: two ranks of one `node` share its memory."""

    node: str
    host: str
    pid: int


def own_process() -> Process:
    return Process(node_name(), socket.gethostname(), os.getpid())


def open_meeting(secret: bytes) -> int:
    """Returns the port at which the ranks that know the secret can meet, until `close_meeting`."""
    listener = bound("", 0)
    server = Server(listener, secret)
    _meetings[server.port] = server
    return server.port


def close_meeting(port: int) -> None:
    server = _meetings.pop(port, None)
    if server is not None:
        server.close()


def fail_meeting(port: int, reason: str) -> None:
    """Lets ranks that are in `init()`, or come to it, fail with a PeerLostError: not all of them will come."""
    server = _meetings.get(port)
    if server is not None:
        server.fail(reason)


def variables_of_ranks(nodes: Sequence[str], place: str, env: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns for each rank the variables that make a process this rank.

    Args:
        nodes: of the ranks, in their order.
        place: `host:port` of the meeting.
        env: variables that all get besides.
    """
    sizes, seen = Counter(nodes), Counter[str]()
    variables = []
    for rank, node in enumerate(nodes):
        numbers = {"RANK": rank, "SIZE": len(nodes), "LOCAL_RANK": seen[node], "LOCAL_SIZE": sizes[node]}
        of_rank = {f"RINGTRAIN_{name}": str(number) for name, number in numbers.items()}
        variables.append({**env, **of_rank, PLACE_VARIABLE: place, "RINGTRAIN_NETWORK": "sockets"})
        seen[node] += 1
    return variables


def call_as_rank(
    variables: Mapping[str, str],
    secret: bytes,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Returns what the function returns. It calls `ringtrain.init()` itself, and may call `shutdown()`.

    Raises what the function raises, after the other ranks have been told; for sys.exit() a RuntimeError, since the
    process belongs to the engine and must live on.
    """
    if not _is_rank.acquire(blocking=False):
        raise RuntimeError(f"process {os.getpid()} is a rank of another job already: a process is one rank at a time")
    try:
        if session.is_initialized():
            raise RuntimeError(
                f"process {os.getpid()} has called ringtrain.init() before: call shutdown() there, so that it can be "
                "a rank of this job"
            )
        with with_variables(variables), _secret_file(secret):
            return _call(variables["RINGTRAIN_RANK"], function, args, kwargs)
    finally:
        _is_rank.release()


def first_failure(failures: Sequence[tuple[int, Error]]) -> tuple[int, Error]:
    """Returns the first of these that is no consequence of another rank's failure; if all are, the first one."""
    return next((one for one in failures if not isinstance(one[1], RingtrainError)), failures[0])


def with_note(error: Error, place: str) -> Error:
    """Returns the exception of a rank with a note that names the rank, where this Python has notes."""
    if sys.version_info >= (3, 11):
        error.add_note(f"ringtrain: {place}")
    return error


def give_up(reason: str) -> None:
    """Any thread of the process. Makes operations of the ranks fail with this reason, if the process is a rank now."""
    if session.is_initialized():
        failure.tell(RingtrainError(reason))


def _call(rank: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except SystemExit as end:
        left = RuntimeError(f"rank {rank} has left the function by sys.exit({end.code!r})")
        _tell(left)
        raise left from None
    except BaseException as error:
        _tell(error)
        raise
    finally:
        session.shutdown()


def _tell(error: BaseException) -> None:
    if session.is_initialized():
        failure.tell(error)


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which these environment variables are set; after it they are as before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _secret_file(secret: bytes) -> Iterator[None]:
    """Names to `init()` a file that this process alone has, and that is gone with it."""
    with _file_of(secret) as file, with_variables({FILE_VARIABLE: _name_of(file)}):
        yield


_secret_of_process: IO[bytes] | None = None  # open as long as the process is this rank


def become_rank(variables: Mapping[str, str], secret: bytes) -> None:
    """Makes this process the rank that `variables_of_ranks` describes, until it ends or becomes another one."""
    global _secret_of_process
    _secret_of_process = _file_of(secret)
    os.environ.update(variables)
    os.environ[FILE_VARIABLE] = _name_of(_secret_of_process)


def _file_of(secret: bytes) -> IO[bytes]:
    file = open(os.memfd_create("ringtrain-secret"), "wb")  # noqa: SIM115  # the caller closes it
    os.fchmod(file.fileno(), 0o600)
    file.write(secret)
    file.flush()
    return file


def _name_of(file: IO[bytes]) -> str:
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"
