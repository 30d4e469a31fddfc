"""`ringtrain.run(function, num_proc=4)`: a Python function on several ranks, from a notebook or a script.

The function and the results travel through files in a folder that all ranks see.
"""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import shlex
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ringtrain.job import launched_by
from ringtrain.pickling import pickler
from ringtrain.record.folders import temporary_folder
from ringtrain.runner import horovod_flags
from ringtrain.runner.hosts import Host, UsageError, existing_file, parse_hosts, read_hostfile, total_slots
from ringtrain.runner.job import (
    ARGUMENTS,
    START_TIMEOUT_S,
    Asked,
    Job,
    elastic_job,
    environment_of_ranks,
    over_sockets,
    refuse_without_least,
)
from ringtrain.runner.launchers import choose_elastic, choose_launcher
from ringtrain.runner.supervise.output import PythonStreams, Screen, terminal_or_notebook
from ringtrain.runner.supervise.rank_wrapper import PROCESS_VARIABLE
from ringtrain.runner.supervise.supervisor import ElasticSupervisor, Outcome, Settings, Supervisor

Result = TypeVar("Result")

CALL_FILE = "call"

# `-m` would look into the current folder before the caller's import path
_WORKER = """\
import sys
sys.path[:] = sys.argv.pop(1).split(":")
from ringtrain.runner.function import run_in_rank
run_in_rank(sys.argv[1])"""
# Another Python has its own packages; what it lacks may be the caller's.
_WORKER_OF_ANOTHER_PYTHON = _WORKER.replace("sys.path[:] =", "sys.path +=")


