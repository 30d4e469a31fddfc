"""The command line of `ringrun status`, and which job it is about."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from ringtrain.job.job_file import Job, jobs_here, read
from ringtrain.runner.hosts import UsageError
from ringtrain.runner.status import page
from ringtrain.runner.status.asking import Snapshot, ask_for_stacks, is_over, take_snapshot
from ringtrain.runner.status.verdict import Verdict, judge, long_waits

# Between two snapshots, and between two pictures of --watch.
_BETWEEN_S, _WATCH_S = 0.8, 1.0
_NO_JOB_CODE = 1


def main(argv: Sequence[str]) -> int:
    """`ringrun status`. Returns 0, or 1 where there is no such job. Raises UsageError where several may be meant."""
    arguments = _parser().parse_args(argv)
    found = _find(arguments.job)
    if found is None:
        which = "no job of this user runs" if arguments.job is None else f"there is no job {arguments.job}"
        text = f"{which} on {socket.gethostname()}; a job is found once its ranks have called init()"
        print(f"ringrun status: {text}", file=sys.stderr)
        return _NO_JOB_CODE
    job, snapshot = found
    if arguments.stacks:
        print(page.stacks(job, ask_for_stacks(job, range(len(job.ranks))), snapshot), flush=True)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        for now, first, last in _pairs(job, snapshot, arguments.watch):
            _print(now, last, judge(now, first, last, partial(ask_for_stacks, now)), arguments)
    return 0


def _print(job: Job, snapshot: Snapshot, verdict: Verdict, arguments: argparse.Namespace) -> None:
    text = page.as_json(job, snapshot, verdict) if arguments.json else page.text(job, snapshot, verdict)
    clear = page.CLEAR if arguments.watch and not arguments.json and sys.stdout.isatty() else ""
    print(clear + text, flush=True)


def _pairs(job: Job, first: Snapshot, goes_on: bool) -> Iterator[tuple[Job, Snapshot, Snapshot]]:
    """Two snapshots that tell what is the matter; where one is enough, twice the same. With `goes_on` until it ends."""
    taken_s = time.monotonic()
    if first.silent or long_waits(job, first):
        yield job, first, first
        if not goes_on:
            return
    while True:
        time.sleep(max(0.0, taken_s + (_WATCH_S if goes_on else _BETWEEN_S) - time.monotonic()))
        taken_s = time.monotonic()
        with contextlib.suppress(OSError, ValueError, KeyError):
            job = read(job.path)  # of an elastic job, the next generation
        last = take_snapshot(job)
        if is_over(job, last):
            print("ringrun status: the job has ended", file=sys.stderr)
            return
        yield job, first, last
        if not goes_on:
            return
        first = last


def _find(asked: str | None) -> tuple[Job, Snapshot] | None:
    """Returns the job that is meant, and what its ranks say. Removes files of jobs that are over."""
    if asked is not None and os.path.isfile(asked):
        try:
            job = read(asked)
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{asked} is not the file of a job") from None
        return job, take_snapshot(job)
    found = []
    for job in jobs_here():
        if asked is None or job.id.startswith(asked):
            snapshot = take_snapshot(job)
            if is_over(job, snapshot):
                with contextlib.suppress(OSError):
                    os.unlink(job.path)
            else:
                found.append((job, snapshot))
    if len(found) > 1:
        listed = "\n".join(f"    {page.line_of_job(job)}" for job, _ in found)
        raise UsageError(f"there are {len(found)} jobs; name one by the beginning of its id:\n{listed}")
    return found[0] if found else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringrun status", description="Prints what a running job does, and what is the matter with it."
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="the beginning of its id, or its file, as copied from another host; without it the only job of this host",
    )
    parser.add_argument("--watch", action="store_true", help="print it again each second")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, one object in a line")
    form.add_argument("--stacks", action="store_true", help="print the Python stacks of all ranks, equal ones together")
    return parser
