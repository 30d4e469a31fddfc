"""What the user has asked of a job with servers; on the command line of its starter, too."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtrain.runner.roles.addresses import Address, address_of
from ringtrain.runner.roles.cast import Cast


class RoleTerms(NamedTuple):
    """How many there are of each role, where, and until when.

    `hosts` none is this host; `folder` None is the current one. `of_workers` and `of_servers` are variables of these
    alone. A worker that fails is started again so often as `restarts` says, and a server where it `has_snapshots`. With
    fewer workers than `least`, counting those that are done, the job does not go on. With `keeps_servers` these stay
    when the workers are done.
    """

    cast: Cast
    hosts: Sequence[Address] = ()
    folder: str | None = None
    of_workers: Mapping[str, str] = {}
    of_servers: Mapping[str, str] = {}
    restarts: int = 0
    least: int = 0
    keeps_servers: bool = False
    has_snapshots: bool = False

    def words(self) -> list[str]:
        """For a parser that `add_terms` has made."""
        words = [f"--servers={self.cast.servers}", f"--workers={self.cast.workers}"]
        words += [f"--host={host}" for host in self.hosts]
        words += [f"--folder={self.folder}"] if self.folder is not None else []
        words += [f"--of-workers={name}={value}" for name, value in self.of_workers.items()]
        words += [f"--of-servers={name}={value}" for name, value in self.of_servers.items()]
        words += [f"--restarts={self.restarts}", f"--least={self.least}"]
        words += ["--keep-servers"] if self.keeps_servers else []
        return [*words, *(["--has-snapshots"] if self.has_snapshots else [])]


def add_terms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--host", action="append", default=[])
    parser.add_argument("--folder")
    parser.add_argument("--of-workers", action="append", default=[])
    parser.add_argument("--of-servers", action="append", default=[])
    parser.add_argument("--restarts", type=int, required=True)
    parser.add_argument("--least", type=int, required=True)
    parser.add_argument("--keep-servers", action="store_true")
    parser.add_argument("--has-snapshots", action="store_true")


def terms_of(arguments: argparse.Namespace) -> RoleTerms:
    """Those that were given to a parser of `add_terms`."""
    return RoleTerms(
        Cast(arguments.servers, arguments.workers),
        [address_of(text, "--host") for text in arguments.host],
        arguments.folder,
        _variables(arguments.of_workers),
        _variables(arguments.of_servers),
        arguments.restarts,
        arguments.least,
        arguments.keep_servers,
        arguments.has_snapshots,
    )


def _variables(texts: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