class RankTraceback(Exception):
    """The cause of an exception that a rank has raised: the traceback that it had there, as text."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"on rank {rank}:\n\n{text}")


def run(
    func: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    elastic_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> list[Result]:
    """Call `func(*args, **kwargs)` on `num_proc` ranks and return their results, in the order of the ranks.

    Mirrors `horovod.run`, with its arguments in its order; those after the star are ringtrain's. Each rank is a new
    process with this process's environment and import path; the function itself calls `ringtrain.init()`. Output of the
    ranks appears here, each line with its rank before it. Of an elastic job, which is one with `min_num_proc` or
    `host_discovery_script`, the results are those of the processes that were its ranks at the end.

    Args:
        func: pickled by cloudpickle if that is installed, which also takes lambdas and what a notebook or a script
            defines; else by pickle, which takes functions of modules only. So are the arguments and the results.
        num_proc: number of ranks; `np` is the same. An elastic job begins with these, and with all slots that there are
            or else `min_num_proc` where it is 1.
        min_num_proc: makes the job elastic, which goes on with so many ranks at least; `min_np` is the same.
        max_num_proc: so many ranks at most; None is as many as there are slots; `max_np` is the same.
        slots: of a host that the script names without a number.
        reset_limit: how often the ranks of an elastic job may meet anew; None is no limit.
        cooldown_range: for how many seconds a host whose ranks fail again and again gets no more, the first time and at
            most; None is for ever.
        host_discovery_script: a command that prints the hosts of an elastic job, asked each second.
        elastic_timeout: how long, in seconds, there may be fewer ranks than `min_num_proc`; None is 600.
        hosts: `h1:2,h2:2`, as for ringrun; None is this host.
        hostfile: in place of `hosts` a file with the lines `h1 slots=2` or `h1:2`.
        start_timeout: how long the ranks may take to start, in seconds; None is 120, and 0 waits for ever.
        ssh_port: where ssh listens on the other hosts.
        ssh_identity_file: the private key for ssh.
        output_filename: a folder, in which what rank N prints is also written to `rank.N/stdout` and `rank.N/stderr`.
        verbose: say where the ranks run.
        disable_cache, use_mpi: what they ask for is done anyway.
        use_gloo: without effect, as a warning says.
        mpi_args: more words for the launcher.
        network_interfaces: what the hosts talk through, such as ["eth0", "eth1"].
        network_interface: the same as one text, "eth0,eth1".
        executable: the Python of the ranks; None is this one. Another one needs ringtrain, too.
        env: variables for the ranks, besides those of this process.
        folder: where the function and the results are put, a folder that all hosts share; None is a temporary one of
            this host.

    Raises:
        TypeError: an argument is of the wrong type, or something cannot be pickled: the function, its arguments or
            its result.
        ValueError: an argument is out of its range, or two exclude each other.
        UsageError: this process is a rank itself, the hosts are none or too few, or something is refused.
        OSError: the folder of `output_filename` cannot be made.
        MpiNotFound: there is no MPI, or no launcher of it.
        RuntimeError: a rank ended without a result, also by sys.exit; or the ranks did not start.
        Exception: what the function raised on the rank that failed first; its cause shows the traceback.
    """
    launch = launched_by.detect()
    if launch is not None and launch.size != 1:
        raise UsageError(f"ringtrain.run was called by rank {launch.rank} of a job; call it outside of one")
    check_function(func)
    require_one_at_most(hosts=hosts, hostfile=hostfile)
    require_one_at_most(use_gloo=use_gloo, use_mpi=use_mpi)
    require_one_at_most(network_interface=network_interface, network_interfaces=network_interfaces)
    for sentence in horovod_flags.sentences_of_arguments({"use_gloo": use_gloo}):
        warnings.warn(sentence, stacklevel=2)
    ranks, added = check_num_proc(num_proc if np is None else np), check_env(env)
    asked = check_elastic(
        ranks,
        min_np if min_num_proc is None else min_num_proc,
        max_np if max_num_proc is None else max_num_proc,
        *(slots, host_discovery_script, elastic_timeout, reset_limit, cooldown_range),
    )
    environment, terms = environment_of_ranks({**os.environ, **added}), None
    if asked.is_elastic:
        ranks, known_hosts, terms = elastic_job(asked, check_hosts(hosts, hostfile, 0), ARGUMENTS, environment)
        environment = over_sockets(environment)
    else:
        refuse_without_least(asked, ARGUMENTS)
        known_hosts = check_hosts(hosts, hostfile, ranks)
    job = Job(
        [],
        ranks,
        known_hosts,
        environment,
        exported=tuple(sorted(added)),
        network_interfaces=check_interfaces(network_interfaces or network_interface),
        ssh_port=check_ssh_port(ssh_port),
        ssh_identity_file=check_file(ssh_identity_file),
        launcher_arguments=check_words(mpi_args),
        elastic=terms,
    )
    output_folder = None if output_filename is None else Path(output_filename)
    settings = Settings(job.may_have_several, check_start_timeout(start_timeout), output_folder, bool(verbose))
    return _call(pickled_call(func, check_args(args), dict(kwargs or {})), job, settings, executable, folder)


def _call(call: bytes, job: Job, settings: Settings, executable: str | None, folder: str | None) -> list[Any]:
    """Makes the ranks of `job` do the pickled call."""
    launcher, _ = choose_launcher("auto", job.environment) if job.elastic is None else choose_elastic("auto", job)
    with (
        unwinds_before_termination(),
        tempfile.TemporaryDirectory(prefix="ringtrain-run-", dir=folder or temporary_folder()) as own_folder,
    ):
        Path(own_folder, CALL_FILE).write_bytes(call)
        job = job._replace(command=worker_command(own_folder, executable))
        screen = Screen(PythonStreams().print, terminal_or_notebook)
        if job.elastic is not None:
            return _results_of_elastic(ElasticSupervisor(launcher, job, settings, screen).run(), Path(own_folder))
        outcome = Supervisor(launcher, job, settings, screen).run()
        return _results(outcome, job.num_proc, Path(own_folder))


def worker_command(folder: str, executable: str | None = None) -> list[str]:
    """Returns the command of a process that does the pickled call in `folder`, with the import path of this one.

    Args:
        executable: its Python; None is that of this process.
    """
    worker = [sys.executable, "-c", _WORKER] if executable is None else [executable, "-c", _WORKER_OF_ANOTHER_PYTHON]
    return [*worker, _import_path(), folder]


def result_file(folder: Path, rank: int) -> Path:
    """Names the file of a rank's pickled result. In an elastic job `rank` is the number of the process."""
    return folder / f"result.{rank}"


def exit_file(folder: Path, rank: int) -> Path:
    """Names the file of the exit code with which the function left its rank, as by sys.exit()."""
    return folder / f"exit.{rank}"


def error_file(folder: Path, rank: int) -> Path:
    """Names the file of a rank's pickled exception and the text of its traceback."""
    return folder / f"error.{rank}"


def pickled_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    chosen = pickler()
    name = getattr(function, "__qualname__", repr(function))
    if chosen is pickle and getattr(function, "__module__", None) == "__main__":
        raise TypeError(
            f"{name} is defined in a notebook or in the script itself, which the ranks cannot import; "
            "run `pip install cloudpickle`, or move it to a module"
        )
    try:
        data: bytes = chosen.dumps((function, args, kwargs))
    except Exception as error:
        remedy = "" if chosen is not pickle else "; run `pip install cloudpickle`, or use a function of a module"
        raise TypeError(f"{name} or its arguments cannot be pickled: {error}{remedy}") from error
    return data


def _import_path() -> str:
    # an empty entry is the current folder
    return ":".join(os.path.abspath(entry) for entry in sys.path)


