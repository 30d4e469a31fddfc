"""`ringrun -np 4 python train.py`: from the command line to the job and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ringtrain.job import launched_by
from ringtrain.runner import horovod_flags, installed
from ringtrain.runner.batch_scripts import again_as_ringrun, sge_script, slurm_script, submit_to_sge, submit_to_slurm
from ringtrain.runner.flags import option_variables, parse
from ringtrain.runner.hosts import (
    Allocation,
    Host,
    UsageError,
    detect_allocation,
    existing_file,
    parse_hosts,
    read_hostfile,
    total_slots,
)
from ringtrain.runner.job import (
    FLAGS,
    Asked,
    Job,
    elastic_job,
    environment_of_ranks,
    over_sockets,
    refuse_without_least,
    require_program,
)
from ringtrain.runner.launchers import Launcher, choose_elastic, choose_launcher
from ringtrain.runner.mpi_library import MpiNotFound
from ringtrain.runner.supervise import process_tree
from ringtrain.runner.supervise.binding import BIND_VARIABLE
from ringtrain.runner.supervise.first_failure import spoken
from ringtrain.runner.supervise.output import Screen, StandardStreams, terminal
from ringtrain.runner.supervise.supervisor import ElasticSupervisor, Settings, Supervisor, signals_handled

# what a shell gives for a program whose reader has gone
_BROKEN_PIPE_CODE = 141
# The current folder, which -c puts first on the import path, is not on that of a command.
_HOROVODRUN = "import sys; del sys.path[0]; from horovod.runner.launch import run_commandline; run_commandline()"
# The batch systems that get a script by --launcher.
_BATCH_SYSTEMS = {"slurm": (slurm_script, submit_to_slurm), "sge": (sge_script, submit_to_sge)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ringrun with `argv` (default: sys.argv).

    Returns 0 where all ranks did, else the exit code of the rank that failed first, 128 + signal where a signal ended
    it or ringrun; 2 for a command line that cannot be, 1 where MPI is missing or ranks do not start.
    """
    return said_by("ringrun", lambda: _run(argv))


def main_of_horovodrun(argv: Sequence[str] | None = None) -> int:
    """Run `horovodrun`, which is `ringrun --horovod`; where a Horovod is installed, that Horovod runs. As `main`."""
    words = sys.argv[1:] if argv is None else argv
    if installed.installed_horovod() is not None and os.environ.get(installed.REPLACE_VARIABLE) != "1":
        os.execv(sys.executable, [sys.executable, "-c", _HOROVODRUN, *words])
    return said_by("horovodrun", lambda: _run(["--horovod", *words], "horovodrun"))


def said_by(speaker: str, run: Callable[[], int]) -> int:
    """The exit code of `run`, or of what it raises, which is said."""
    process_tree.reset_signals()
    try:
        return run()
    except (UsageError, MpiNotFound) as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # the reader has gone; the interpreter would complain once more when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE_CODE


def _run(argv: Sequence[str] | None, speaker: str = "ringrun") -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["status"]:
        from ringtrain.runner.status.command import main as status  # which a job does not wait for, nor for check

        return status(words[1:])
    arguments = parse(words)
    if arguments.check_build:
        from ringtrain.runner.check import build_report

        print(build_report())
        return 0
    for sentence in horovod_flags.sentences(arguments.of_horovod):
        print(f"{speaker}: {sentence}", file=sys.stderr, flush=True)
    variables = {
        **horovod_flags.variables(arguments.of_horovod),
        **option_variables(arguments),
    }
    refuse_to_run_as_a_rank(launched_by.detect())
    job = build_job(arguments, {**os.environ, **variables})
    if arguments.check and arguments.launcher == "yarn":
        raise UsageError("--check asks hosts, which YARN chooses for each job; leave it out")
    if arguments.launcher in _BATCH_SYSTEMS:
        return _submit(arguments, job, words[: len(words) - len(arguments.command)])
    if job.elastic is not None:
        launcher, why = choose_elastic(arguments.launcher, job)
    else:
        launcher, why = choose_launcher(arguments.launcher, job.environment)
    if arguments.check:
        from ringtrain.runner.check import check

        return check(job, launcher)
    line = shell_line(launcher.arguments(job), launcher.environment(job))
    if arguments.dry_run:
        print(line)
        return 0
    if arguments.verbose:
        for text in (*why, line):
            print(f"{speaker}: {text}", file=sys.stderr, flush=True)
    folder = Path(arguments.output_filename) if arguments.output_filename is not None else None
    settings = Settings(
        job.may_have_several if arguments.prefix_output is None else arguments.prefix_output,
        arguments.start_timeout,
        folder,
        bool(arguments.verbose),
        grace_s=arguments.grace_s,
        has_time=bool(arguments.prefix_output_with_timestamp),
        has_stdin=arguments.stdin is not False,
    )
    return supervise(Supervisor if job.elastic is None else ElasticSupervisor, launcher, job, settings, speaker)


