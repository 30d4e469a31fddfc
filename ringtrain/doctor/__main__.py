"""`python -m ringtrain.doctor [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ringtrain.doctor.machine import as_table, examine
from ringtrain.job import launched_by


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, under a launcher on rank 0 only. Returns 1 when it holds an error, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m ringtrain.doctor",
        description="Say what ringtrain finds on this machine, what is wrong and how to mend it.",
    )
    parser.add_argument("--json", action="store_true", help="print the data instead of the table")
    arguments = parser.parse_args(argv)
    launch = launched_by.detect()
    report = examine(launch)
    # the launcher's rank, not MPI's: under the wrong launcher every process is MPI's rank 0
    if launch is None or launch.rank == 0:
        print(json.dumps(report, indent=2) if arguments.json else as_table(report))
    return int(any(finding["level"] == "error" for finding in report["findings"]))


if __name__ == "__main__":
    sys.exit(main())
