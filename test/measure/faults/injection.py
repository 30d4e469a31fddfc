"""Faults: the rank, the time and the kind of each.

kill(rank=1).during("reduce")
stop(rank=2).at_step(3)
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["kill", "stop", "raise", "interrupt", "exit", "vanish", "exhaust memory"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Phase = Literal[
    "start",
    "connect",
    "share",
    "idle",
    "negotiate",
    "reduce",
    "reduce float16",
    "reduce in place",
    "scatter",
    "connect on a GPU",
    "reduce on a GPU",
    "step",
    "call",
    "call without a name",
    "shutdown",
]
"""start: before init(). connect and share: in init(), while the ranks introduce themselves and while they make shared
memory. idle: nothing is submitted. negotiate: the others wait for what this rank has not submitted. reduce: in a stream
of large allreduces, of float32 or else of float16, in memory that the ranks share, or of CuPy's arrays. scatter: in a
stream of reducescatters, of which several travel together. connect on a GPU: in the first allreduce of CuPy's arrays.
step: in a stream of small allreduces. call: in small allreduces that wait, one after the other, half of them under one
name or all without a name. shutdown: the others call shutdown() at that moment."""
PHASES: tuple[Phase, ...] = get_args(Phase)

# These come from outside, at any moment; the others are something that the script itself does.
FROM_OUTSIDE: tuple[Kind, ...] = ("kill", "stop", "interrupt", "vanish")
# Most launchers end the whole job when a process ends so, before the others can say what they see.
ENDING: tuple[Kind, ...] = ("kill", "vanish")


@dataclass(frozen=True)
class Injection:
    """`after_s` counts from the beginning of the phase; `step` is the operation of the phase "step" before which it
    happens, None when time decides; `partners` are struck at the same time."""

    kind: Kind
    rank: int
    partners: tuple[int, ...] = ()
    phase: Phase = "idle"
    after_s: float = 0.2
    step: int | None = None

    def during(self, phase: Phase, after_s: float = 0.2) -> Injection:
        """The same at another moment."""
        return dataclasses.replace(self, phase=phase, after_s=after_s)

    def at_step(self, step: int) -> Injection:
        """The same before the operation of that number."""
        return dataclasses.replace(self, phase="step", step=step)

    def together_with(self, *ranks: int) -> Injection:
        """The same for more ranks than one."""
        return dataclasses.replace(self, partners=ranks)

    def victims(self) -> set[int]:
        return {self.rank, *self.partners}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Injection:
        values = json.loads(path.read_text())
        return cls(**{**values, "partners": tuple(values["partners"])})

    def __str__(self) -> str:
        moment = f"at step {self.step}" if self.step is not None else f"{self.after_s:.3f} s into {self.phase}"
        return f"{self.kind} rank {', '.join(map(str, sorted(self.victims())))} {moment}"


def kill(rank: int) -> Injection:
    """SIGKILL, as the kernel does when memory runs out."""
    return Injection("kill", rank)


def stop(rank: int) -> Injection:
    """SIGSTOP, which looks like a hung process or host."""
    return Injection("stop", rank)


def raises(rank: int) -> Injection:
    """An exception that the script does not catch."""
    return Injection("raise", rank)


def interrupt(rank: int) -> Injection:
    """Ctrl-C for that rank alone."""
    return Injection("interrupt", rank)


def exits(rank: int) -> Injection:
    """`sys.exit(3)`."""
    return Injection("exit", rank)


def vanishes(rank: int) -> Injection:
    """`os._exit(3)`: the process ends without a word."""
    return Injection("vanish", rank)


def exhausts_memory(rank: int) -> Injection:
    """More than the limit of the process (`ulimit -v`) allows."""
    return Injection("exhaust memory", rank)
