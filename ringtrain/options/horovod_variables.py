"""The meaning here of each environment variable that Horovod 0.28.1 reads, in one table.

Those with an option of the same meaning stand in the option table of the core; all others stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ringtrain._core as _core


class Variable(NamedTuple):
    """One variable of Horovod. `meaning` says what it sets here, or why it has no effect.

    Of one without effect nothing is said where its value asks for what ringtrain does anyway.
    """

    name: str
    has_effect: bool
    meaning: str
    agreeing_values: frozenset[str] = frozenset()


_TRUE = frozenset({"true", "on", "yes"})
_FALSE = frozenset({"false", "off", "no"})
_OFF = frozenset({"0", "", *_FALSE})
_ON = frozenset({"1", *_TRUE})

_NO_GLOO = "there is no gloo in ringtrain, MPI or ringrun brings the ranks together"
_NO_TUNER = "autotune has no samples to count; autotune_file keeps what it finds"
_FOR_LIBRARIES = "ringrun sets it for libraries that read it; ringtrain does not read it"
# Variables that ringrun sets for each rank, as in rank_wrapper.py.
_SPEAKER_VARIABLE = "RINGRUN_SPEAKER"
_LOG_LEVEL = "HOROVOD_LOG_LEVEL"
_LEVELS = next(row["choices"] for row in _core.option_table() if row["name"] == "log_level")
_STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"

_OWN = (
    Variable(_STALL_CHECK_DISABLE, True, "1 turns off the warning and the time limit of a stall"),
    Variable("HOROVOD_DYNAMIC_PROCESS_SETS", False, "process sets can always be added and removed", _ON),
    Variable("HOROVOD_CYCLE_TIME", False, "there are no cycles, an operation begins when all ranks have it"),
    Variable("HOROVOD_HIERARCHICAL_ALLREDUCE", False, "the topology decides; on GPUs gpu_algorithm=hierarchical", _OFF),
    Variable("HOROVOD_HIERARCHICAL_ALLGATHER", False, "the topology decides", _OFF),
    Variable("HOROVOD_TORUS_ALLREDUCE", False, "the topology decides; on GPUs gpu_algorithm=hierarchical", _OFF),
    Variable("HOROVOD_DISABLE_GROUP_FUSION", False, "fusion_threshold_mb=0 joins nothing", _OFF),
    Variable("HOROVOD_ADASUM_MPI_CHUNK_SIZE", False, "Adasum goes in the chunks of the other reductions"),
    Variable(
        "HOROVOD_BATCH_D2D_MEMCOPIES", False, "arrays on GPUs are reduced where they are, or packed in one kernel"
    ),
    Variable("HOROVOD_NUM_NCCL_STREAMS", False, "there is one stream for NCCL"),
    Variable("HOROVOD_ENABLE_ASYNC_COMPLETION", False, "on GPUs no call waits for NCCL to complete", _ON),
    Variable("HOROVOD_DISABLE_NVTX_RANGES", False, "there are no NVTX ranges", _ON),
    Variable("HOROVOD_ENABLE_XLA_OPS", False, "there is no TensorFlow in ringtrain", _OFF),
    Variable("HOROVOD_THREAD_AFFINITY", False, "no thread is bound; the launcher may bind ranks"),
    Variable("HOROVOD_MPI_THREADS_DISABLE", False, "MPI has to support several threads", _OFF),
    Variable(_LOG_LEVEL, True, "`log_level`"),
    Variable("HOROVOD_LOG_HIDE_TIME", False, "messages have no time", _ON),
    Variable(
        "HOROVOD_CONTROLLER", False, "MPI or ringrun brings the ranks together; ringrun --network", frozenset({"mpi"})
    ),
    Variable("HOROVOD_CPU_OPERATIONS", False, "shared memory and MPI carry operations", frozenset({"mpi"})),
    Variable("HOROVOD_CCL_CACHE", False, "there is no oneCCL in ringtrain", _OFF),
    Variable("HOROVOD_GLOO_IFACE", False, f"{_NO_GLOO}; ringrun --network-interface"),
    Variable("HOROVOD_GLOO_TIMEOUT_SECONDS", False, f"{_NO_GLOO}; start_timeout_s"),
    Variable("HOROVOD_GLOO_RENDEZVOUS_ADDR", False, _NO_GLOO),
    Variable("HOROVOD_GLOO_RENDEZVOUS_PORT", False, _NO_GLOO),
    Variable("HOROVOD_HOSTNAME", False, _FOR_LIBRARIES),
    Variable("HOROVOD_RANK", False, _FOR_LIBRARIES),
    Variable("HOROVOD_SIZE", False, _FOR_LIBRARIES),
    Variable("HOROVOD_LOCAL_RANK", False, _FOR_LIBRARIES),
    Variable("HOROVOD_LOCAL_SIZE", False, _FOR_LIBRARIES),
    Variable("HOROVOD_CROSS_RANK", False, _FOR_LIBRARIES),
    Variable("HOROVOD_CROSS_SIZE", False, _FOR_LIBRARIES),
    Variable("HOROVOD_AUTOTUNE_LOG", False, "autotune says what it found; autotune_file keeps that"),
    Variable("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", False, _NO_TUNER),
    Variable("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", False, _NO_TUNER),
    Variable("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", False, _NO_TUNER),
    Variable("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", False, _NO_TUNER),
    Variable("HOROVOD_ELASTIC", False, "ringrun --min-np makes a job elastic; horovodrun sets it", _OFF),
    Variable("HOROVOD_ELASTIC_TIMEOUT", True, "for ringrun, as its `--elastic-timeout`"),
    Variable("HOROVOD_SPARK_START_TIMEOUT", True, "the default of `start_timeout` of `ringtrain.spark`"),
)
TABLE = (
    *(
        Variable(row["alias"], True, f"`{row['name']}`")
        for row in _core.option_table()
        if row["alias"].startswith("HOROVOD_")
    ),
    *_OWN,
)


def as_switch(text: str) -> str:
    """ "on" or "off" for what people write for these, also any whole number as in Horovod; else the text itself."""
    word = text.strip().lower()
    if word in _TRUE:
        return "on"
    if word in _FALSE:
        return "off"
    try:
        return "on" if int(word) > 0 else "off"
    except ValueError:
        return text


def options_of(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Option -> value as text and the variable that it comes from, of those that set what has other values here."""
    found = {}
    level = environ.get(_LOG_LEVEL, "").lower()
    if level in _LEVELS:  # Horovod, too, passes over what is none
        found["log_level"] = (level, _LOG_LEVEL)
    if as_switch(environ.get(_STALL_CHECK_DISABLE, "0")) != "on":
        return found
    longest = next(row["maximum"] for row in _core.option_table() if row["name"] == "stall_warning_time_s")
    return found | {
        "stall_warning_time_s": (str(longest), _STALL_CHECK_DISABLE),
        "stall_shutdown_time_s": ("0", _STALL_CHECK_DISABLE),
    }