def build_job(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """Returns what the parsed flags ask for. Raises UsageError where they contradict each other."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command and not arguments.check:
        raise UsageError("there is no command to run; write ringrun -np 2 python train.py")
    if command:
        require_program(command, environ)
    given = given_hosts(arguments.hosts, arguments.hostfile)
    is_given = given or arguments.host_discovery_script is not None
    allocation = None if is_given else detect_allocation(environ)
    hosts = allocation.hosts if allocation is not None else given
    added = read_variables(arguments.env, environ)
    if arguments.horovod:
        added["PYTHONPATH"] = path_with_horovod({**environ, **added})
    environment = environment_of_ranks({**environ, **added})
    if arguments.bind != "none":
        if arguments.binding_args:
            raise UsageError(f"--bind {arguments.bind} and --binding-args both bind the ranks; give one of them")
        environment[BIND_VARIABLE] = arguments.bind
    asked = _asked(arguments)
    terms = None
    if asked.is_elastic and not arguments.check:
        num_proc, hosts, terms = elastic_job(asked, hosts, FLAGS, environ)
        environment = over_sockets(environment)
    else:
        num_proc = _num_proc(arguments, hosts, allocation)
        if not arguments.check:
            refuse_without_least(asked, FLAGS)
    return Job(
        command,
        num_proc,
        hosts,
        environment,
        exported=tuple(sorted(added)),
        network_interfaces=arguments.network_interfaces,
        ssh_port=arguments.ssh_port,
        ssh_identity_file=existing_file(arguments.ssh_identity_file, "--ssh-identity-file"),
        hosts_are_allotted=allocation is not None,
        launcher_arguments=arguments.mpi_args,
        binding_arguments=arguments.binding_args,
        has_tcp_only=bool(arguments.tcp),
        elastic=terms,
    )


def _num_proc(arguments: argparse.Namespace, hosts: list[Host], allocation: Allocation | None) -> int:
    """Returns the number of ranks of a job that is not elastic. Raises UsageError."""
    num_proc: int = arguments.num_proc or total_slots(hosts) or int(bool(arguments.check))
    if num_proc == 0:
        raise UsageError("how many ranks? give -np, or hosts with -H or --hostfile")
    if hosts and num_proc > total_slots(hosts):
        listed = ",".join(map(str, hosts))
        source = f", the allocation of {allocation.batch_system}" if allocation is not None else ""
        raise UsageError(
            f"-np {num_proc} is more than the {total_slots(hosts)} slots of {listed}{source}; give the hosts more"
        )
    return num_proc


def _asked(arguments: argparse.Namespace) -> Asked:
    return Asked(
        arguments.num_proc,
        arguments.min_np,
        arguments.max_np,
        arguments.slots_per_host,
        arguments.host_discovery_script,
        arguments.elastic_timeout,
        arguments.reset_limit,
        arguments.blacklist_cooldown_range,
    )


def path_with_horovod(environ: Mapping[str, str]) -> str:
    """PYTHONPATH for ranks that import ringtrain as horovod. Raises UsageError where that is installed."""
    try:
        installed.require_free_name(environ)
    except ImportError as error:
        raise UsageError(f"--horovod: {error}") from error
    return installed.with_folder(environ.get("PYTHONPATH"))


def given_hosts(hosts: str | None, hostfile: str | None) -> list[Host]:
    """The hosts of -H or of --hostfile; none where neither is given. Raises UsageError."""
    if hosts is not None and hostfile is not None:
        raise UsageError("give the hosts either with -H or with --hostfile, not with both")
    if hosts is not None:
        return parse_hosts(hosts)
    return read_hostfile(hostfile) if hostfile is not None else []


def read_variables(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for its value here. Raises UsageError where it has none."""
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in environ):
            raise UsageError(f"--env {text}: write NAME=VALUE, or the NAME of a variable that is set here")
        variables[name] = value if equals else environ[name]
    return variables


def shell_line(command: list[str], environment: Mapping[str, str]) -> str:
    """The command as a line for a shell, behind the variables that differ from this process's own."""
    changed = [f"{name}={shlex.quote(value)}" for name, value in environment.items() if os.environ.get(name) != value]
    return " ".join([*changed, shlex.join(command)])


def refuse_to_run_as_a_rank(launch: launched_by.Launch | None) -> None:
    """Raises UsageError in a process that a launcher has started as one of several ranks."""
    if "RINGTRAIN_MEMBER" in os.environ:
        raise UsageError("ringrun itself was started by a process of an elastic job; start it once, outside of it")
    if launch is not None and launch.size != 1:
        raise UsageError(
            f"ringrun itself was started as rank {launch.rank} by {launch.launcher}; start it once, without a launcher"
        )


def _submit(arguments: argparse.Namespace, job: Job, words: Sequence[str]) -> int:
    if arguments.check:
        raise UsageError("--check asks the hosts of an allocation; call it in one, as in a batch job")
    batch_script, submit = _BATCH_SYSTEMS[arguments.launcher]
    again = again_as_ringrun(words)
    if arguments.dry_run:
        print(batch_script(job, again), end="")
        return 0
    return submit(job, again)


def supervise(
    of_its_kind: type[Supervisor], launcher: Launcher, job: Job, settings: Settings, speaker: str = "ringrun"
) -> int:
    """Run a job to its end, as `speaker`. Returns the exit code. Raises UsageError where no output file can be."""
    streams = StandardStreams(speaker)
    try:
        supervisor = of_its_kind(launcher, job, settings, Screen(streams.print, terminal, speaker))
    except OSError as error:
        folder = settings.output_folder
        raise UsageError(f"--output-filename {folder} cannot be made: {error.strerror}: {error.filename}") from error
    with signals_handled(supervisor, is_last=True):
        outcome = supervisor.run()
    if outcome.explanation:
        with contextlib.suppress(BrokenPipeError):
            streams.print(f"{spoken(outcome.explanation, speaker)}\n".encode(), True)
    return outcome.code
