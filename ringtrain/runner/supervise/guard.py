"""Runs as a script between ringrun and its launcher: starts the launcher, and leaves none of its descendants.

The guard outlives ringrun. When ringrun ends, also by SIGKILL, the guard ends the launcher and then kills its
descendants on this host, in all sessions. The guard hands signals of ringrun on to the launcher. It reports signals of
anybody else, as for all processes of a service or a batch job, to ringrun, which alone decides how the job ends.

Needs nothing but Python itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable

if __name__ == "__main__":  # a script that does not import ringtrain
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import process_tree  # type: ignore[import-not-found, unused-ignore]
else:
    from ringtrain.runner.supervise import process_tree

# From ringrun: kill everything at once.
KILL_ALL = signal.SIGQUIT

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The guard waits for all signals but those that cannot be caught or that the kernel sends for a fault of this process.
_AWAITED = signal.valid_signals() - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT),
}
_LOOK_S = 2.0
# How long a launcher may take to end after ringrun has, and its descendants after SIGKILL.
_LAUNCHER_S = 3.0
_KILL_S = 10.0
# As in frames.py: a report for ringrun on standard error.
_REPORT = b"\x1e0r"


class Guard:
    """One thread. `parent` is the process that started it; `last_signal` is for the launcher when that has ended."""

    def __init__(self, parent: int, last_signal: int, shielded: set[int], reports: bool):
        """
        Args:
            shielded: signals that the launcher does not get, because ringrun hands them on in its own way.
            reports: whether `parent` reads reports from standard error.
        """
        self._parent = parent
        self._last_signal = last_signal
        self._shielded = shielded
        self._reports = reports
        self._launcher = 0
        self._code: int | None = None

    def run(self, command: list[str]) -> int:
        """Returns the exit code of the command, as a shell gives it."""
        process_tree.reset_signals()
        process_tree.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        process_tree.signal_at_end_of_parent(signal.SIGCHLD)  # a wake-up
        if os.getppid() != self._parent:
            return 1
        self._launcher = self._start(command)
        kill_at = float("inf")
        while self._code is None and time.monotonic() < kill_at:
            self._obey(signal.sigtimedwait(_AWAITED, min(_LOOK_S, max(0.0, kill_at - time.monotonic()))))
            self._reap()
            if os.getppid() != self._parent and kill_at == float("inf"):
                self._signal(self._last_signal)
                kill_at = time.monotonic() + _LAUNCHER_S
        unkillable = process_tree.kill_descendants(_KILL_S)
        self._reap()
        code = -signal.SIGKILL if self._code is None else self._code
        self._report({"launcher": code, "unkillable": unkillable})
        return code if code >= 0 else 128 - code

    def _start(self, command: list[str]) -> int:
        guard = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                process_tree.signal_at_end_of_parent(signal.SIGKILL)
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and so would the command
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, self._shielded)
                if os.getppid() == guard:
                    os.execv(command[0], command)
            except OSError as error:
                os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
            finally:
                os._exit(127)
        return pid

    def _obey(self, told: signal.struct_siginfo | None) -> None:
        if told is None or told.si_signo == signal.SIGCHLD:
            return
        if told.si_pid != self._parent:
            if told.si_signo in _ENDING_SIGNALS:
                self._report({"signalled": told.si_signo})
        elif told.si_signo == KILL_ALL:
            self._signal(signal.SIGKILL)
        else:
            self._signal(told.si_signo)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._launcher, number)

    def _reap(self) -> None:
        """Takes the ends of the launcher and of adopted orphans."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._launcher:
                    self._code = os.waitstatus_to_exitcode(ended[1])

    def _report(self, report: dict[str, object]) -> None:
        if self._reports:
            with contextlib.suppress(OSError):
                os.write(2, _REPORT + json.dumps(report).encode() + b"\n")


def command_of_guard(
    parent: int, last_signal: int, command: list[str], shielded: Iterable[int] = (), reports: bool = False
) -> list[str]:
    """Returns the command line of a guard for `command`, whose first word is a path."""
    settings = {"parent": parent, "last_signal": int(last_signal), "shielded": list(map(int, shielded))}
    return [sys.executable, "-I", "-S", __file__, json.dumps({**settings, "reports": reports}), *command]


def main() -> int:
    settings = json.loads(sys.argv[1])
    settings["shielded"] = set(settings["shielded"])
    return Guard(**settings).run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
