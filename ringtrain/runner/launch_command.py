"""`ringlaunch -n 2 -H hosts python train.py`: MXNet's launch.py, from the command line to the job and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.job import launched_by
from ringtrain.options import table
from ringtrain.runner.batch_scripts import again_as_ringlaunch, sge_script, submit_to_sge
from ringtrain.runner.command import read_variables, refuse_to_run_as_a_rank, said_by, supervise
from ringtrain.runner.flags import (
    Parser,
    add_options,
    add_times,
    add_version,
    option_variables,
    positive,
    shell_words,
    whole,
)
from ringtrain.runner.hosts import Host, UsageError, detect_allocation, is_this_host, remote_shell
from ringtrain.runner.job import (
    SCHEDULER,
    Address,
    Cast,
    Job,
    RoleTerms,
    environment_of_ranks,
    host_of,
    read_addresses,
    require_program,
)
from ringtrain.runner.launchers import OwnStarter, Yarn, choose_launcher
from ringtrain.runner.supervise.output import RANKS
from ringtrain.runner.supervise.supervisor import RoleSupervisor, Settings, Supervisor

SPEAKER = "ringlaunch"
_DESCRIPTION = """\
Start COMMAND as workers, servers and a scheduler, as MXNet's launch.py does, e.g.
  ringlaunch -n 2 --launcher local python train.py
  ringlaunch -n 4 -s 2 -H hosts python train.py"""
_SERVERS_VARIABLE = table.environment_name("kv_servers")
_SNAPSHOTS_VARIABLE = table.environment_name("kv_snapshot_dir")
_REJOIN_VARIABLE = table.environment_name("kv_rejoin_s")
# With --restarts, for so long a worker that is started again may take to come, unless the option says otherwise.
_REJOIN_S = "120"
# what MXNet's launch.py sets for --p3
_P3_VARIABLES = {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ringlaunch with `argv` (default: sys.argv).

    Returns 0 where all workers did, or as many as --min-workers says; else the exit code of the process that ended the
    job, 128 + signal where a signal ended it or ringlaunch; 2 for a command line that cannot be, 1 where processes do
    not start.
    """
    return said_by(SPEAKER, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(words: Sequence[str]) -> int:
    arguments = build_parser().parse_args(words)
    refuse_to_run_as_a_rank(launched_by.detect())
    job = build_job(arguments, {**os.environ, **option_variables(arguments)})
    if arguments.launcher == "sge":
        again = again_as_ringlaunch(words[: len(words) - len(arguments.command)])
        if arguments.dry_run:
            print(sge_script(job, again), end="")
            return 0
        return submit_to_sge(job, again)
    settings = Settings(
        arguments.prefix_output is not False,
        arguments.start_timeout,
        None,
        bool(arguments.verbose),
        grace_s=arguments.grace_s,
        names=RANKS if job.roles is None else job.roles.cast,
    )
    if job.roles is None:
        launcher, _ = choose_launcher("mpirun", job.environment)
        return supervise(Supervisor, launcher, job, settings, SPEAKER)
    if job.roles.folder is not None:
        try:
            copy_folder(job.roles.folder, job.roles.hosts, job.environment)
        except CopyFailed as error:
            print(f"{SPEAKER}: {error}", file=sys.stderr)
            return 1
    launcher_of_roles = Yarn() if arguments.launcher == "yarn" else OwnStarter()
    return supervise(RoleSupervisor, launcher_of_roles, job, settings, SPEAKER)


def build_parser() -> argparse.ArgumentParser:
    """Everything from the first word that is not an option is the command."""
    parser = Parser(
        prog=SPEAKER,
        usage=f"{SPEAKER} -n N [options] COMMAND ...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--num-workers", type=whole, required=True, metavar="N", help="number of workers")
    add("-s", "--num-servers", type=whole, metavar="N", help="number of servers; 0: in the workers (default: as -n)")
    add("-H", "--hostfile", metavar="FILE", help="the hosts, one address in a line; for ssh and mpi")
    add(
        "--launcher",
        choices=("local", "ssh", "mpi", "sge", "yarn"),
        default="ssh",
        help="who starts the processes, and where: local is this host, sge a batch job, yarn containers (default: ssh)",
    )
    add(
        "--mpi-args",
        type=shell_words,
        default=(),
        metavar="WORDS",
        help='more for qsub or YARN\'s client: --mpi-args="-pe mpi 4"',
    )
    add("--dry-run", action=argparse.BooleanOptionalAction, help="print the batch script of sge")
    add("--sync-dst-dir", metavar="DIR", help="copy the current folder there on all hosts before, and work there")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all; may be repeated")
    for role in ("worker", "server"):
        add(f"--env-{role}", action=_Pairs, default={}, metavar="NAME:VALUE", help=f"a variable for each {role}")
    add("-p", "--p3", action="store_true", help="accepted: what is urgent goes first anyway")
    add(
        "--restarts",
        type=whole,
        default=0,
        metavar="K",
        help="start a worker that fails again, so many times",
    )
    add("--min-workers", type=positive, metavar="N", help="go on with so many workers at least (default: all)")
    add("--keep-servers", action="store_true", help="servers stay when the workers are done, until Ctrl-C")
    add_times(parser)
    add(
        "--prefix-output",
        action=argparse.BooleanOptionalAction,
        help="begin each line with its process, as in `[worker 1] text` (default)",
    )
    add("--verbose", action=argparse.BooleanOptionalAction, help="say which process is which, and where")
    add_version(parser)
    add_options(parser)
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each process runs")
    return parser


def build_job(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """Returns what the parsed flags ask for. Raises UsageError where they contradict each other."""
    command = _command_of(arguments.command, environ)
    if arguments.launcher not in ("sge", "yarn") and arguments.mpi_args:
        raise UsageError("--mpi-args is for --launcher sge and yarn")
    if arguments.launcher != "sge" and arguments.dry_run:
        raise UsageError("--dry-run is for --launcher sge")
    hosts = _hosts_of(arguments, environ)
    cast = Cast(
        arguments.num_workers if arguments.num_servers is None else arguments.num_servers, arguments.num_workers
    )
    least = cast.workers if arguments.min_workers is None else arguments.min_workers
    if least > cast.workers:
        raise UsageError(f"--min-workers {least} is more than the {cast.workers} workers of -n")
    if cast.workers == 0 and not (arguments.keep_servers and arguments.num_servers):
        raise UsageError("-n 0 is for servers whose workers come from elsewhere: give -s and --keep-servers, too")
    added = read_variables(_split(arguments.env), environ)
    added |= _P3_VARIABLES if arguments.p3 else {}
    if arguments.launcher == "sge":
        # the scheduler needs no slot of its own: it sleeps
        environment = environment_of_ranks({**environ, **added})
        return Job(command, cast.size - 1, [], environment, launcher_arguments=arguments.mpi_args)
    if arguments.launcher == "mpi":
        return _job_by_mpi(arguments, command, cast, hosts, {**environ, **added}, added)
    if arguments.sync_dst_dir is not None and (arguments.launcher != "ssh" or not arguments.sync_dst_dir[:1] == "/"):
        raise UsageError("--sync-dst-dir is for --launcher ssh, and needs a path that begins with /")
    if arguments.restarts and cast.servers and not {**environ, **added}.get(_REJOIN_VARIABLE):
        added[_REJOIN_VARIABLE] = _REJOIN_S
    environment = environment_of_ranks({**environ, **added})
    terms = RoleTerms(
        cast,
        hosts,
        arguments.sync_dst_dir,
        arguments.env_worker,
        arguments.env_server,
        arguments.restarts,
        least,
        arguments.keep_servers,
        bool(environment.get(_SNAPSHOTS_VARIABLE)),
    )
    return Job(
        command,
        cast.size,
        [],
        environment,
        exported=tuple(sorted(added)),
        launcher_arguments=arguments.mpi_args,
        roles=terms,
    )


def _command_of(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """As in launch.py: one word with blanks is a line for the shell, variables may come first, and a file of this
    folder needs no `./`.
    """
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise UsageError("there is no command to run; write ringlaunch -n 2 python train.py")
    if len(command) == 1 and len(command[0].split()) > 1:
        return ["sh", "-c", command[0]]
    if re.match(r"[A-Za-z_]\w*=", command[0]):
        return ["env", *command]
    first = command[0]
    if "/" not in first and shutil.which(first, path=environ.get("PATH")) is None and Path(first).is_file():
        command[0] = f"./{first}"
    require_program(command, environ)
    return command


def _hosts_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> list[Address]:
    if arguments.launcher in ("sge", "yarn"):
        if arguments.hostfile is not None:
            raise UsageError(
                f"--launcher {arguments.launcher} leaves the hosts to {arguments.launcher.upper()}; leave out -H"
            )
        return []
    if arguments.launcher == "local":
        if arguments.hostfile is not None:
            raise UsageError("--launcher local is for this host alone; leave out -H, or take --launcher ssh")
        return []
    if arguments.hostfile is not None:
        return read_addresses(arguments.hostfile)
    if arguments.launcher == "ssh":
        allocation = detect_allocation(environ)
        if allocation is not None:
            # each as often as it has slots
            return [Address(host.name) for host in allocation.hosts for _ in range(host.slots)]
        raise UsageError("--launcher ssh, which is the default, needs -H FILE; for this host alone, --launcher local")
    return []


def _job_by_mpi(
    arguments: argparse.Namespace,
    command: list[str],
    cast: Cast,
    hosts: Sequence[Address],
    environ: Mapping[str, str],
    added: Mapping[str, str],
) -> Job:
    """Ranks of MPI, of which the last ones of the hosts become servers."""
    given = {
        "--env-worker": arguments.env_worker,
        "--env-server": arguments.env_server,
        "--restarts": arguments.restarts,
        "--min-workers": arguments.min_workers,
        "--keep-servers": arguments.keep_servers,
        "--sync-dst-dir": arguments.sync_dst_dir,
        "a port in -H": any(host.port for host in hosts),
    }
    refused = [name for name, value in given.items() if value]
    if refused:
        raise UsageError(f"--launcher mpi has no {refused[0]}: all processes are ranks of one MPI job; use ssh")
    processes = [process for process in cast.processes() if process.role != SCHEDULER]
    places = [host_of(process, hosts, Address("localhost")).host for process in processes]
    servers = {_SERVERS_VARIABLE: str(cast.servers)}
    return Job(
        command,
        len(processes),
        [Host(name, places.count(name)) for name in dict.fromkeys(places)] if hosts else [],
        environment_of_ranks({**environ, **servers}),
        exported=tuple(sorted({**added, **servers})),
    )


class _Pairs(argparse.Action):
    """Takes `A:1,B:2`, as often as it is given; a value may have colons."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        found = dict(getattr(namespace, self.dest))
        for pair in re.split(r",(?=[A-Za-z_]\w*:)", str(values)):
            name, colon, value = pair.partition(":")
            if not name or not colon:
                parser.error(f"{option_string} {values}: write NAME:VALUE")
            found[name] = value
        setattr(namespace, self.dest, found)


def _split(texts: Sequence[str]) -> list[str]:
    """`A,B` are two names; a value may have commas."""
    return [word for text in texts for word in ([text] if "=" in text else filter(None, text.split(",")))]


# --- --sync-dst-dir ---------------------------------------------------------------------------------------------------


class CopyFailed(Exception):
    """The folder is not on all hosts; the message names one. rsync has printed the reason."""


def copy_folder(to: str, hosts: Sequence[Address], environ: Mapping[str, str]) -> None:
    """Copy the current folder to `to` on all hosts at the same time.

    Raises UsageError where there is no rsync, and CopyFailed.
    """
    with contextlib.ExitStack() as copies:
        started = {}
        for host in dict.fromkeys(hosts):
            try:
                copy = subprocess.Popen(command_of_copy(to, host, environ), stdin=subprocess.DEVNULL)
            except FileNotFoundError as error:
                raise UsageError("--sync-dst-dir needs rsync, here and on the hosts; install it") from error
            copies.callback(_end_copy, copy)
            started[host] = copy
        for host, copy in started.items():
            code = copy.wait()
            if code != 0:
                reason = f"rsync ended with exit code {code}"
                raise CopyFailed(f"the current folder cannot be copied to {to} on {host.host}: {reason}")


def command_of_copy(to: str, host: Address, environ: Mapping[str, str]) -> list[str]:
    """The folder itself becomes `to`; what is there already stays."""
    words = ["rsync", "-az", "--exclude", ".git"]
    if is_this_host(host.host):
        return [*words, "./", f"{to}/"]
    shell = remote_shell(environ, host.ssh_options)
    user, at, name = host.host.rpartition("@")
    name = f"{user}{at}[{name}]" if ":" in name else host.host
    return [*words, "-e", shlex.join(shell), "./", f"{name}:{to}/"]


def _end_copy(copy: subprocess.Popen[bytes]) -> None:
    """Also where another one has failed, or this process is interrupted."""
    copy.kill()
    copy.wait()