def _results(outcome: Outcome, num_proc: int, folder: Path) -> list[Any]:
    """Returns what the ranks have left in `folder`, or the exception that says why they have not."""
    failures = outcome.failures
    if not failures or failures[0].is_consequence:
        _require_no_exit(outcome, num_proc, folder)
    if failures and error_file(folder, failures[0].rank).exists():
        raise unpickled_error(error_file(folder, failures[0].rank).read_bytes(), failures[0].rank)
    if outcome.code != 0:
        raise RuntimeError(outcome.explanation)
    return [pickle.loads(result_file(folder, rank).read_bytes()) for rank in range(num_proc)]


def _results_of_elastic(outcome: Outcome, folder: Path) -> list[Any]:
    """Returns those of the last ranks; if the processes never met, those of all that have one."""
    if outcome.code != 0:
        for failure in outcome.failures:
            file = error_file(folder, failure.rank)
            if file.exists():
                raise unpickled_error(file.read_bytes(), failure.rank)
        raise RuntimeError(outcome.explanation)
    files = [result_file(folder, number) for number in outcome.generation or sorted(outcome.ended_well)]
    results = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    if not results:
        raise RuntimeError("no process of the elastic job ended with a result")
    return results


def _require_no_exit(outcome: Outcome, num_proc: int, folder: Path) -> None:
    """Raises for a rank that has left early, of which others may have failed before its end was heard of."""
    for rank in range(num_proc):
        left = exit_file(folder, rank)
        if left.exists() and left.read_text() != "0":
            raise RuntimeError(f"the first to fail was rank {rank}, with exit code {left.read_text()}")
        if left.exists() or (rank in outcome.ended_well and not result_file(folder, rank).exists()):
            raise RuntimeError(f"rank {rank} ended without a result (exit code 0)")


# --- what it is given, checked before anything is started -------------------------------------------------------------


def check_function(function: Any) -> None:
    """Raises TypeError for what cannot be called, such as the result of the function."""
    if not callable(function):
        raise TypeError(f"the first argument must be a function, not {function!r}")


def check_args(args: Any) -> tuple[Any, ...]:
    """Raises TypeError, also for a text, whose letters would become the arguments."""
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(f"args must be a tuple or a list, not {args!r}; write ({args!r},) for one argument")
    return tuple(args)


def require_one_at_most(**arguments: Any) -> None:
    """Raises ValueError where two of these are given, which exclude each other."""
    given = [name for name, value in arguments.items() if value]
    if len(given) > 1:
        raise ValueError(f"give {' or '.join(given)}, not both")


def check_num_proc(num_proc: Any, name: str = "num_proc") -> int:
    """Raises TypeError and ValueError."""
    return _positive_number(name, num_proc)


def check_ssh_port(ssh_port: Any) -> int | None:
    """Raises TypeError and ValueError."""
    return None if ssh_port is None else _positive_number("ssh_port", ssh_port)


def check_file(ssh_identity_file: Any) -> str | None:
    """Raises UsageError where there is no such file."""
    return None if ssh_identity_file is None else existing_file(os.fspath(ssh_identity_file), "ssh_identity_file")


def check_words(mpi_args: Any) -> tuple[str, ...]:
    """Words as a shell would have them. Raises TypeError and ValueError."""
    if mpi_args is None:
        return ()
    if not isinstance(mpi_args, str):
        raise TypeError(f"mpi_args must be a text such as '--map-by slot', not {mpi_args!r}")
    try:
        return tuple(shlex.split(mpi_args))
    except ValueError as error:
        raise ValueError(f"mpi_args: {error}: {mpi_args}") from error


def check_interfaces(network_interfaces: Any) -> str | None:
    """Names with commas between them, in their order but for those of a set. Raises TypeError."""
    if not network_interfaces:
        return None
    names = [network_interfaces] if isinstance(network_interfaces, str) else list(network_interfaces)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f'network_interfaces must be names such as ["eth0"], not {network_interfaces!r}')
    return ",".join(sorted(names) if isinstance(network_interfaces, (set, frozenset)) else names)


def check_hosts(hosts: Any, hostfile: Any, num_proc: int) -> list[Host]:
    """Raises TypeError, and UsageError where a host cannot be read or the hosts have fewer slots than `num_proc`."""
    if hostfile is not None:
        found = read_hostfile(os.fspath(hostfile))
    elif hosts is None:
        return []
    elif isinstance(hosts, str):
        found = parse_hosts(hosts, "hosts")
    else:
        raise TypeError(f'hosts must be a text such as "h1:2,h2:2", not {hosts!r}')
    if num_proc > total_slots(found):
        given = f"{hosts=}" if hostfile is None else f"{hostfile=}"
        raise UsageError(f"num_proc={num_proc} is more than the {total_slots(found)} slots of {given}")
    return found


