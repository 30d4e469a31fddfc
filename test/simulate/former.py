"""`python -m simulate.former NUMBER`, in test/: tells a bug of the past by a seed, on the code before its mend.

The code comes from the repository's history, and so does the world, as it was when it first told that story. Where no
world can run that code as a whole, the former decision takes the place of today's in today's code.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.compiling import DoubleUnavailable, filled, folder_of

from simulate.programs import Patch, Program, program

_ROOT = Path(__file__).resolve().parents[2]
# The commit with the worlds that tell the code of `Former.mended_by`.
_WORLDS = "3b75f7c"
_OWN = "test/simulate/core"


class Former(NamedTuple):
    bug: str
    world: str
    mended_by: str  # the commit
    seed: int
    changes: Sequence[Patch] = ()  # of the world, which fit it to the code
    decision: Sequence[Patch] = ()  # the former one, in today's code

    def extract(self, folder: Path) -> None:
        """Fill `folder` with the code and with the world, from the repository's history."""
        _extract(f"{self.mended_by}~1", "csrc", folder)
        _extract(_WORLDS, _OWN, folder)
        for change in self.changes:
            text = (file := folder / _OWN / change.file).read_text()
            if text.count(change.old) != 1:
                raise RuntimeError(f"{change.file} does not have once: {change.old}")
            file.write_text(text.replace(change.old, change.new))


_SESSION = "kvstore/server/session.cc"
# Workers that were told to have no part in their job any more went on.
_GOES_ON = (
    Patch(
        "kvstore/servers/worker.py",
        'if kind in ("gone", "over"):\n'
        '            self._arrival.say(notice["text"])\n'
        '            self.client.end(notice["text"], is_lost=notice["error"] != "ShutDownError")\n',
        'if kind == "gone":\n            self._arrival.say(notice["text"])\n',
    ),
)

# By the numbers that docs/inside/simulation.md gives them.
FORMER: Mapping[int, Former] = {
    3: Former(
        "a stall warning names ranks that have submitted the operation",
        "negotiation",
        "2f49b5a",
        57,
        (
            Patch(
                "negotiation.cc",
                '#include "coordination/tree_channel.h"',
                '#include "coordination/tree_channel.h"\n#include "coordination/node_channel.h"',
            ),
            Patch("negotiation.cc", "news.whereabouts = std::exchange(self.whereabouts, {});", ""),
            Patch("negotiation.cc", "if (!round->question.empty()) answer_soon(self);", ""),
        ),
    ),
    4: Former(
        "a worker that was stopped for longer than kv_timeout_s waits without end",
        "scheduler",
        "b6cb5d8",
        5595,
        decision=_GOES_ON,
    ),
    5: Former(
        "workers wait without end when the scheduler dies, and then another worker",
        "scheduler",
        "b6cb5d8",
        2395,
        decision=_GOES_ON,
    ),
    6: Former(
        "a server that comes back throws away what is in the memory of its workers",
        "store",
        "90092df",
        494,
        decision=(
            Patch(
                "kvstore/server/server_stores.cc",
                "void ServerStores::adopt(const std::vector<Found>& all) {",
                "void ServerStores::adopt(const std::vector<Found>& all) {\n"
                '  if (!all.empty()) throw failure("a server goes on from its snapshot");',
            ),
        ),
    ),
    12: Former(
        "a rank with 256 unfinished handshakes ends the oldest one, and is then said to be killed",
        "sockets",
        "936a60c",
        1009,
    ),
    16: Former("one refused address loses a rank although another one works", "sockets", "936a60c", 73),
    17: Former(
        "after a push that was refused, a live server is said to be gone",
        "store",
        "7af550d",
        179,
        decision=(
            Patch(
                _SESSION,
                "  if (outcome == Outcome::early) {\n"
                "    say(request.id, Said::early, counted(*request.actor, head.chunk));\n"
                "    return Result::over;\n"
                "  }\n",
                "  if (outcome == Outcome::early) return Result::over;\n",
            ),
            Patch(
                _SESSION,
                "  const int64_t counted = this->counted(*request.actor, request.head.chunk);\n"
                "  if (request.head.number > counted) return say(request.id, Said::early, counted);\n",
                "",
            ),
        ),
    ),
}


def program_of(former: Former) -> Program:
    """The world with the code that has the bug. Raises DoubleUnavailable where the repository has no history."""
    if former.decision:
        return program(former.world, former.decision)
    folder = filled(folder_of("former", [former.mended_by, _WORLDS, *map(str, former.changes)], []), former.extract)
    return program(former.world, product=folder / "csrc", own=folder / _OWN)


def _extract(commit: str, path: str, folder: Path) -> None:
    archive = subprocess.run(["git", "archive", commit, path], cwd=_ROOT, check=False, capture_output=True)
    if archive.returncode != 0:
        raise DoubleUnavailable(f"git archive {commit} {path}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def tell(former: Former) -> int:
    """Tell the story with its trace; exit status 1 if it has a finding."""
    world = program_of(former)
    needed = world.needed_faults(former.seed)
    world.trace(former.seed, [fault for fault in range(len(world.faults(former.seed))) if fault not in needed])
    findings, _ = world.run(range(former.seed, former.seed + 1))
    for finding in findings:
        print(f"finding: {finding.text}")
    return int(bool(findings))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal() or int(sys.argv[1]) not in FORMER:
        sys.exit(
            "usage: python -m simulate.former NUMBER\n" + "\n".join(f"{n}  {one.bug}" for n, one in FORMER.items())
        )
    sys.exit(tell(FORMER[int(sys.argv[1])]))
