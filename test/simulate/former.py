"""`python -m simulate.former NUMBER`, in test/: tells a bug of the past by a seed, on the code before its mend.

The code comes from the repository's history. Where it lacks what the world of today uses, the world is changed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from simulate.programs import Patch, program

_CORE = Path(__file__).resolve().parent / "core"


class Former(NamedTuple):
    bug: str
    world: str
    mended_by: str  # the commit
    seed: int
    changes: Sequence[Patch] = ()  # of the world


# By the numbers that docs/simulation.md gives them.
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
    12: Former(
        "a rank with 256 unfinished handshakes ends the oldest one, and is then said to be killed",
        "sockets",
        "936a60c",
        1009,
    ),
    16: Former("one refused address loses a rank although another one works", "sockets", "936a60c", 73),
}


def tell(former: Former) -> int:
    """Build the world and tell the story with its trace; exit status 1 if it has a finding."""
    with tempfile.TemporaryDirectory(prefix="ringtrain-former-") as name:
        folder = Path(name)
        archive = subprocess.run(
            ["git", "archive", f"{former.mended_by}~1", "csrc"],
            cwd=_CORE.parents[2],
            check=True,
            stdout=subprocess.PIPE,
        )
        subprocess.run(["tar", "-x", "-C", name], input=archive.stdout, check=True)
        own = folder / "core"
        subprocess.run(["cp", "-r", str(_CORE), str(own)], check=True)
        for change in former.changes:
            text = (own / change.file).read_text()
            if text.count(change.old) != 1:
                raise RuntimeError(f"{change.file} does not have once: {change.old}")
            (own / change.file).write_text(text.replace(change.old, change.new))
        world = program(former.world, product=folder / "csrc", own=own)
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
