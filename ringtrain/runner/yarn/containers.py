"""The containers of a job: asked of YARN, awaited here, where they come by themselves, and given back.

Those of one host are beside each other. A starter does with them what it would do with hosts that it reaches by ssh.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import secrets
import signal
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from ringtrain.job.interfaces import addresses_of, usual_address
from ringtrain.job.rendezvous.door import ANSWER_S, Door, bound
from ringtrain.job.rendezvous.protocol import Connection, StrangerError
from ringtrain.runner.start.agent import write_lines
from ringtrain.runner.start.starter import ENDING_SIGNALS, INTERFACES_VARIABLE
from ringtrain.runner.yarn import resource_manager
from ringtrain.runner.yarn.application import Application, script_for
from ringtrain.runner.yarn.resource_manager import ResourceManager, Status

_LOOK_S = 0.2
# How often YARN is asked what has become of the application.
_ASK_S = 1.0
# An application whose containers have all ended ends by itself, and is killed if it has not after so long.
_END_S = 10.0
_HELLO_BYTES = 4096
_SILENCE_S = 30.0


class Arrival(NamedTuple):
    """A container that has come."""

    host: str
    container: str
    way: socket.socket


class Here(NamedTuple):
    """Where containers find this process: `listens_at` is what to bind, `address` what to tell them."""

    address: str
    listens_at: str


class NoContainers(Exception):
    """Not all have come; `code` is for the shell, and the message says why, if that is to be said."""

    def __init__(self, code: int, message: str = ""):
        super().__init__(message)
        self.code = code


class Arrivals:
    """Containers as they come, until close()."""

    def __init__(self, listener: socket.socket, secret: bytes):
        self.port: int = listener.getsockname()[1]
        self._come: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._door = Door(listener, secret, self._let_in)

    def close(self) -> None:
        """Those that come later, of a second attempt of YARN, find nobody."""
        self._door.close()

    def next(self, longest_s: float) -> Arrival | None:
        with contextlib.suppress(queue.Empty):
            return self._come.get(timeout=longest_s)
        return None

    def _let_in(self, connection: Connection) -> None:
        try:
            hello = connection.receive(_HELLO_BYTES, time.monotonic() + ANSWER_S)
            arrival = Arrival(str(hello["host"]), str(hello["container"]), connection.take_socket())
        except (OSError, StrangerError, TypeError, KeyError):
            connection.close()
            return
        connection.notice_silence(_SILENCE_S)
        self._come.put(arrival)


class EndingSignal:
    """The first one that has come, or 0."""

    def __init__(self) -> None:
        self.number = 0
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.number = self.number or number


def await_containers(
    count: int, arrivals: Arrivals, application: Application, manager: ResourceManager, told: EndingSignal, speaker: str
) -> list[Arrival]:
    """So many, with those of one host beside each other. Raises NoContainers."""
    found: list[Arrival] = []
    ask_at, said = 0.0, ""
    while len(found) < count:
        if told.number:
            raise NoContainers(128 + told.number)
        arrival = arrivals.next(_LOOK_S)
        if arrival is not None:
            found.append(arrival)
            continue
        if application.code is not None:
            raise NoContainers(1, _why_it_ended(application, manager))
        if application.identity and time.monotonic() >= ask_at:
            ask_at = time.monotonic() + _ASK_S
            status = manager.status(application.identity)
            if status is not None and status.has_ended:
                raise NoContainers(1, _in_words(application.identity, status))
            if status is not None and status.state == "ACCEPTED" and status.state != said:
                said = status.state
                _say(
                    speaker,
                    f"{application.identity} waits for its containers: {status.diagnostics or 'no reason is told'}",
                )
    hosts = list(dict.fromkeys(arrival.host for arrival in found))
    return sorted(found, key=lambda arrival: hosts.index(arrival.host))


def end(application: Application, manager: ResourceManager, code: int, speaker: str) -> None:
    """Let an application end by itself whose ranks all ended well; kill it else, so that YARN's list shows it."""
    end_at = time.monotonic() + (_END_S if code == 0 else 0)
    while application.code is None and time.monotonic() < end_at:
        time.sleep(_LOOK_S)
    if application.code is None and application.identity and not manager.kill(application.identity):
        _say(speaker, f"{application.identity} could not be ended by REST; look at `yarn application -status` of it")


def add_words(parser: argparse.ArgumentParser) -> None:
    """What a starter has to be told, after which comes the command."""
    for name in ("--name", "--hadoop", "--jar"):
        parser.add_argument(name, required=True)
    for name in ("--client-word", "--exported"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)


def with_containers(
    arguments: argparse.Namespace,
    count: int,
    secret: bytes,
    speaker: str,
    run: Callable[[list[Arrival], Here], int],
) -> int:
    """Get so many, run the job in them, and give them back.

    Args:
        arguments: of a parser of `add_words`.
        secret: that of the job, which the containers know.
        speaker: who tells the user what YARN says.
        run: returns the exit code of the job.

    Returns:
        That, or what is said where not all containers have come.
    """
    manager = ResourceManager(resource_manager.addresses_of(os.environ))
    told = EndingSignal()
    named = addresses_of(os.environ.get(INTERFACES_VARIABLE, ""))
    address = (named or [usual_address()])[0]
    here = Here(address, address if named else "::" if ":" in address else "0.0.0.0")
    arrivals = Arrivals(bound(here.listens_at, 0), secret)
    application = Application(
        *(arguments.hadoop, arguments.jar, f"{arguments.name}-{secrets.token_hex(4)}", count),
        *(arguments.client_word, script_for(address, arrivals.port, secret)),
    )
    code = 1
    try:
        found = await_containers(count, arrivals, application, manager, told, speaker)
        arrivals.close()
        with contextlib.suppress(BrokenPipeError):  # whoever reads has gone, and the agents with this process
            code = run(found, here)
    except NoContainers as reason:
        code = reason.code
        if str(reason):
            _say(speaker, str(reason))
    finally:
        status = manager.status(application.identity) if application.identity else None
        if status is not None and status.state == "KILLED":
            _say(speaker, _in_words(application.identity, status))
            code = code or 1  # also of processes that end well when they are told to
        end(application, manager, code, speaker)
        application.close()
    return code


def _why_it_ended(application: Application, manager: ResourceManager) -> str:
    status = manager.status(application.identity) if application.identity else None
    if status is not None and status.has_ended:
        return _in_words(application.identity, status)
    said = "".join(f"\n    {line}" for line in application.last_lines)
    return f"Hadoop's DistributedShell ended with exit code {application.code}; its last lines were{said}"


def _in_words(identity: str, status: Status) -> str:
    return f"YARN says of {identity}: {status}; `yarn logs -applicationId {identity}` may say more"


def _say(speaker: str, text: str) -> None:
    write_lines(2, [f"{speaker}: {text}".encode()])