def check_env(env: Any) -> dict[str, str]:
    """Raises TypeError and ValueError."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of names to texts, not {env!r}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must map names to texts, but maps {name!r} to {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env has {name!r}: {value!r}, which cannot be a variable")
    return dict(env)


def check_elastic(
    num_proc: int,
    min_num_proc: Any,
    max_num_proc: Any,
    slots: Any,
    host_discovery_script: Any,
    elastic_timeout: Any,
    reset_limit: Any,
    cooldown_range: Any,
) -> Asked:
    """Raises TypeError and ValueError. A `num_proc` of 1, which nobody may have written, is none."""
    if host_discovery_script is not None and not isinstance(host_discovery_script, str):
        raise TypeError(f"host_discovery_script must be a command, not {host_discovery_script!r}")
    return Asked(
        None if num_proc == 1 else num_proc,
        None if min_num_proc is None else _positive_number("min_num_proc", min_num_proc),
        None if max_num_proc is None else _positive_number("max_num_proc", max_num_proc),
        None if slots is None else _positive_number("slots", slots),
        host_discovery_script,
        None if elastic_timeout is None else _seconds("elastic_timeout", elastic_timeout),
        None if reset_limit is None else _whole_number("reset_limit", reset_limit),
        None if cooldown_range is None else _two_times(cooldown_range),
    )


def check_start_timeout(start_timeout: Any) -> float:
    """Raises TypeError and ValueError."""
    if start_timeout is None:
        return START_TIMEOUT_S
    return _seconds("start_timeout", start_timeout)


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = value + 0.0
    except TypeError:
        raise TypeError(f"{name} must be a number of seconds, not {value!r}") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} must be a number of seconds from 0, not {value!r}")
    return float(seconds)


def _two_times(cooldown_range: Any) -> Sequence[float]:
    if isinstance(cooldown_range, str) or not isinstance(cooldown_range, Sequence) or len(cooldown_range) != 2:
        raise TypeError(f"cooldown_range must be two numbers of seconds, not {cooldown_range!r}")
    return [_seconds("cooldown_range", value) for value in cooldown_range]


def _positive_number(name: str, value: Any) -> int:
    return _whole_number(name, value, least=1)


def _whole_number(name: str, value: Any, least: int = 0) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {value!r}")
    return number


# --- signals for this Python ------------------------------------------------------------------------------------------


_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class _Terminated(BaseException):
    """Unwinds the stack, as KeyboardInterrupt does for Ctrl-C."""


@contextlib.contextmanager
def unwinds_before_termination() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGHUP run what cleans up within it before they end this process.

    Handlers of the caller are left alone, and so is everything outside the main thread, where there can be none.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # a second signal must not interrupt the cleaning
        if len(received) == 1:
            raise _Terminated

    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in _TERMINATING if is_main and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, handle)
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])


# --- what each rank runs ----------------------------------------------------------------------------------------------


def run_in_rank(own_folder: str) -> None:
    """Raises what the function does, so that the rank fails and prints its traceback.

    An exit leaves its code alone: it would end the caller, too, if that raised it. The code is written down here, since
    other ranks may fail of the exit, and the launcher end this one for that, before it has ended by itself.
    """
    folder = Path(own_folder)
    launch = launched_by.detect()
    # in an elastic job its rank may have changed
    rank = int(os.environ.get(PROCESS_VARIABLE, launch.rank if launch is not None else 0))
    try:
        function, args, kwargs = pickle.loads((folder / CALL_FILE).read_bytes())
        result = pickled_result(function(*args, **kwargs), rank)
    except SystemExit as end:
        exit_file(folder, rank).write_text(str(_exit_code(end)))
        raise
    except BaseException as error:
        error_file(folder, rank).write_bytes(pickled_error(error))
        raise
    result_file(folder, rank).write_bytes(result)


def _exit_code(end: SystemExit) -> int:
    """Returns the exit code that Python makes of it; it is 1 for anything but a number, which Python prints."""
    if end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1


def pickled_result(result: Any, rank: int) -> bytes:
    try:
        data: bytes = pickler().dumps(result)
    except Exception as error:
        raise TypeError(f"the result of rank {rank} cannot be pickled: {error}") from error
    return data


def pickled_error(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        data: bytes = pickler().dumps((error, text))
        pickle.loads(data)  # an exception with arguments of its own may fail only here
    except Exception:
        data = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))
    return data


def unpickled_error(data: bytes, rank: int) -> BaseException:
    """Returns what `pickled_error` has pickled on a rank; its cause shows the traceback."""
    error, text = pickle.loads(data)
    error.__cause__ = RankTraceback(rank, text)
    return error  # type: ignore[no-any-return]
