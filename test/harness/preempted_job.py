"""Jobs that are told of their preemption at drawn moments in drawn ways, and what has to be true of each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness import processes
from harness.ringrun_job import ROOT, TIMEOUT_S, wait_until

GRACE_S = 20.0
COMMANDS = {
    "ringrun": [sys.executable, "-m", "ringtrain.run", "--network", "sockets", "--grace-s", str(GRACE_S)],
    "ringrun over MPI": [sys.executable, "-m", "ringtrain.run", "--network", "mpi", "--grace-s", str(GRACE_S)],
    "elastic": [sys.executable, "-m", "ringtrain.run", "--min-np", "1", "--grace-s", str(GRACE_S)],
    "mpirun": [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "--allow-run-as-root"],
}
RANK, LOADER = (str(Path(__file__).with_name(f"preempted_{name}.py")) for name in ("rank", "loader"))


class Trial(NamedTuple):
    """One job, and who gets which signal when; `busy_rank` computes for long in each step."""

    command: str = "ringrun"
    ranks: int = 2
    signal: int = signal.SIGTERM
    target: str = "launcher"  # or "rank", "ranks" or "everything"
    delay_s: float = 0.1
    busy_rank: int = -1
    again_s: float | None = None  # SIGTERM, so long after, to the same target


def drawn(seed: int) -> Trial:
    choice, uniform = (numbers := random.Random(seed)).choice, numbers.uniform
    command, ranks = choice(list(COMMANDS)), choice([2, 3, 4])
    target = choice(["launcher", "rank", "ranks", *(["everything"] if command != "mpirun" else [])])
    signals, again_s = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], choice([None, None, uniform(0, 0.9)])
    if target == "everything":  # batch systems and systemd end all processes by it
        signals = [signal.SIGTERM]
    elif (command, target) == ("mpirun", "launcher"):  # it kills the ranks 0.3 s after a SIGTERM
        signals, again_s = [signal.SIGUSR1], None
    return Trial(command, ranks, choice(signals), target, uniform(0, 0.5), choice([-1, -1, ranks - 1]), again_s)


class Job:
    """A script under a launcher: RANK, or LOADER."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, mark: str):
        self.process = process
        self.folder = folder
        self._mark = mark

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Returns what the ranks have written of this kind, in their order."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{kind}.*"))]

    def wait_for(self, kind: str, count: int) -> None:
        wait_until(lambda: len(self.read(kind)) == count or self.process.poll() is not None)

    def signal(self, number: int, target: str) -> None:
        pids = {
            "launcher": lambda: [self.process.pid],
            "rank": lambda: [self.read("began")[-1]["pid"]],
            "ranks": lambda: [one["pid"] for one in self.read("began")],
            "everything": lambda: processes.of_job(self._mark),
        }[target]()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> tuple[int, str]:
        """Waits for the end. Returns the exit code, and what the job has printed."""
        code = self.process.wait(TIMEOUT_S)
        return code, (self.folder / "printed").read_text()


@contextlib.contextmanager
def job(
    command: list[str], ranks: int, busy_rank: int = -1, steps: int = 1_000_000, script: str = RANK, **more: str
) -> Iterator[Job]:
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "printed", "wb") as printed:
            process = subprocess.Popen(
                [*command, "-n", str(ranks), sys.executable, script, name, str(busy_rank), str(steps)],
                env=processes.mark({**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/test", **more}, mark),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Job(process, folder, mark)
        finally:
            processes.end(process, mark)


def carry_out(trial: Trial) -> dict[str, Any]:
    """Raises AssertionError where the ranks did not save together, or the job did not end as documented.

    Returns the step, and the seconds from the signal to the last checkpoint and to the end.
    """
    with job(COMMANDS[trial.command], trial.ranks, trial.busy_rank) as running:
        running.wait_for("began", trial.ranks)
        time.sleep(trial.delay_s)
        began_s = time.monotonic()
        running.signal(trial.signal, trial.target)
        if trial.again_s is not None:
            time.sleep(trial.again_s)
            # ringrun itself may have ended by now, and then would end by this signal
            if trial.target in ("rank", "ranks") or len(running.read("saved")) < trial.ranks:
                running.signal(signal.SIGTERM, trial.target)
        running.wait_for("saved", trial.ranks)
        saved_s = time.monotonic() - began_s
        code, printed = running.end()
        ended_s = time.monotonic() - began_s
        saved, text = running.read("saved"), f"{trial}\n{printed}"
        assert len(saved) == trial.ranks and saved == [saved[0]] * trial.ranks, f"{saved}\n{text}"
        step, of_ranks = saved[0]["step"], trial.ranks * (trial.ranks - 1) / 2
        assert saved[0]["weight"] == (step + 1) * of_ranks + trial.ranks * step * (step + 1) / 2, f"{saved}\n{text}"
        assert code == os.EX_TEMPFAIL, f"{code}\n{text}"
        grace_s = 30.0 if trial.command == "mpirun" else GRACE_S
        assert 0 < saved[0]["left"] <= grace_s and saved_s < grace_s, f"{saved}\n{text}"
        return {"step": step, "saved_s": saved_s, "ended_s": ended_s}