def is_told_places(environ: Mapping[str, str]) -> bool:
    """Whether ringrun has started this process, and with it has set the variables of `variables_of_place`."""
    return _SPEAKER_VARIABLE in environ


def variables_of_place(
    place: tuple[int, int], on_host: tuple[int, int], across_hosts: tuple[int, int]
) -> dict[str, str]:
    """Returns the variables of horovodrun and of torchrun. Each argument is a rank and a size."""
    named: dict[str, str] = {}
    for kind, (own, all_of_them) in {"": place, "LOCAL_": on_host, "CROSS_": across_hosts}.items():
        named |= {f"HOROVOD_{kind}RANK": str(own), f"HOROVOD_{kind}SIZE": str(all_of_them)}
        if kind != "CROSS_":
            named |= {f"{kind}RANK": str(own), f"{kind}WORLD_SIZE": str(all_of_them)}
    return named


def sentences(environ: Mapping[str, str]) -> list[str]:
    """One for each variable that is set and has no effect, unless ringrun has set it."""
    return [
        f"{one.name}={environ[one.name]} has no effect: {one.meaning}"
        for one in TABLE
        if not one.has_effect
        and one.name in environ
        and environ[one.name].lower() not in one.agreeing_values
        and not (one.meaning == _FOR_LIBRARIES and is_told_places(environ))
    ]


def markdown() -> str:
    """The table as docs/migrating.md has it, but for those that docs/options.md has beside their options."""
    names: dict[str, list[str]] = {}
    for one in _OWN:
        here = one.meaning if one.has_effect else "no effect; rank 0 prints why, unless the value asks for what is done"
        names.setdefault(here, []).append(f"`{one.name}`")
    rows = [f"| {', '.join(those)} | {here} |" for here, those in names.items()]
    return "\n".join(["| Horovod's variable | here |", "| --- | --- |", *rows]) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
