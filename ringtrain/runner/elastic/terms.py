"""What the user allows an elastic job to become; on the command line of its starter, too."""

from __future__ import annotations

import argparse
from typing import NamedTuple


class Terms(NamedTuple):
    """Between how many ranks, on which hosts, and until when it is given up.

    `most` None is no limit but the slots. Hosts come from `discovery_script` if there is one, else they are those of
    the Job; one that the script names without a number has `slots`. `timeout_s` is how long there may be fewer ranks
    than `least`, `reset_limit` how often the job may begin a generation anew. `cooldown_s` is for how long a host is
    given up, the first time and at most; None is for ever.
    """

    least: int
    most: int | None = None
    slots: int = 1
    discovery_script: str | None = None
    timeout_s: float = 600.0
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] | None = None

    def words(self) -> list[str]:
        """For a parser that `add_terms` has made."""
        words = [f"--least={self.least}", f"--slots={self.slots}", f"--timeout={self.timeout_s:g}"]
        if self.most is not None:
            words.append(f"--most={self.most}")
        if self.discovery_script is not None:
            words.append(f"--discovery-script={self.discovery_script}")
        if self.reset_limit is not None:
            words.append(f"--reset-limit={self.reset_limit}")
        if self.cooldown_s is not None:
            words += ["--cooldown", *(f"{seconds:g}" for seconds in self.cooldown_s)]
        return words


def add_terms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--least", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--most", type=int)
    parser.add_argument("--discovery-script")
    parser.add_argument("--reset-limit", type=int)
    parser.add_argument("--cooldown", type=float, nargs=2)


def terms_of(arguments: argparse.Namespace) -> Terms:
    """Those that were given to a parser of `add_terms`."""
    return Terms(
        arguments.least,
        arguments.most,
        arguments.slots,
        arguments.discovery_script,
        arguments.timeout,
        arguments.reset_limit,
        tuple(arguments.cooldown) if arguments.cooldown is not None else None,
    )
