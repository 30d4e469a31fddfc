"""Timelines of jobs that never ran: what the ranks would have written, from how long they compute and send."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ringtrain.record.timeline_files import events_in, write_merged

SCRIPT = 0


class Gradient(NamedTuple):
    """One allreduce of each step, submitted when so much of the compute is done, in percent."""

    name: str
    bytes: int
    after_percent: int
    site: str = "train.py:7"


@dataclass
class MadeUpJob:
    """Ranks that compute, submit gradients meanwhile, and wait for them in order; times are whole microseconds.

    A gradient is agreed on `negotiation_us` after the last rank has submitted it. It begins when the ones before it
    have ended, and takes as long as its bus bytes do at `gb_per_s`. A step ends with its last gradient, on all ranks.
    """

    ranks: int
    steps: int
    compute_us: Callable[[int, int], int]  # of a rank in a step
    gradients: list[Gradient]
    negotiation_us: int = 50
    gb_per_s: float = 1.0
    hosts: list[str] = field(default_factory=list)  # of the ranks; by default all are on one

    def write(self, path: Path) -> None:
        """Writes what `stop_timeline` would have left."""
        write_merged(path, (events_in(part.splitlines()) for part in self.parts()))

    def parts(self) -> list[bytes]:
        """Writes what each rank would have written while the job ran."""
        hosts = self.hosts or ["node1"] * self.ranks
        writers = [_Writer(rank, hosts[rank], [one.name for one in self.gradients]) for rank in range(self.ranks)]
        now = 1000.0
        for step in range(1, self.steps + 1):
            for writer in writers:
                writer.mark(f"step {step}", now)
            now = self._step(writers, step, now)
        for writer in writers:
            writer.mark(f"step {self.steps + 1}", now)
        return [writer.text() for writer in writers]

    def _step(self, writers: list[_Writer], step: int, begin: float) -> float:
        compute = [self.compute_us(rank, step) for rank in range(self.ranks)]
        free = begin
        waits_from = [begin + time for time in compute]
        for gradient in self.gradients:
            submitted = [begin + time * gradient.after_percent / 100 for time in compute]
            agreed = max(submitted) + self.negotiation_us
            begun = max(agreed, free)
            free = begun + self._send_us(gradient)
            for rank, writer in enumerate(writers):
                writer.operation(gradient, (submitted[rank], agreed, begun, free))
                if free > waits_from[rank]:
                    writer.span("waiting", SCRIPT, waits_from[rank], free)
                    waits_from[rank] = free
        return free

    def _send_us(self, gradient: Gradient) -> float:
        return gradient.bytes * 2 * (self.ranks - 1) / self.ranks / self.gb_per_s / 1000


class _Writer:
    """Writes as csrc/record/timeline.cc does: one event on each line, an operation before what happened within it."""

    def __init__(self, rank: int, host: str, names: list[str]) -> None:
        self._rank = rank
        self._tracks = {name: track for track, name in enumerate(names, start=1)}
        self._lines: list[str] = []
        self._name("process_name", {}, f"rank {rank} on {host}", start_time_since_epoch_in_micros=0)
        for name, track in {"script": SCRIPT, **self._tracks}.items():
            self._name("thread_name", {"tid": track}, name if track == SCRIPT else f"allreduce.{name}")

    def text(self) -> bytes:
        return ("[\n" + ",\n".join(self._lines) + "\n]\n").encode()

    def operation(self, gradient: Gradient, times: tuple[float, float, float, float]) -> None:
        submitted, agreed, begun, ended = times
        track = self._tracks[gradient.name]
        arguments = {"name": gradient.name, "bytes": gradient.bytes, "process_set": 0, "site": gradient.site}
        self.span("ALLREDUCE", track, submitted, ended, arguments)
        announced = min(submitted + 5, agreed)
        self.span("queued", track, submitted, announced)
        self.span("NEGOTIATE_ALLREDUCE", track, announced, agreed)
        self.span("ready", track, agreed, begun)
        self.span("ring", track, begun, ended)

    def span(self, name: str, track: int, begin: float, end: float, arguments: dict[str, object] | None = None) -> None:
        if end - begin < 0.1:
            return
        event = {"name": name, "ph": "X", "ts": round(begin, 3), "dur": round(end - begin, 3)}
        self._add({**event, "pid": self._rank, "tid": track, **({"args": arguments} if arguments else {})})

    def mark(self, text: str, at: float) -> None:
        self._add({"name": text, "ph": "i", "ts": round(at, 3), "pid": self._rank, "tid": SCRIPT, "s": "p"})

    def _name(self, kind: str, track: dict[str, int], name: str, **more: int) -> None:
        self._add({"name": kind, "ph": "M", "pid": self._rank, **track, "args": {"name": name, **more}})

    def _add(self, event: dict[str, object]) -> None:
        self._lines.append(json.dumps(event, separators=(",", ":")))
