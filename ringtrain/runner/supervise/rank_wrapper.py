"""Beside each rank: starts the command of the rank as its child, sends on what it writes, and tells how it ends.

On every host an agent forks it (start/agent.py), or a launcher runs it as a script (wrap.py); it does not import
ringtrain, so that it starts fast and stays small. Everything goes through this process's standard error as frames,
lines that no launcher tears apart: RECORD, the rank, a letter, a payload. `frames.py` reads them.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import resource
import select
import signal
import stat
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES

if not __package__:  # of a script that does not import ringtrain, and has this folder on its path
    import binding  # type: ignore[import-not-found, unused-ignore]
    import process_tree  # type: ignore[import-not-found, unused-ignore]
else:
    from ringtrain.runner.supervise import binding, process_tree

RECORD = b"\x1e"
# Letters of frames. The output of a rank comes in lines (small letter), or in parts that a later one goes on with.
STARTED, TOLD, ENDED, STDOUT, STDERR, COUNTED = "s", "t", "x", "o", "e", "n"

# Asks a wrapper to send SIGTERM to its rank, unless that has just come to both from somebody else. Ignored by default.
END_RANK = signal.SIGURG
# From ringrun to a starter, after the ranks have had their time: end the job now, on all hosts.
END_NOW = signal.SIGRTMIN
# In the environment: how long a rank may take to end after SIGTERM, in seconds.
GRACE_VARIABLE = "RINGRUN_GRACE_S"
# In the environment: the command that was typed, in whose name everything is said.
SPEAKER_VARIABLE = "RINGRUN_SPEAKER"

# In the environment of each process of a job: what identifies the job.
JOB_VARIABLE = "RINGRUN_JOB"

# In the environment of a process of an elastic job, whose rank changes: its number.
PROCESS_VARIABLE = "RINGRUN_PROCESS"

# In the environment: how many ranks each host has, such as "2,2", where the ranks fill the hosts in this order.
RANKS_OF_HOSTS_VARIABLE = "RINGRUN_RANKS_OF_HOSTS"

# In the environment: a host and a free port where torch.distributed may listen on rank 0, as in "h1:30017".
TORCH_PLACE_VARIABLE = "RINGRUN_TORCH_PLACE"

# In the environment of a rank: the descriptor to which it writes at its end what it has counted, and the inode of that.
COUNTS_VARIABLE = "RINGRUN_COUNTS"

# In the environment where no rank reads standard input. Open MPI itself would give rank 0 one that never ends.
NO_STDIN_VARIABLE = "RINGRUN_NO_STDIN"

# In the environment: the library in which jaxlib looks for the functions of MPI.
JAXLIB_VARIABLE = "MPITRAMPOLINE_LIB"

_RANK_VARIABLES = (PROCESS_VARIABLE, "RINGTRAIN_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
# Rank, size, local rank and local size, as each launcher calls them; Slurm does not name the last one.
_PLACE_VARIABLES = (
    ("RINGTRAIN_RANK", "RINGTRAIN_SIZE", "RINGTRAIN_LOCAL_RANK", "RINGTRAIN_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
# Slurm forwards lines of up to 1024 bytes in one piece, Open MPI whatever it reads at once, up to 4096.
_PAYLOAD_BYTES = 900
_BATCH_BYTES = 4096
_DRAIN_S = 1.0
_LOOK_S = 2.0
# How long a wrapper stays at most, beyond the grace of the ranks: ringrun tells it to end long before that.
_STAY_LONGER_S = 30.0
# SIGTERM that comes to all processes of a service or a batch job comes to the rank itself, too, and ringrun, which gets
# it as well, asks for another one. So long before and after that request the wrapper takes both for the same.
_SAME_BEFORE_S, _SAME_AFTER_S = 5.0, 0.2
_KILL_S = 1.0
# Launchers and batch systems signal the whole process group, this process and the rank alike.
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS_OF_THE_RANK = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP),
    *(signal.SIGQUIT, signal.SIGALRM, signal.SIGXCPU),
)


class Sender:
    """Writes frames to a file descriptor that the launcher reads."""

    def __init__(
        self,
        descriptor: int,
        rank: int,
        require_launcher: Callable[[], None] = lambda: None,
        reader_makes_lines: bool = False,
    ):
        """
        Args:
            require_launcher: called now and then while the output is not read, and may end this process.
            reader_makes_lines: the reader makes lines of what it reads, as an agent does. A launcher passes on what it
                reads, so that frames have to be read in one piece.
        """
        self._descriptor = descriptor
        self._await = self._await_room if reader_makes_lines else self._await_reader
        self._rank = b"%d" % rank
        self._require_launcher = require_launcher
        self._is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT if reader_makes_lines else 0)

    def send(self, letter: str, payload: bytes) -> None:
        """Send one short frame."""
        self._write(self._frame(letter, payload))

    def send_output(self, letter: str, data: bytes) -> None:
        """Send what a rank has written: whole lines, and the beginning of one that has no end yet."""
        batch = b""
        for frame in self._output_frames(letter, data):
            if len(batch) + len(frame) > _BATCH_BYTES:
                self._write(batch)
                batch = b""
            batch += frame
        self._write(batch)

    def _output_frames(self, letter: str, data: bytes) -> Iterator[bytes]:
        for line in _lines(data):
            text = line.removesuffix(b"\n")
            last = (len(text) - 1) // _PAYLOAD_BYTES if text else 0
            for part in range(last + 1):
                is_whole = part == last and line.endswith(b"\n")
                payload = text[part * _PAYLOAD_BYTES : (part + 1) * _PAYLOAD_BYTES]
                yield self._frame(letter if is_whole else letter.upper(), payload)

    def _frame(self, letter: str, payload: bytes) -> bytes:
        return RECORD + self._rank + letter.encode() + payload + b"\n"

    def _write(self, batch: bytes) -> None:
        """Raises BrokenPipeError where the reader has gone; the bytes in the pipe stay there then."""
        self._await()
        while batch:
            batch = batch[os.write(self._descriptor, batch) :]

    def _await_room(self) -> None:
        """Waits until a batch can be written at once."""
        while not (ready := self._poll.poll(1000 * _LOOK_S)):
            self._require_launcher()
        if any(events & select.POLLERR for _, events in ready):
            raise BrokenPipeError

    def _await_reader(self) -> None:
        """Waits until the launcher has read what was written before."""
        pause_s, look_at = 0.0001, time.monotonic() + _LOOK_S
        while self._is_pipe and self._unread() > 0:
            if any(events & select.POLLERR for _, events in self._poll.poll(0)):
                raise BrokenPipeError
            if time.monotonic() > look_at:
                self._require_launcher()
                look_at += _LOOK_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.002)

    def _unread(self) -> int:
        buffer = bytearray(4)
        fcntl.ioctl(self._descriptor, termios.FIONREAD, buffer)
        return int.from_bytes(buffer, sys.byteorder)


def _lines(data: bytes) -> list[bytes]:
    """Splits data into lines with their ends; splitlines() would also end a line at \\r."""
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


class Wrapper:
    """The parent of one rank.

    It handles the signals that end or stop a job, and so outlives them: what they do is the rank's business. One that
    is ignored when this process starts, as by nohup, stays ignored, also for the rank.
    """

    def __init__(self, command: list[str], rank: int, is_of_agent: bool):
        self._command = command
        self._launcher = os.getppid()
        self._sender = Sender(sys.stderr.fileno(), rank, self._require_launcher, is_of_agent)
        self._stays = not is_of_agent and GRACE_VARIABLE in os.environ  # an agent ends no other rank
        self._times_told_to_end = self._times_signalled = 0
        self._told_at = float("-inf")  # when SIGTERM or its like last came to this process and the rank
        self._asked_at: float | None = None  # when ringrun has asked for SIGTERM that is not sent yet
        # whom scancel signals; a launcher that ends may read one frame, which is that of the end
        self._has_to_say_told = _slurm_step() != "-"
        self._has_ended = False
        process_tree.adopt_orphans()
        self._wake_up = process_tree.wake_up_by_signals()
        self._handled = self._handle_signals()
        process_tree.reset_signals()  # a request may have come before there was a handler, and is blocked until now
        # the end of the launcher's process wakes this one up, which then ends the rank at once
        process_tree.signal_at_end_of_parent(signal.SIGCHLD)

    def run(self) -> int:
        """Run the command to its end. Returns its exit code, negative for a signal, or 0 if it was told to end.

        An end that a launcher would answer by ending the other ranks is kept from it until ringrun lets it know.
        """
        streams, pid = self._start()
        self._sender.send(STARTED, f"{os.uname().nodename} {pid} {_slurm_step()}".encode())
        status = None
        while status is None:
            self._forward(streams, _LOOK_S)
            self._require_launcher()
            if self._told_at > 0 and self._has_to_say_told:
                self._has_to_say_told = False
                self._sender.send(TOLD, b"")
            status = _status_of(pid)
        ended_at = time.monotonic()
        # a process that the rank has left behind may hold its pipes open for ever
        while streams and time.monotonic() - ended_at < _DRAIN_S:
            self._forward(streams, _DRAIN_S / 10)
        age_s = time.monotonic() - ended_at
        code = os.waitstatus_to_exitcode(status)
        was_told, self._has_ended = self._times_told_to_end > 0, True
        self._sender.send(ENDED, f"{code} {age_s:.6f} {int(was_told)}".encode())
        # another process may take its place, and an agent ends no other rank and has to know how this one ended
        if PROCESS_VARIABLE in os.environ:
            process_tree.kill_descendants(_KILL_S)
            return code
        if was_told or code != 0:
            self._stay()
        return 0 if was_told else code

    def _handle_signals(self) -> list[signal.Signals]:
        """Returns those that have a handler now."""
        handlers: dict[signal.Signals, Callable[[int, object], None]] = {
            **dict.fromkeys(_SIGNALS_OF_THE_RANK, _do_nothing),
            **dict.fromkeys(_ENDING_SIGNALS, self._note),
        }
        handlers = {number: how for number, how in handlers.items() if signal.getsignal(number) is not signal.SIG_IGN}
        handlers |= {signal.SIGCHLD: _do_nothing, END_RANK: self._note_request}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return list(handlers)

    def _start(self) -> tuple[dict[int, str], int]:
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        counts, counts_end = os.pipe()
        parent = os.getpid()
        # a signal that came to the child before it has its own handlers back would be lost
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handled)
        pid = os.fork()
        if pid == 0:
            os.set_inheritable(counts_end, True)
            os.environ[COUNTS_VARIABLE] = f"{counts_end} {os.fstat(counts_end).st_ino}"
            self._become_rank(parent, out_end, err_end, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(out_end)
        os.close(err_end)
        os.close(counts_end)
        return {out: STDOUT, err: STDERR, counts: COUNTED}, pid

    def _become_rank(self, wrapper: int, out: int, err: int, mask: set[int | signal.Signals]) -> None:
        """In the child: take the command's place, and end when the wrapper does."""
        try:
            process_tree.signal_at_end_of_parent(signal.SIGKILL)
            if os.getppid() != wrapper:  # it ended before that
                return
            signal.set_wakeup_fd(-1)
            # Python ignores the last two, and so would the command
            for number in (*self._handled, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.environ.update(variables_of_libraries(os.environ))
            os.environ.update(variable_of_jaxlib(os.environ))
            os.environ.update(binding.threads(os.environ))
            binding.bind(os.environ)
            if NO_STDIN_VARIABLE in os.environ:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.execvp(self._command[0], self._command)
        except OSError as error:
            os.write(2, f"{speaker()}: {self._command[0]} cannot be started: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    def _forward(self, streams: dict[int, str], timeout_s: float) -> None:
        wait_s = timeout_s if self._asked_at is None else min(timeout_s, _SAME_AFTER_S)
        ready, _, _ = select.select([*streams, self._wake_up], [], [], wait_s)
        self._send_requested_signal()
        for descriptor in ready:
            if descriptor == self._wake_up:
                os.read(descriptor, 4096)
                continue
            data = os.read(descriptor, 1 << 16)
            if data:
                self._sender.send_output(streams[descriptor], data)
            else:
                os.close(descriptor)
                del streams[descriptor]

    def _stay(self) -> None:
        """Keep the end of the rank from the launcher, which would end the other ranks before they are ready.

        ringrun knows of it, and has this process ended with the last of them.
        """
        stay_s = float(os.environ[GRACE_VARIABLE]) + _STAY_LONGER_S if self._stays else 0.0
        signalled, until = self._times_signalled, time.monotonic() + stay_s
        # requests are for ranks that still run
        while self._times_signalled == signalled and time.monotonic() < until:
            self._forward({}, min(_LOOK_S, max(0.0, until - time.monotonic())))
            self._require_launcher()

    def _require_launcher(self) -> None:
        """End the rank if the launcher's process on this host has died: no other process would."""
        if os.getppid() != self._launcher:
            process_tree.kill_descendants(_KILL_S)
            os.killpg(0, signal.SIGKILL)

    def _note(self, number: int, frame: object) -> None:
        self._times_told_to_end += 1
        self._times_signalled += 1
        self._told_at = time.monotonic()

    def _note_request(self, number: int, frame: object) -> None:
        self._times_told_to_end += 1
        self._asked_at = time.monotonic()

    def _send_requested_signal(self) -> None:
        """As a launcher would: whatever the rank has started gets SIGTERM, too, and so does this process."""
        if self._asked_at is None or time.monotonic() < self._asked_at + _SAME_AFTER_S:
            return
        if not self._has_ended and self._told_at < self._asked_at - _SAME_BEFORE_S:
            os.killpg(0, signal.SIGTERM)
        self._asked_at = None


def speaker() -> str:
    """The command that was typed."""
    return os.environ.get(SPEAKER_VARIABLE, "ringrun")


def variables_of_libraries(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what horovodrun and torchrun tell a rank, for libraries that detect a job by it.

    The agent of an elastic job gives its processes all but the name of the host.
    """
    named = {"HOROVOD_HOSTNAME": os.uname().nodename}
    if PROCESS_VARIABLE in environ:
        return named if "RINGTRAIN_MEMBER" in environ else {}
    place = next((found for names in _PLACE_VARIABLES if (found := _numbers(environ, names))), None)
    if place is None:
        return {}
    rank, size, *of_host = place
    hosts = [int(ranks) for ranks in environ.get(RANKS_OF_HOSTS_VARIABLE, str(size)).split(",")]
    host, local_rank, local_size = _place_on_hosts(rank, hosts)
    fills_hosts = not of_host or of_host == [local_rank, local_size][: len(of_host)]
    if not fills_hosts:
        # the launcher has not filled the hosts one after another, or knows hosts that ringrun does not
        local_rank, local_size = of_host[0], of_host[-1] if len(of_host) == 2 else 1
        host, hosts = rank // local_size, [local_size] * -(-size // local_size)
    cross_rank, cross_size = (sum(ranks > local_rank for ranks in some) for some in (hosts[:host], hosts))
    numbers = {"": (rank, size), "LOCAL_": (local_rank, local_size), "CROSS_": (cross_rank, cross_size)}
    for kind, (own, all_of_them) in numbers.items():
        named |= {f"HOROVOD_{kind}RANK": str(own), f"HOROVOD_{kind}SIZE": str(all_of_them)}
        if kind != "CROSS_":
            named |= {f"{kind}RANK": str(own), f"{kind}WORLD_SIZE": str(all_of_them)}
    named["GROUP_RANK"] = str(host)
    torch_place = environ.get(TORCH_PLACE_VARIABLE, "") if fills_hosts else ""
    if torch_place and not (environ.get("MASTER_ADDR") or environ.get("MASTER_PORT")):
        named["MASTER_ADDR"], _, named["MASTER_PORT"] = torch_place.rpartition(":")
    return named


def variable_of_jaxlib(environ: Mapping[str, str]) -> dict[str, str]:
    """Names the core, which carries XLA's collectives, for jaxlib, also if jax is imported before ringtrain."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    cores = (os.path.join(package, "_core" + suffix) for suffix in EXTENSION_SUFFIXES)
    core = next(filter(os.path.exists, cores), None)
    return {} if core is None or JAXLIB_VARIABLE in environ else {JAXLIB_VARIABLE: core}


def _numbers(environ: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    """Nothing where rank or size are missing, and only these two where the local rank is."""
    texts = [environ.get(name, "") for name in names]
    known = list(itertools.takewhile(str.isdigit, texts))
    return [int(text) for text in known] if len(known) >= 2 else []


def _place_on_hosts(rank: int, hosts: list[int]) -> tuple[int, int, int]:
    """The number of the host, and the local rank and size there; the last host takes more ranks than it has."""
    host, local_rank = 0, rank
    while host + 1 < len(hosts) and local_rank >= hosts[host]:
        local_rank -= hosts[host]
        host += 1
    return host, local_rank, hosts[host]


def _status_of(pid: int) -> int | None:
    """Takes the ends of all children, also of adopted ones. Returns the status of `pid` if it has ended."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                found = ended[1]
    return found


def _do_nothing(number: int, frame: object) -> None:
    pass


def _slurm_step() -> str:
    """The job step that this process is a task of, as Slurm's commands name it; `-` for none."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    return ".".join(os.environ[name] for name in names) if all(name in os.environ for name in names) else "-"


def _end_like(code: int) -> int:
    """The exit code for this process; a signal that ended the rank ends this process, too, so the launcher sees it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code if code >= 0 else 128 - code


def _own_rank() -> int:
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def main(command: list[str], is_of_agent: bool = False) -> int:
    """Makes this process the wrapper of the command. Returns its exit code, or ends it as the command has ended."""
    # the reader of the frames is gone when a write fails; the child is killed with this process
    with contextlib.suppress(BrokenPipeError):
        return _end_like(Wrapper(command, _own_rank(), is_of_agent).run())
    return 1
