"""The meaning here of each flag of horovodrun 0.28.1, in one table.

The same table has the places in its file for --config-file and the arguments of `horovod.run` that mean the same.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ringtrain.options import horovod_variables


class State(enum.Enum):
    """Whether a flag does here what it does there."""

    SAME = "the same"
    NO_EFFECT = "no effect"


class Flag(NamedTuple):
    """One flag of horovodrun.

    `off` are spellings that undo a switch, `takes` says how many words follow, `key` where it stands in Horovod's file,
    `arguments` what it is called in `horovod.run`. Flags of the state SAME are parsed by ringrun's own flags, among
    them that of `option`, or set `variable`. Nothing is said of one without effect if it `is_as_wanted`.
    """

    names: tuple[str, ...]
    state: State
    meaning: str
    off: tuple[str, ...] = ()
    takes: int = 1
    key: str = ""
    arguments: tuple[str, ...] = ()
    option: str = ""
    variable: str = ""
    value_if_on: str = "1"
    is_as_wanted: bool = False

    @property
    def is_parsed_by_name(self) -> bool:
        """Whether this table is all that ringrun knows of the flag."""
        return self.state is not State.SAME or bool(self.variable)

    def value(self, is_on: bool) -> str:
        """Returns the value of the variable of a switch."""
        return self.value_if_on if is_on else str(1 - int(self.value_if_on))


class Given(NamedTuple):
    """A flag of this table in the spelling that was used, and the word behind it if it takes one."""

    name: str
    text: str


_VARIABLES = {one.name: one for one in horovod_variables.TABLE}


def _same(*names: str, meaning: str = "", **more: Any) -> Flag:
    return Flag(names, State.SAME, meaning, **more)


def _of_variable(variable: str, *names: str, **more: Any) -> Flag:
    """As the variable that horovodrun sets for it."""
    has_effect, meaning = _VARIABLES[variable].has_effect, _VARIABLES[variable].meaning
    return Flag(names, State.SAME if has_effect else State.NO_EFFECT, meaning, variable=variable, **more)


def _switch_of_variable(variable: str, name: str, key: str = "") -> Flag:
    return _of_variable(variable, f"--{name}", off=(f"--no-{name}",), takes=0, key=key)


_SPARES = "of the slots beyond it, so many have a process that waits to take the place of another one"
_RESTARTS = "a process is replaced three times within 60 s before its host gets no more"

TABLE = (
    _same("-v", "--version", meaning="ringtrain's", takes=0),
    _same("-np", "--num-proc", meaning="without it, all slots of the hosts", arguments=("num_proc", "np")),
    _same("-cb", "--check-build", meaning="nothing is built for any of these; what is there counts", takes=0),
    Flag(
        ("--disable-cache",),
        State.NO_EFFECT,
        "nothing is kept from one start to the next",
        takes=0,
        arguments=("disable_cache",),
        is_as_wanted=True,
    ),
    _same("--start-timeout", meaning="120 if not given, and 0 waits for ever", arguments=("start_timeout",)),
    _same("--network-interfaces", arguments=("network_interfaces",)),
    _same("--network-interface", arguments=("network_interface",)),
    _same("--output-filename", meaning="with any MPI, as there with gloo", arguments=("output_filename",)),
    _same("--verbose", takes=0, arguments=("verbose",)),
    _same("--config-file", meaning="which may hold any other flag, too"),
    _same("-p", "--ssh-port", arguments=("ssh_port",)),
    _same("-i", "--ssh-identity-file", arguments=("ssh_identity_file",)),
    _same("--fusion-threshold-mb", option="fusion_threshold_mb", key="params.fusion_threshold_mb"),
    _of_variable("HOROVOD_CYCLE_TIME", "--cycle-time-ms", key="params.cycle_time_ms"),
    _same("--cache-capacity", option="cache_capacity", key="params.cache_capacity"),
    _switch_of_variable("HOROVOD_HIERARCHICAL_ALLREDUCE", "hierarchical-allreduce", "params.hierarchical_allreduce"),
    _switch_of_variable("HOROVOD_HIERARCHICAL_ALLGATHER", "hierarchical-allgather", "params.hierarchical_allgather"),
    _switch_of_variable("HOROVOD_TORUS_ALLREDUCE", "torus-allreduce", "params.torus_allreduce"),
    _same("--autotune", off=("--no-autotune",), takes=0, option="autotune", key="autotune.enabled"),
    _of_variable("HOROVOD_AUTOTUNE_LOG", "--autotune-log-file", key="autotune.log_file"),
    _of_variable("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "--autotune-warmup-samples", key="autotune.warmup_samples"),
    _of_variable("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "--autotune-steps-per-sample", key="autotune.steps_per_sample"),
    _of_variable(
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "--autotune-bayes-opt-max-samples",
        key="autotune.bayes_opt_max_samples",
    ),
    _of_variable(
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "--autotune-gaussian-process-noise",
        key="autotune.gaussian_process_noise",
    ),
    _same("--min-np", "--min-num-proc", meaning="with sockets only", arguments=("min_num_proc", "min_np")),
    _same("--max-np", "--max-num-proc", meaning=_SPARES, arguments=("max_num_proc", "max_np")),
    _same("--slots-per-host", meaning="also `--slots`; without it, 1", arguments=("slots",)),
    _same("--elastic-timeout", meaning="as `HOROVOD_ELASTIC_TIMEOUT`"),
    _same("--reset-limit", arguments=("reset_limit",)),
    _same("--blacklist-cooldown-range", meaning=_RESTARTS, takes=2, arguments=("cooldown_range",)),
    _same("--timeline-filename", option="timeline_filename", key="timeline.filename"),
    _same(
        "--timeline-mark-cycles",
        off=("--no-timeline-mark-cycles",),
        takes=0,
        option="timeline_mark_cycles",
        key="timeline.mark_cycles",
    ),
    _of_variable(
        "HOROVOD_STALL_CHECK_DISABLE",
        "--stall-check",
        off=("--no-stall-check",),
        takes=0,
        key="stall_check.enabled",
        value_if_on="0",
    ),
    _same(
        "--stall-check-warning-time-seconds",
        meaning="also `--stall-warning-time-s`",
        option="stall_warning_time_s",
        key="stall_check.warning_time_seconds",
    ),
    _same(
        "--stall-check-shutdown-time-seconds",
        meaning="also `--stall-shutdown-time-s`; 600 if not given",
        option="stall_shutdown_time_s",
        key="stall_check.shutdown_time_seconds",
    ),
    _switch_of_variable(
        "HOROVOD_MPI_THREADS_DISABLE", "mpi-threads-disable", "library_options.mpi_threads_disable"
    ),
    _same("--mpi-args", meaning="for srun, too, where that starts the ranks", arguments=("mpi_args",)),
    _same("--tcp", meaning="with any MPI: on a network nothing but TCP", takes=0),
    _same("--binding-args", meaning="with any launcher, in place of what ringrun says about binding"),
    _of_variable("HOROVOD_NUM_NCCL_STREAMS", "--num-nccl-streams", key="library_options.num_nccl_streams"),
    _of_variable("HOROVOD_THREAD_AFFINITY", "--thread-affinity", key="library_options.thread_affinity"),
    _of_variable("HOROVOD_GLOO_TIMEOUT_SECONDS", "--gloo-timeout-seconds", key="library_options.gloo_timeout_seconds"),
    _same("--log-level", option="log_level", key="logging.level"),
    _of_variable(
        "HOROVOD_LOG_HIDE_TIME",
        "--log-with-timestamp",
        "--no-log-hide-timestamp",
        off=("--log-without-timestamp", "--log-hide-timestamp"),
        takes=0,
        key="logging.with_timestamp",
        value_if_on="0",
    ),
    _same("-prefix-timestamp", "--prefix-output-with-timestamp", meaning="with any MPI", takes=0),
    _same("-H", "--hosts", arguments=("hosts",)),
    _same("-hostfile", "--hostfile", meaning="also `host:2`", arguments=("hostfile",)),
    _same("--host-discovery-script", arguments=("host_discovery_script",)),
    _of_variable("HOROVOD_CONTROLLER", "--gloo", takes=0, key="controller: gloo", arguments=("use_gloo",)),
    Flag(
        ("--mpi",),
        State.NO_EFFECT,
        "MPI is used where it is installed",
        takes=0,
        key="controller: mpi",
        arguments=("use_mpi",),
        is_as_wanted=True,
    ),
    Flag(
        ("--jsrun",), State.NO_EFFECT, "MPI's own launcher starts the ranks, also in an allocation of LSF", takes=0
    ),
)  # fmt: skip
BY_NAME = {name: flag for flag in TABLE for name in (*flag.names, *flag.off)}
BY_KEY = {flag.key: flag for flag in TABLE if flag.key}
BY_ARGUMENT = {argument: flag for flag in TABLE for argument in flag.arguments}


def variables(given: Iterable[Given]) -> dict[str, str]:
    """Returns the variables of the ranks for flags that are variables there; the last one wins."""
    flags = [(BY_NAME[one.name], one) for one in given]
    return {flag.variable: _value(flag, one) for flag, one in flags if flag.state is State.SAME}


def sentences(given: Iterable[Given]) -> list[str]:
    """One for each flag that has no effect, unless it asks for what is done anyway."""
    flags = [(BY_NAME[one.name], one) for one in given]
    return [
        f"{' '.join(filter(None, one))} has no effect: {flag.meaning}"
        for flag, one in flags
        if flag.state is State.NO_EFFECT and not _is_as_wanted(flag, one)
    ]


def sentences_of_arguments(given: Mapping[str, Any]) -> list[str]:
    """As `sentences`, for arguments of `horovod.run` and their values."""
    said = []
    for argument, value in given.items():
        flag = BY_ARGUMENT[argument]
        if value and flag.state is State.NO_EFFECT and not flag.is_as_wanted:
            said.append(f"{argument}={value!r} has no effect: {flag.meaning}")
    return said


def _value(flag: Flag, given: Given) -> str:
    return given.text if flag.takes else flag.value(given.name in flag.names)


def _is_as_wanted(flag: Flag, given: Given) -> bool:
    agreeing = _VARIABLES[flag.variable].agreeing_values if flag.variable else ()
    return flag.is_as_wanted or _value(flag, given).lower() in agreeing


def markdown() -> str:
    """The table as docs/migrating.md has it; flags of one meaning share a row, and so do those without effect."""
    flags: dict[str, list[Flag]] = {}
    for flag in TABLE:
        here = "; ".join(filter(None, (flag.state.value, flag.meaning)))
        flags.setdefault(here if flag.state is State.SAME else "no effect; `ringrun` prints why", []).append(flag)
    lines = ["| `horovodrun` | in its file | `horovod.run` | here |", "| --- | --- | --- | --- |"]
    for here, those in flags.items():
        names = [name for flag in those for name in (*flag.names, *flag.off)]
        arguments = [argument for flag in those for argument in flag.arguments]
        lines.append(f"| {_code(names)} | {_code(flag.key for flag in those)} | {_code(arguments)} | {here} |")
    return "\n".join(lines) + "\n"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words if word)


if __name__ == "__main__":
    print(markdown(), end="")
