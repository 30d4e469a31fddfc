"""Gets a container of YARN for each rank, and ends with the last of them.

The containers come to this host by themselves: ranks on one host are beside each other. From then on all is as without
YARN, where agents are reached by ssh.
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
from collections.abc import Mapping
from typing import NamedTuple

from ringtrain.job.interfaces import addresses_of, usual_address
from ringtrain.job.rendezvous.door import ANSWER_S, Door, bound
from ringtrain.job.rendezvous.protocol import Connection, StrangerError
from ringtrain.job.rendezvous.server import Server
from ringtrain.runner.launchers.travelling_variables import travelling
from ringtrain.runner.start.agent import Order, write_lines
from ringtrain.runner.start.link import Share
from ringtrain.runner.start.starter import ENDING_SIGNALS, GRACE_AFTER_FAILURE_S, INTERFACES_VARIABLE, Starter
from ringtrain.runner.supervise.rank_wrapper import GRACE_VARIABLE
from ringtrain.runner.yarn import resource_manager
from ringtrain.runner.yarn.application import Application, script_for
from ringtrain.runner.yarn.link import ContainerLink
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
    count: int, arrivals: Arrivals, application: Application, manager: ResourceManager, told: EndingSignal
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
                _say(f"{application.identity} waits for its containers: {status.diagnostics or 'no reason is told'}")
    hosts = list(dict.fromkeys(arrival.host for arrival in found))
    return sorted(found, key=lambda arrival: hosts.index(arrival.host))


def end(application: Application, manager: ResourceManager, code: int) -> None:
    """Let an application end by itself whose ranks all ended well; kill it else, so that YARN's list shows it."""
    end_at = time.monotonic() + (_END_S if code == 0 else 0)
    while application.code is None and time.monotonic() < end_at:
        time.sleep(_LOOK_S)
    if application.code is None and application.identity and not manager.kill(application.identity):
        _say(f"{application.identity} could not be ended by REST; look at `yarn application -status` of it")


def main() -> int:
    """Returns 0 where all ranks did."""
    arguments = _parser().parse_args()
    manager = ResourceManager(resource_manager.addresses_of(os.environ))
    told = EndingSignal()
    named = addresses_of(os.environ.get(INTERFACES_VARIABLE, ""))
    address = (named or [usual_address()])[0]
    anywhere = "::" if ":" in address else "0.0.0.0"
    listens_at = address if named else anywhere
    secret = secrets.token_bytes(32)
    server = Server(bound(listens_at, 0), secret)
    arrivals = Arrivals(bound(listens_at, 0), secret)
    application = Application(
        *(arguments.hadoop, arguments.jar, f"{arguments.name}-{secrets.token_hex(4)}", arguments.num_proc),
        *(arguments.client_word, script_for(address, arrivals.port, secret)),
    )
    code = 1
    try:
        found = await_containers(arguments.num_proc, arrivals, application, manager, told)
        arrivals.close()
        place = f"[{address}]:{server.port}" if ":" in address else f"{address}:{server.port}"
        environment = {name: os.environ[name] for name in travelling(os.environ, arguments.exported)}
        links = [_link(rank, arrival, place, environment, arguments) for rank, arrival in enumerate(found)]
        with contextlib.suppress(BrokenPipeError):  # whoever reads has gone, and the agents with this process
            code = Starter(links, float(os.environ.get(GRACE_VARIABLE, GRACE_AFTER_FAILURE_S))).run()
    except NoContainers as reason:
        code = reason.code
        if str(reason):
            _say(str(reason))
    finally:
        status = manager.status(application.identity) if code and application.identity else None
        if status is not None and status.state == "KILLED":
            _say(_in_words(application.identity, status))
        end(application, manager, code)
        application.close()
    return code


def _link(
    rank: int, arrival: Arrival, place: str, environment: Mapping[str, str], arguments: argparse.Namespace
) -> ContainerLink:
    link = ContainerLink(Share(arrival.host, rank, 1, True), arrival.way, arrival.container)
    # the secret is there already
    order = Order(arguments.command, rank, 1, arguments.num_proc, place, "", dict(environment), os.getcwd())
    link.order(order._asdict())
    return link


def _why_it_ended(application: Application, manager: ResourceManager) -> str:
    status = manager.status(application.identity) if application.identity else None
    if status is not None and status.has_ended:
        return _in_words(application.identity, status)
    said = "".join(f"\n    {line}" for line in application.last_lines)
    return f"Hadoop's DistributedShell ended with exit code {application.code}; its last lines were{said}"


def _in_words(identity: str, status: Status) -> str:
    return f"YARN says of {identity}: {status}; `yarn logs -applicationId {identity}` may say more"


def _say(text: str) -> None:
    write_lines(2, [f"ringrun: {text}".encode()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What ringrun starts for a job on YARN.", allow_abbrev=False)
    parser.add_argument("--num-proc", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--hadoop", required=True)
    parser.add_argument("--jar", required=True)
    parser.add_argument("--client-word", action="append", default=[])
    parser.add_argument("--exported", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser
