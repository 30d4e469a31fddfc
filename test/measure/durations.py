"""`python -m measure.durations report.xml`, in test/: writes slow.txt anew, the tests that `make test` leaves out.

The report is that of `python -m pytest -n 3 --dist loadgroup --junitxml=report.xml test`, with the tests marked slow.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

SLOW = Path(__file__).resolve().parents[1] / "slow.txt"
# A function whose tests take longer together than this, in seconds, beside other tests on busy cores.
_LIMIT_S = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m measure.durations", description=__doc__)
    parser.add_argument("report", type=Path)
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in xml.etree.ElementTree.parse(parser.parse_args(argv).report).iter("testcase"):
        # classname.of.module, and name[parameters]@group
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[f"{file}::{case.attrib['name'].partition('[')[0].partition('@')[0]}"] += float(case.attrib["time"])
    slow = sorted(name for name, taken in seconds.items() if taken > _LIMIT_S)
    SLOW.write_text("".join(f"{name}\n" for name in slow))
    print(
        f"{len(slow)} of {len(seconds)} functions take {sum(seconds[name] for name in slow):.0f} of "
        f"{sum(seconds.values()):.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
