"""On each host of a job without MPI: starts the ranks of this host, hands on what they write, and ends them.

Runs as a script, on other hosts by ssh, without importing ringtrain, so that it starts fast. All goes in lines:

    standard input   orders of JSON: an Order first, then {"signal": 15}, {"end": seconds}, {"stdin": base64 or null}
    standard output  reports, REPORT and JSON: {"began": true} first, {"ended": [rank, code]}, a code as a shell gives
                     it, {"took": "stdin"}. A report ends its line, which may begin with text of a start-up file of a
                     remote shell

In an elastic job, and in one with servers, the agent *stays*: it starts one process for each {"start": number}, the two
orders above may be for {"rank": number} alone, and it ends with {"finish": true}. In a job with servers it
tells a process the "variables" of its order, and nothing of ranks. In an elastic job the order has the variables of
"horovod", the place that the process is expected to get.

Both outputs have besides, in whole lines, what the ranks write to theirs; under ringrun, that is frames of wrappers.
When standard input ends, the starter has died, and the ranks are killed. With the argument TELL_READ_BYTES, the agent
reports {"read": bytes} of each part of standard input that it has read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

if __name__ == "__main__":  # a script that does not import ringtrain
    sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "supervise"))
    import process_tree  # type: ignore[import-not-found, unused-ignore]
    import rank_wrapper  # type: ignore[import-not-found, unused-ignore]
else:
    from ringtrain.runner.supervise import process_tree, rank_wrapper

REPORT = b"\x1f"
KINDS_OF_REPORTS = frozenset({"began", "ended", "took", "read"})
TELL_READ_BYTES = "--tell-read-bytes"
_LOOK_S = 0.2
# Processes that an ended rank has left behind may hold its pipes open for ever.
_DRAIN_S = 1.0
# How long the ranks have if somebody other than the starter ends this process, and ringrun has not said how long.
_END_S = 10.0
_KILL_S = 10.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# As in job/rendezvous/secret.py.
_SECRET_DESCRIPTOR_VARIABLE = "_RINGTRAIN_SECRET_DESCRIPTOR"
# How variables begin that a launcher sets for each of its processes, or its own daemons.
TOLD_BY_LAUNCHERS = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "PMI2_", "HYDRA_", "HYDI_", "MPI_LOCAL")


class Order(NamedTuple):
    """An order to start ranks. Those of this host are `first`, `first + 1`, ..., `ranks` of `size`.

    For an agent that stays there are none at first, and `host` is what the job calls this host.
    """

    command: list[str]
    environment: dict[str, str]  # over that of this host
    folder: str
    place: str  # where all ranks meet; empty where they do not
    secret: str  # in hexadecimal digits; empty where the agent has it
    host: str = ""
    first: int = 0
    ranks: int = 0
    size: int = 0
    has_wrappers: bool = False  # the ranks write frames

    @property
    def agent_stays(self) -> bool:
        return bool(self.host)


class Lines:
    """Makes lines of bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` has ended, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def close(self) -> list[bytes]:
        """The last one, if it has no end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def write_lines(descriptor: int, lines: list[bytes]) -> None:
    """Raises OSError where the reader has gone."""
    data = b"".join(line + b"\n" for line in lines)
    while data:
        data = data[os.write(descriptor, data) :]


class Rank:
    """The process group of one rank, whose first process is `pid`: its wrapper if it has one. It is waited for at the
    very end: until then nobody else gets its number."""

    def __init__(self, number: int, pid: int, output: int, errors: int):
        self.number = number
        self.pid = pid
        # descriptors to read, by the descriptor of this process that their lines go to
        self.streams = {1: output, 2: errors}
        self.drain_until = float("inf")
        self.kill_at = float("inf")
        self.has_ended = False

    def end(self, grace_s: float) -> None:
        if self.kill_at == float("inf"):
            self.signal(signal.SIGTERM)
        self.kill_at = min(self.kill_at, time.monotonic() + grace_s)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGTERM:  # the wrapper knows whether the rank has it already
                os.kill(self.pid, rank_wrapper.END_RANK)
            else:
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kills also what the rank has started in sessions of their own."""
        process_tree.kill(process_tree.descendants(self.pid))
        self.signal(signal.SIGKILL)

    def code(self) -> int | None:
        """Returns the exit code of a shell, or None while it runs."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status

    def forget(self) -> None:
        """Takes the end of the process, if it has ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)


class Input:
    """The standard input of rank 0, which may be slow to read it."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._waiting = b""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def add(self, data: bytes) -> None:
        self._waiting += data

    def write(self) -> bool:
        """Write what can be. Returns whether all has been written, or the reader has gone."""
        try:
            self._waiting = self._waiting[os.write(self.fileno(), self._waiting) :]
        except BlockingIOError:
            return False
        except OSError:
            self._waiting = b""
        return not self._waiting

    def close(self) -> None:
        os.close(self._descriptor)


class Agent:
    """One thread, so that it can fork: a wrapper has all that it needs in memory then, which they share."""

    def __init__(self, orders: Lines, order: Order):
        self._selector = selectors.PollSelector()
        self._orders = orders
        self._order = order
        self._environment = {**_own_environment(order), **order.environment}
        if order.place:
            self._environment["RINGTRAIN_RENDEZVOUS"] = order.place
        self._grace_s = float(self._environment.get(rank_wrapper.GRACE_VARIABLE, _END_S))
        self._ranks: list[Rank] = []
        self._input: Input | None = None
        self._stays = order.agent_stays
        self._secret = -1  # a descriptor
        self._look_at = 0.0  # when to look at all ranks
        self._wake_up = self._handle_signals()

    def run(self, later: list[bytes]) -> None:
        """Run the ranks to their end, and obey. Raises OSError where they cannot be started."""
        first = self._order.first
        try:
            self._secret = self._keep_secret()
            for number in range(first, first + self._order.ranks):
                self._start(number)
            self._obey(later)
            self._follow()
        finally:
            process_tree.kill_descendants(_KILL_S)  # also what they have left behind
            for rank in self._ranks:
                rank.forget()

    def _keep_secret(self) -> int:
        """Returns the descriptor of a file in memory with the secret, which goes with the processes that have it open.

        The ranks inherit it, since they may be in namespaces or of a user from where /proc does not lead here. A
        child of a rank may have no descriptor, but a way through /proc.
        """
        secret = os.memfd_create("ringtrain-secret")
        os.fchmod(secret, 0o600)
        os.write(secret, bytes.fromhex(self._order.secret))
        path, state = f"/proc/{os.getpid()}/fd/{secret}", os.fstat(secret)
        self._environment["RINGTRAIN_SECRET_FILE"] = path
        self._environment[_SECRET_DESCRIPTOR_VARIABLE] = f"{path} {secret} {state.st_dev} {state.st_ino}"
        return secret

    def _handle_signals(self) -> int:
        process_tree.reset_signals()
        process_tree.adopt_orphans()
        wake_up: int = process_tree.wake_up_by_signals()
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):  # the last two are for the ranks
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._end(self._grace_s))
        return wake_up

    def _start(self, number: int, order: Mapping[str, dict[str, str]] | None = None) -> None:
        """`order`: the one to start it, if there was one."""
        order = order or {}
        has_input = number == 0 and not self._order.agent_stays
        os.chdir(self._order.folder)
        ranks = max(self._order.ranks, len(self._ranks) + 1)
        process_tree.require_descriptors(2 * ranks, f"{ranks} ranks")
        environment = {
            **self._environment,
            **_variables_of_process(self._order, number, order.get("variables")),
            **order.get("horovod", {}),
        }
        given, input_end = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), -1)
        (output, output_end), (errors, errors_end), (ready, ready_end) = os.pipe(), os.pipe(), os.pipe()
        # until the child has handlers of its own, it would obey signals as this process does
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            self._become_rank((given, output_end, errors_end), environment, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor in (given, output_end, errors_end, ready_end):
            os.close(descriptor)
        os.read(ready, 1)  # ends when the child has closed the other end: it is a process group now
        os.close(ready)
        rank = Rank(number, pid, output, errors)
        self._ranks.append(rank)
        for to in rank.streams:
            self._register(rank, to)
        if has_input:
            self._input = Input(input_end)

    def _become_rank(
        self, streams: tuple[int, int, int], environment: dict[str, str], mask: set[int | signal.Signals]
    ) -> NoReturn:
        """In the child: become the wrapper of a rank, or the rank itself where its output is read as it is."""
        code = 127
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in filter(lambda number: callable(signal.getsignal(number)), signal.valid_signals()):
                signal.signal(number, signal.SIG_DFL)
            for to, descriptor in enumerate(streams):
                os.dup2(descriptor, to)
            os.set_inheritable(self._secret, True)
            # os.closerange() would try each number up to a limit that may be a thousand million
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor != self._secret:
                    with contextlib.suppress(OSError):  # that of the folder
                        os.close(descriptor)
            os.environ.clear()
            os.environ.update(environment)
            if self._order.has_wrappers:
                code = rank_wrapper.main(self._order.command, is_of_agent=True)
            else:
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and so would the command
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                os.execvp(self._order.command[0], self._order.command)
        except OSError as error:
            write_lines(2, [f"{rank_wrapper.speaker()}: {self._order.command[0]} cannot be started: {error}".encode()])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _follow(self) -> None:
        self._selector.register(0, selectors.EVENT_READ, self._read_orders)
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._note_signals)
        while self._stays or not all(rank.has_ended for rank in self._ranks):
            for key, _ in self._selector.select(_LOOK_S):
                key.data()
            # not after each part of the output: of n ranks all this costs n calls of the kernel
            if time.monotonic() < self._look_at:
                continue
            self._look_at = time.monotonic() + _LOOK_S
            for rank in [rank for rank in self._ranks if not rank.has_ended]:
                self._note_end(rank)
                if time.monotonic() >= rank.kill_at:
                    rank.kill()

    def _note_signals(self) -> None:
        os.read(self._wake_up, 4096)
        self._look_at = 0.0  # a process may have ended, or been told to

    def _register(self, rank: Rank, to: int) -> None:
        stream, lines = rank.streams[to], Lines()

        def forward() -> None:
            data = os.read(stream, 1 << 16)
            write_lines(to, lines.feed(data) if data else lines.close())
            if not data:
                self._selector.unregister(stream)
                os.close(stream)
                del rank.streams[to]
                self._look_at = 0.0

        self._selector.register(stream, selectors.EVENT_READ, forward)

    def _note_end(self, rank: Rank) -> None:
        """Tell of the end of a rank after all that it had to say."""
        code = None if rank.has_ended else rank.code()
        if code is None:
            return
        rank.drain_until = min(rank.drain_until, time.monotonic() + _DRAIN_S)
        if not rank.streams or time.monotonic() >= rank.drain_until:
            rank.has_ended = True
            _report({"ended": [rank.number, code]})
            if self._order.agent_stays:
                self._forget(rank)

    def _forget(self, rank: Rank) -> None:
        """Another one takes its place: what it has left behind goes now."""
        rank.kill()
        rank.forget()
        self._ranks.remove(rank)
        for stream in rank.streams.values():
            self._selector.unregister(stream)
            os.close(stream)

    def _read_orders(self) -> None:
        data = _next_bytes()
        if not data:
            self._selector.unregister(0)
            self._stays = False
            for rank in self._ranks:
                rank.kill_at = 0.0
        self._obey(self._orders.feed(data))

    def _obey(self, orders: list[bytes]) -> None:
        for order in map(json.loads, orders):
            if "start" in order:
                self._start(order["start"], order)
            elif "signal" in order:
                self._signal(order["signal"], order.get("rank"))
            elif "end" in order:
                self._end(order["end"], order.get("rank"))
            elif "finish" in order:
                self._stays = False
            else:
                self._feed(order["stdin"])

    def _feed(self, text: str | None) -> None:
        assert self._input is not None
        if text is None:
            self._input.close()
        else:
            self._input.add(base64.b64decode(text))
            self._selector.register(self._input, selectors.EVENT_WRITE, self._write_input)

    def _write_input(self) -> None:
        assert self._input is not None
        if self._input.write():
            self._selector.unregister(self._input)
            _report({"took": "stdin"})

    def _signal(self, signal_number: int, number: int | None = None) -> None:
        for rank in self._those(number):
            if signal_number == signal.SIGKILL:
                rank.kill()
            else:
                rank.signal(signal_number)

    def _end(self, grace_s: float, number: int | None = None) -> None:
        if number is None:
            self._stays = False
        for rank in self._those(number):
            rank.end(grace_s)

    def _those(self, number: int | None) -> list[Rank]:
        """Returns the rank of that number, or all ranks."""
        return [rank for rank in self._ranks if number is None or rank.number == number]


def _next_bytes() -> bytes:
    data = os.read(0, 1 << 16)
    if data and TELL_READ_BYTES in sys.argv:
        _report({"read": len(data)})
    return data


def _report(report: dict[str, object]) -> None:
    write_lines(1, [REPORT + json.dumps(report).encode()])


def _own_environment(order: Order) -> dict[str, str]:
    """Without a launcher's variables, which are for the agent alone: an MPI would take all its processes for one."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (order.agent_stays and name.startswith(TOLD_BY_LAUNCHERS))
    }


def _variables_of_process(order: Order, number: int, told: dict[str, str] | None) -> dict[str, str]:
    """`told` is what came with the order to start it, if anything."""
    if told is not None:
        return {**told, rank_wrapper.PROCESS_VARIABLE: str(number)}
    if order.agent_stays:
        # it learns its rank whenever the processes of the job have changed
        member = f"{order.host}/{number}"
        return {"RINGTRAIN_ELASTIC": "1", "RINGTRAIN_MEMBER": member, rank_wrapper.PROCESS_VARIABLE: str(number)}
    return {
        "RINGTRAIN_RANK": str(number),
        "RINGTRAIN_SIZE": str(order.size),
        "RINGTRAIN_LOCAL_RANK": str(number - order.first),
        "RINGTRAIN_LOCAL_SIZE": str(order.ranks),
    }


def main(secret: str = "") -> int:
    """Returns 0 if the ranks have ended, however they did. `secret` is that of an order without one."""
    _report({"began": True})
    orders = Lines()
    lines: list[bytes] = []
    while not lines:
        data = _next_bytes()
        if not data:
            return 1
        lines = orders.feed(data)
    order = Order(**json.loads(lines[0]))
    order = order._replace(secret=order.secret or secret)
    try:
        Agent(orders, order).run(lines[1:])
    except BrokenPipeError:  # the starter has gone
        return 1
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        speaker = order.environment.get(rank_wrapper.SPEAKER_VARIABLE, "ringrun")
        write_lines(2, [f"{speaker}: {os.uname().nodename} cannot start ranks: {what}".encode()])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
