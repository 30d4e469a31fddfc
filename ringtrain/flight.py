"""Compares the flight records that ranks write when a job fails: `python -m ringtrain.flight FOLDER`.

FOLDER has a file for each rank, see record/flight_recorder.py; those of several hosts must be brought together first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ringtrain.errors import list_of_ranks


@dataclass
class Flight:
    """The record of one rank."""

    job: str
    written_s: float
    rank: int
    host: str
    pid: int
    reason: str
    process_sets: dict[int, list[int]]
    ended: list[dict[str, Any]]
    pending: list[dict[str, Any]]
    threads: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Flight:
        """Raises ValueError for a file that is not a flight record."""
        try:
            content = json.loads(path.read_text())
            shift = content["time_s"] - content["monotonic_s"]
            operations = [_on_the_wall_clock(operation, shift) for operation in content["operations"]]
            return cls(
                content["job"],
                content["time_s"],
                content["rank"],
                content["host"],
                content["pid"],
                content["reason"],
                {int(number): ranks for number, ranks in content["process_sets"].items()},
                [operation for operation in operations if operation["ended_s"]],
                [operation for operation in operations if not operation["ended_s"]],
                content.get("threads", []),
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} was not written by ringtrain: {error!r}") from None

    def unfinished(self) -> list[dict[str, Any]]:
        """Returns what was pending when something went wrong: it still is, or ended with that error."""
        return [*(operation for operation in self.ended if operation["error"]), *self.pending]


def _on_the_wall_clock(operation: dict[str, Any], shift: float) -> dict[str, Any]:
    times = {key: value + shift for key, value in operation.items() if key.endswith("_s") and value}
    return {**operation, **times}


def read_folder(folder: Path) -> list[Flight]:
    """The flights of all ranks that have written, by rank.

    Raises:
        ValueError: there is none, or a file was not written by ringtrain.
    """
    flights = [Flight.read(path) for path in folder.glob("rank-*.json")]
    if not flights:
        raise ValueError(f"there are no files rank-*.json in {folder}")
    return sorted(flights, key=lambda flight: flight.rank)


def of_last_job(flights: Sequence[Flight]) -> tuple[list[Flight], list[Flight]]:
    """Separates the flights of the job that has written last from those of earlier ones in the same folder."""
    job = max(flights, key=lambda flight: flight.written_s).job
    return [flight for flight in flights if flight.job == job], [flight for flight in flights if flight.job != job]


def first_difference(flights: Sequence[Flight]) -> str:
    """Returns the first difference between the ranks, in a sentence or two."""
    known = {flight.rank: flight for flight in flights}
    unfinished = [(operation, flight) for flight in flights for operation in flight.unfinished()]
    for operation, flight in sorted(unfinished, key=lambda pair: pair[0]["submitted_s"]):
        members = flight.process_sets.get(operation["process_set"], [flight.rank])
        same = {rank: _same(operation, known[rank]) for rank in members if rank in known}
        missing = [rank for rank in members if same.get(rank) is None]
        if missing:
            return _tell_missing(operation, flight, missing, known)
        different = [rank for rank, other in same.items() if other and _what(other) != _what(operation)]
        if different:
            other = same[different[0]]
            assert other is not None
            return (
                f"{_title(operation)}: rank {flight.rank} submitted {_what(operation)}{_at(operation)}, rank "
                f"{different[0]} submitted {_what(other)}{_at(other)}."
            )
    if unfinished:
        return "The ranks that have written agree: each waits for the same operations."
    return "No rank waited for anything."


def _same(operation: dict[str, Any], flight: Flight) -> dict[str, Any] | None:
    """The unfinished operation of another rank that this one would meet."""
    key = (operation["process_set"], operation["name"])
    return next((other for other in flight.unfinished() if (other["process_set"], other["name"]) == key), None)


def _tell_missing(operation: dict[str, Any], flight: Flight, missing: list[int], known: dict[int, Flight]) -> str:
    text = (
        f"{_title(operation)} ({_what(operation)}) was submitted by rank {flight.rank}{_at(operation)} at "
        f"{_clock(operation['submitted_s'])}, but not by {list_of_ranks(missing)}."
    )
    silent = [rank for rank in missing if rank not in known]
    if silent:
        text += (
            f" Of {list_of_ranks(silent)} there is no file: dead, stopped, on another host, or busy with something "
            "else, and then `kill -USR1 PID` has it write one."
        )
    for rank in missing:
        if rank in known:
            text += " " + _tell_last(known[rank])
            break
    return text


def _tell_last(flight: Flight) -> str:
    where = next((thread["whereabouts"] for thread in flight.threads if thread["is_main"]), "")
    if where and not flight.unfinished():
        return f"Rank {flight.rank} was {where}. {_tell_last_operation(flight)}"
    return _tell_last_operation(flight)


def _tell_last_operation(flight: Flight) -> str:
    if flight.unfinished():
        last = flight.unfinished()[0]
        return f"Rank {flight.rank} waited for {_title(last)}{_at(last)} instead."
    if flight.ended:
        last = flight.ended[-1]
        return f"The last that rank {flight.rank} did was {_title(last)}{_at(last)}, until {_clock(last['ended_s'])}."
    return f"Rank {flight.rank} has done nothing."


def _title(operation: dict[str, Any]) -> str:
    title: str = operation.get("title", f'{operation["kind"]} "{operation["name"]}"')
    return title


def _what(operation: dict[str, Any]) -> str:
    op = operation.get("op")
    return " ".join([operation["kind"], *([op] if op else []), *operation["tensors"][:4]])


def _at(operation: dict[str, Any]) -> str:
    return f" at {operation['site']}" if operation["site"] else ""


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S.%f")[:-3]


def report(flights: Sequence[Flight], shown: int = 3) -> Iterator[str]:
    """The lines of the report: each rank, and what differs first."""
    for flight in flights:
        done = [operation for operation in flight.ended if not operation["error"]]
        yield f"rank {flight.rank} on {flight.host}, process {flight.pid}: {flight.reason}"
        for operation in done[-shown:]:
            yield f"    {_clock(operation['ended_s'])}  done     {_title(operation)}{_at(operation)}"
        for operation in flight.unfinished()[:shown]:
            state = operation["error"] or ("working" if operation["begun_s"] else "waiting")
            since = _clock(operation["submitted_s"])
            yield f"    {since}  {state:8} {_title(operation)} {_what(operation)}{_at(operation)}"
        more = len(flight.unfinished()) - shown
        if more > 0:
            yield f"    ... and {more} more that did not end"
        for thread in flight.threads:
            innermost = thread["stack"][0]
            inside = "" if innermost == thread["whereabouts"] else f", {innermost}"
            yield f"    {thread['name']} was {thread['whereabouts']}{inside}"
    yield ""
    yield f"First difference: {first_difference(flights)}"


def stacks_without_gil(folder: Path, flights: Sequence[Flight]) -> Iterator[str]:
    """The lines of ranks that could write nothing but their stacks, since one of their threads kept the GIL."""
    known = {flight.rank for flight in flights}
    for path in sorted(folder.glob("rank-*.stacks")):
        rank = path.stem.removeprefix("rank-")
        if not rank.isdecimal() or int(rank) in known:
            continue
        reason, *stacks = path.read_text(errors="replace").splitlines()
        yield f"rank {rank}, where a thread keeps the GIL: {reason}"
        yield from (f"    {line}" for line in stacks)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0, or 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m ringtrain.flight", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with a file rank-N.json of each rank")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="operations of each rank to show (default: 3)")
    options = parser.parse_args(arguments)
    try:
        flights, earlier = of_last_job(read_folder(options.folder))
    except (OSError, ValueError) as error:
        print(f"python -m ringtrain.flight: {error}", file=sys.stderr)
        return 2
    print("\n".join([*stacks_without_gil(options.folder, [*flights, *earlier]), *report(flights, options.show)]))
    if earlier:
        print(
            f"Left out, since an earlier job wrote it: what {list_of_ranks([flight.rank for flight in earlier])} wrote."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
