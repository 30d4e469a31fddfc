"""The containers of a job on YARN: asked for, awaited here, where they come by themselves, and given back."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import queue
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.job.host import INTERFACES_VARIABLE, addresses_of, usual_address
from ringtrain.job.rendezvous.listener import ANSWER_S, Listener, bound
from ringtrain.job.rendezvous.protocol import Connection, StrangerError
from ringtrain.runner.hosts import UsageError
from ringtrain.runner.start import yarn_container
from ringtrain.runner.start.starter import ENDING_SIGNALS, say
from ringtrain.runner.supervise import process_tree, rank_wrapper
from ringtrain.runner.supervise.rank_wrapper import END_NOW

# --- the ResourceManager, by its REST interface -----------------------------------------------------------------------


ADDRESS_VARIABLE = "RINGTRAIN_YARN_RESOURCE_MANAGER"
_FOLDER_VARIABLES = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
_USUAL_FOLDER = "/etc/hadoop/conf"
_ANSWER_S = 5.0
# No proxy stands between a user and the cluster.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Status(NamedTuple):
    """The report of YARN about an application: `state` is ACCEPTED, RUNNING, FAILED, ...; `diagnostics` its own words.

    `outcome` is what the application itself has said at its end.
    """

    state: str
    outcome: str
    diagnostics: str

    @property
    def has_ended(self) -> bool:
        return self.state in ("FINISHED", "FAILED", "KILLED")

    def __str__(self) -> str:
        state = f"{self.state}, {self.outcome}" if self.state == "FINISHED" else self.state
        return f"{state}: {self.diagnostics}" if self.diagnostics else state


class ResourceManager:
    """One of `addresses` is the active one. Nothing raises: what cannot be asked is not known."""

    def __init__(self, addresses: Sequence[str]):
        self._addresses = addresses

    def status(self, application: str) -> Status | None:
        answer = self._ask("GET", application)
        if answer is None or "app" not in answer:
            return None
        told = answer["app"]
        fields = [str(told.get(name, "")).strip() for name in ("state", "finalStatus", "diagnostics")]
        return Status(*fields)

    def kill(self, application: str) -> bool:
        """Returns whether the ResourceManager has heard it."""
        return self._ask("PUT", f"{application}/state", {"state": "KILLED"}) is not None

    def _ask(self, method: str, path: str, content: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        # without Kerberos, this is how YARN learns who asks
        query = urllib.parse.urlencode({"user.name": os.environ.get("HADOOP_USER_NAME") or getpass.getuser()})
        for address in self._addresses:
            request = urllib.request.Request(
                f"{address}/ws/v1/cluster/apps/{path}?{query}",
                data=json.dumps(content).encode() if content is not None else None,
                headers={"Accept": "application/json", "Content-Type": "application/json"},
                method=method,
            )
            try:
                with _OPENER.open(request, timeout=_ANSWER_S) as response:
                    answer: dict[str, Any] = json.loads(response.read() or b"{}")
                    return answer
            except (OSError, ValueError):  # a standby, or none that is up
                continue
        return None


def resource_managers(environ: Mapping[str, str]) -> list[str]:
    """Returns the addresses that the user has named, else those of yarn-site.xml. Raises UsageError."""
    named = environ.get(ADDRESS_VARIABLE)
    if named:
        return [address.strip().rstrip("/") for address in named.split(",")]
    folder = next((environ[name] for name in _FOLDER_VARIABLES if environ.get(name)), _USUAL_FOLDER)
    path = Path(folder, "yarn-site.xml")
    remedy = f"set {ADDRESS_VARIABLE}, as in http://rm.example.org:8088"
    try:
        settings = _settings_of(path)
    except (OSError, ElementTree.ParseError) as error:
        raise UsageError(f"where is YARN's ResourceManager? {path} cannot be read: {error}; {remedy}") from error
    found = _web_addresses(settings)
    if not found:
        raise UsageError(f"where is YARN's ResourceManager? {path} does not say; {remedy}")
    return found


def _settings_of(path: Path) -> dict[str, str]:
    found = {}
    for entry in ElementTree.parse(path).getroot().iter("property"):
        found[(entry.findtext("name") or "").strip()] = (entry.findtext("value") or "").strip()
    return found


def _web_addresses(settings: Mapping[str, str]) -> list[str]:
    is_safe = settings.get("yarn.http.policy") == "HTTPS_ONLY"
    setting = f"yarn.resourcemanager.webapp.{'https.' if is_safe else ''}address"
    ids = settings.get("yarn.resourcemanager.ha.rm-ids", "")
    found = []
    for ending in [f".{name.strip()}" for name in ids.split(",")] if ids else [""]:
        host = settings.get(f"yarn.resourcemanager.hostname{ending}", "")
        usual = f"{host}:{8090 if is_safe else 8088}" if host else ""
        address = settings.get(f"{setting}{ending}", usual)
        # one value may stand in another one
        address = re.sub(r"\$\{([\w.-]+)\}", lambda match: settings.get(match[1], ""), address)
        if address:
            found.append(f"{'https' if is_safe else 'http'}://{address}")
    return found


# --- the application: Hadoop's own DistributedShell, by its client ----------------------------------------------------


_CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
# The client ends a job by itself after ten minutes unless it is given more: the most that it takes, 24 days.
_LONGEST_MS = 2**31 - 1
_LAST_LINES = 20
_REMOVE_S = 30.0
_CLIENT_END_S = 5.0


class Application:
    """From its submission to close(). `identity` is YARN's name of it, and empty until YARN has taken it."""

    def __init__(self, hadoop: str, jar: str, name: str, containers: int, words: Sequence[str], script: str):
        """
        Args:
            name: that of the application, and of a folder in the user's home of the cluster's file system.
            words: the user's, for the client.
            script: what each container runs. It holds the secret of the job, so other users may not read that folder.
        """
        self.identity = ""
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._hadoop, self._name = hadoop, name
        descriptor, self._script = tempfile.mkstemp(".sh", "ringtrain-")  # for its owner alone
        with os.fdopen(descriptor, "w") as file:
            file.write(script)
        words = [jar, _CLIENT, "-jar", jar, "-appname", name, "-num_containers", str(containers), *words]
        client = [hadoop, "jar", *words, "-timeout", str(_LONGEST_MS), "-shell_script", self._script]
        folder = [[hadoop, "fs", "-mkdir", name], [hadoop, "fs", "-chmod", "700", name]]
        line = " && ".join([*map(shlex.join, folder), f"exec {shlex.join(client)}"])
        self._process = subprocess.Popen(
            ["sh", "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the process that ends the job
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """Returns the exit code of the client, which ends with the application, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(_CLIENT_END_S)
        return code

    def close(self) -> None:
        """Wait for the client of an application that has ended, and leave nothing in the cluster's file system."""
        with contextlib.suppress(OSError):
            os.unlink(self._script)
        remover = self._start_remover()
        try:
            self._process.wait(_CLIENT_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            remover.wait(_REMOVE_S)

    def _start_remover(self) -> subprocess.Popen[bytes]:
        """It may outlive a job that is ended from outside, which leaves no time for another start of Java."""
        return subprocess.Popen(
            ["timeout", str(_REMOVE_S), self._hadoop, "fs", "-rm", "-r", "-f", "-skipTrash", self._name],
            env={
                process_tree.OUTLIVES_VARIABLE: "1",
                **{name: value for name, value in os.environ.items() if name != rank_wrapper.JOB_VARIABLE},
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last_lines.append(line.rstrip())
            found = re.search(r"\bapplication_\d+_\d+\b", line)
            if found and not self.identity:
                self.identity = found[0]


def script_for(address: str, port: int, secret: bytes) -> str:
    """Returns the script of each container. The secret is in no command line, where all users could read it."""
    # Python itself may need it
    libraries = os.environ.get("LD_LIBRARY_PATH")
    variables = [f"export LD_LIBRARY_PATH={shlex.quote(libraries)}"] if libraries else []
    words = [sys.executable, str(Path(yarn_container.__file__).resolve()), address, str(port)]
    return "\n".join(["#!/bin/bash", *variables, f"exec {shlex.join(words)} <<'END'", secret.hex(), "END", ""])


# --- the containers ---------------------------------------------------------------------------------------------------


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
    """Tells containers how to find this process: it binds `listens_at`, and they connect to `address`."""

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
        self._listener = Listener(listener, secret, self._let_in)

    def close(self) -> None:
        """Stops listening: later containers, of a second attempt of YARN, find no starter."""
        self._listener.close()

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
        for number in (*ENDING_SIGNALS, END_NOW):
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
                say(
                    f"{application.identity} waits for its containers: {status.diagnostics or 'no reason is told'}",
                )
    hosts = list(dict.fromkeys(arrival.host for arrival in found))
    return sorted(found, key=lambda arrival: hosts.index(arrival.host))


def end(application: Application, manager: ResourceManager, code: int) -> None:
    """Lets an application end by itself whose ranks all ended well; kill it else, so that YARN's list shows it."""
    end_at = time.monotonic() + (_END_S if code == 0 else 0)
    while application.code is None and time.monotonic() < end_at:
        time.sleep(_LOOK_S)
    if application.code is None and application.identity and not manager.kill(application.identity):
        say(f"{application.identity} could not be ended by REST; look at `yarn application -status` of it")


def with_containers(
    words: Sequence[str],
    count: int,
    secret: bytes,
    run: Callable[[list[Arrival], Here], int],
) -> int:
    """Get so many, run the job in them, and give them back.

    Args:
        words: the paths of hadoop and of the jar, the name of the application, and the user's words for the client.
        secret: that of the job, which the containers know.
        run: returns the exit code of the job.

    Returns:
        That, or what is said where not all containers have come.
    """
    hadoop, jar, name, *of_client = words
    manager = ResourceManager(resource_managers(os.environ))
    told = EndingSignal()
    named = addresses_of(os.environ.get(INTERFACES_VARIABLE, ""))
    address = (named or [usual_address()])[0]
    here = Here(address, address if named else "::" if ":" in address else "0.0.0.0")
    arrivals = Arrivals(bound(here.listens_at, 0), secret)
    application = Application(
        *(hadoop, jar, f"{name}-{secrets.token_hex(4)}", count),
        *(of_client, script_for(address, arrivals.port, secret)),
    )
    code = 1
    try:
        found = await_containers(count, arrivals, application, manager, told)
        arrivals.close()
        code = run(found, here)
    except NoContainers as reason:
        code = reason.code
        if str(reason):
            say(str(reason))
    finally:
        status = manager.status(application.identity) if application.identity else None
        if status is not None and status.state == "KILLED":
            say(_in_words(application.identity, status))
            code = code or 1  # also of processes that end well when they are told to
        end(application, manager, code)
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
