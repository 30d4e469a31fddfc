"""`ringrun -np 4 python train.py`: from the command line to the launcher that takes this process's place."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from ringtrain import launchers
from ringtrain.run.flags import build_parser, option_variables
from ringtrain.run.hosts import Host, UsageError, parse_hosts, read_hostfile, total_slots
from ringtrain.run.job import Job, environment_of_ranks
from ringtrain.run.launch import choose_launcher
from ringtrain.run.mpi_library import MpiNotFound, probe


def main(argv: Sequence[str] | None = None) -> int:
    """Run ringrun with `argv` (default: sys.argv). Returns only when nothing was started: 0 after --dry-run, 2 for a
    command line that cannot be, 1 when MPI is missing. Otherwise this process becomes the launcher (execve), so that
    signals, standard input and the exit status are the launcher's own."""
    try:
        return _run(argv)
    except (UsageError, MpiNotFound) as error:
        print(f"ringrun: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _run(argv: Sequence[str] | None) -> int:
    from ringtrain import options

    arguments = build_parser(options.TABLE).parse_args(argv)
    variables = option_variables(arguments, options.TABLE, options.environment_name)
    _refuse_to_run_as_a_rank(launchers.detect())
    job = build_job(arguments, {**os.environ, **variables})
    mpi = probe()
    launcher = choose_launcher(arguments.launcher, mpi["library"], mpi["path"], os.environ)
    command, environment = launcher.arguments(job), launcher.environment(job)
    if arguments.dry_run:
        print(shell_line(command, environment))
        return 0
    if arguments.verbose:
        print(f"ringrun: {mpi['library']} {mpi['version']} at {mpi['path']}", file=sys.stderr)
        print(f"ringrun: {shell_line(command, environment)}", file=sys.stderr, flush=True)
    os.execve(command[0], command, environment)


def build_job(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """What the parsed flags ask for. Raises UsageError where they contradict each other."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UsageError("there is no command to run; write ringrun -np 2 python train.py")
    hosts = _hosts(arguments)
    num_proc = arguments.num_proc or total_slots(hosts)
    if num_proc == 0:
        raise UsageError("how many ranks? give -np, or hosts with -H or --hostfile")
    if hosts and num_proc > total_slots(hosts):
        listed = ",".join(map(str, hosts))
        raise UsageError(f"-np {num_proc} is more than the {total_slots(hosts)} slots of {listed}; give the hosts more")
    return Job(command, num_proc, hosts, environment_of_ranks(environ))


def shell_line(command: list[str], environment: Mapping[str, str]) -> str:
    """The command as a line for a shell, behind the variables that differ from this process's own."""
    changed = [f"{name}={shlex.quote(value)}" for name, value in environment.items() if os.environ.get(name) != value]
    return " ".join([*changed, shlex.join(command)])


def _hosts(arguments: argparse.Namespace) -> list[Host]:
    if arguments.hosts is not None and arguments.hostfile is not None:
        raise UsageError("give the hosts either with -H or with --hostfile, not with both")
    if arguments.hosts is not None:
        return parse_hosts(arguments.hosts)
    return read_hostfile(arguments.hostfile) if arguments.hostfile is not None else []


def _refuse_to_run_as_a_rank(launch: launchers.Launch | None) -> None:
    if launch is not None and launch.size != 1:
        raise UsageError(
            f"ringrun itself was started as rank {launch.rank} by {launch.launcher}; start it once, without a launcher"
        )
