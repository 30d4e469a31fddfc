"""The output of `ringrun status`: text for people, JSON for programs."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ringtrain.errors import list_of_ranks
from ringtrain.job.job_file import Job
from ringtrain.runner.status.asking import Silence, Snapshot
from ringtrain.runner.status.verdict import LONG_S, Verdict, percent, seconds
from ringtrain.runner.status.waits import Waiting, in_words, some_ranks, waiting_in

CLEAR = "\x1b[H\x1b[2J"
# Changes where fields change their meaning or go; new ones may come.
FORMAT = 1
_ID_LENGTH = 8
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "disk",
    "T": "stopped",
    "t": "traced",
    "Z": "gone",
    "X": "gone",
    "": "gone",
}
_HEAD = ("rank", "host", "pid", "state", "step", "steps/s", "waits", "memory", "cores", "does")


def text(job: Job, snapshot: Snapshot, verdict: Verdict) -> str:
    rows = [_HEAD, *_rows(job, snapshot)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    table = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return "\n".join([line_of_job(job), "", verdict.sentence, "", *table])


def line_of_job(job: Job) -> str:
    hosts = list(dict.fromkeys(rank.host for rank in job.ranks))
    on = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    generation = "" if job.generation is None else f", generation {job.generation}"
    ranks = "1 rank" if len(job.ranks) == 1 else f"{len(job.ranks)} ranks"
    network = f", {job.network}" if job.network else ""
    age = seconds(max(0.0, time.time() - job.since_s))
    return f"job {job.id[:_ID_LENGTH]}: {shlex.join(job.command)}: {ranks} on {on}{network}{generation}, for {age}"


def _rows(job: Job, snapshot: Snapshot) -> Iterator[tuple[str, ...]]:
    of_rank: dict[int, Waiting] = {}
    for waiting in waiting_in(snapshot, len(job.ranks)):
        for rank in waiting.ranks:
            of_rank.setdefault(rank, waiting)
    for rank, one in enumerate(job.ranks):
        start = (str(rank), one.host, str(one.pid))
        answer = snapshot.answers.get(rank)
        if answer is None:
            silence = snapshot.silent[rank]
            state = "?" if silence.state is None else _STATES.get(silence.state, "gone")
            yield (*start, state, *[""] * 5, _silence(silence))
        else:
            yield (*start, *_figures(answer, of_rank.get(rank)), _does(answer, of_rank.get(rank)))


def _silence(silence: Silence) -> str:
    if silence.is_gone:
        return "gone"
    if silence.is_refused:
        return "not in the job now"
    return f"no answer: state {silence.state}" if silence.state else "no answer"


def _figures(answer: dict[str, Any], waiting: Waiting | None) -> Iterator[str]:
    process, steps = answer["process"], answer["steps"]
    exposed_s = answer.get("totals", {}).get("exposed_s", 0)
    if waiting is not None and waiting.missing and waiting.since_s > LONG_S:
        exposed_s = max(exposed_s, waiting.since_s)  # which counts a wait when it has ended
    state = process.get("state", "")
    yield _STATES.get(state, state)
    yield str(steps["count"]) if steps["count"] else "-"
    yield f"{steps['per_s']:.3g}" if steps["per_s"] else "-"
    yield percent(exposed_s / max(answer["age_s"], 1e-9))
    yield _bytes(process.get("resident_bytes", 0))
    yield process.get("cores", "")


def _bytes(value: float) -> str:
    for unit in ("KB", "MB"):
        value /= 1000
        if value < 1000:
            return f"{value:.0f} {unit}"
    return f"{value / 1000:.1f} GB"


def _does(answer: dict[str, Any], waiting: Waiting | None) -> str:
    if waiting is not None:
        more = answer["pending_count"] - 1
        others = f", and {more} more" if more > 0 else ""
        if waiting.missing:
            text = f"has waited {seconds(waiting.since_s)} in {waiting.text()} for {some_ranks(waiting.missing)}"
        else:
            text = f"is in {waiting.text()} for {seconds(waiting.since_s)}"
        return text + others
    last = answer.get("last_operation")
    if "totals" not in answer:
        return "leaves the job"
    return "has done no operation yet" if last is None else f"ended {in_words(last)} {seconds(last['ended_s_ago'])} ago"


def as_json(job: Job, snapshot: Snapshot, verdict: Verdict) -> str:
    """docs/launching.md describes it."""
    ranks = []
    for rank, one in enumerate(job.ranks):
        about = {"rank": rank, "host": one.host, "pid": one.pid, "node": one.node}
        answer = snapshot.answers.get(rank)
        if answer is None:
            ranks.append({**about, "answers": False, "state": snapshot.silent[rank].state})
        else:
            ranks.append({**about, "answers": True, "state": answer["process"].get("state"), **_told(answer)})
    waiting = [
        {
            "operation": one.title,
            "at": one.at,
            "process_set": one.process_set,
            "ranks": one.ranks,
            "missing_ranks": one.missing,
            "waited_s": one.since_s,
        }
        for one in waiting_in(snapshot, len(job.ranks))
    ]
    about_job = {
        name: getattr(job, name)
        for name in ("id", "command", "folder", "since_s", "launcher", "network", "generation", "version")
    }
    return json.dumps(
        {
            "format": FORMAT,
            "job": {**about_job, "size": len(job.ranks), "hosts": list(dict.fromkeys(one.host for one in job.ranks))},
            "verdict": {"kind": verdict.kind, "ranks": verdict.ranks, "sentence": verdict.sentence},
            "waiting": waiting,
            "ranks": ranks,
        }
    )


_TOLD = ("age_s", "steps", "process", "traffic", "totals", "last_operation", "pending_count", "pending")


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in _TOLD if name in answer}


def stacks(job: Job, told: dict[int, dict[str, Any]], snapshot: Snapshot) -> str:
    """Equal stacks of ranks are printed once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, one in told.items():
        text = "\n".join(_threads(one["stacks"])) or "    it cannot tell: no signal is free for faulthandler"
        if one["is_gil_kept"]:
            text = "    a thread keeps the GIL\n" + text
        ranks_of.setdefault(text, []).append(rank)
    parts = [f"{list_of_ranks(ranks)}:\n{text}" for text, ranks in ranks_of.items()]
    missing = [rank for rank in range(len(job.ranks)) if rank not in told]
    if missing:
        states = {snapshot.silent[rank].state for rank in missing if rank in snapshot.silent} - {None}
        known = f": state {', '.join(sorted(map(str, states)))}" if states else ""
        parts.append(f"no answer from {list_of_ranks(missing)}{known}")
    return "\n\n".join(parts)


def _threads(dump: str) -> Iterator[str]:
    """The lines of a dump of faulthandler, without addresses and threads that run no Python; the main thread first."""
    threads = [lines for lines in (part.splitlines()[1:] for part in dump.split("\n\n")) if _runs_python(lines)]
    for number, lines in enumerate(reversed(threads)):
        yield "    main thread" if number == 0 else f"    thread {number}"
        yield from (f"    {_shortened(line)}" for line in lines)


def _runs_python(lines: Sequence[str]) -> bool:
    return bool(lines) and "no Python frame" not in lines[0]


def _shortened(line: str) -> str:
    return line.replace(f'"{os.getcwd()}/', '"')
