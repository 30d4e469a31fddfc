"""Every environment variable of Horovod either does something or is said to do nothing, once."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness.ringrun_job import needs_mpi, ringrun
from horovod_variables import AT_RUN_TIME, WHEN_BUILT

from ringtrain.options import horovod_variables, table
from ringtrain.runner.supervise import rank_wrapper

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
BY_NAME = {one.name: one for one in horovod_variables.TABLE}
# what is set -> which options have it
EFFECTS = {
    "HOROVOD_FUSION_THRESHOLD": ("1048576", {"fusion_threshold_mb": 1}),
    "HOROVOD_CACHE_CAPACITY": ("5", {"cache_capacity": 5}),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("7", {"stall_warning_time_s": 7}),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("8", {"stall_shutdown_time_s": 8}),
    "HOROVOD_STALL_CHECK_DISABLE": ("1", {"stall_warning_time_s": 86400, "stall_shutdown_time_s": 0}),
    "HOROVOD_START_TIMEOUT": ("9", {"start_timeout_s": 9}),
    "HOROVOD_AUTOTUNE": ("1", {"autotune": "on"}),
    "HOROVOD_TIMELINE": ("t.json", {"timeline_filename": "t.json"}),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("1", {"timeline_mark_cycles": "on"}),
    "HOROVOD_LOG_LEVEL": ("ERROR", {"log_level": "error"}),
}
# these are flags there: test_run_elastic.py
FOR_RINGRUN = {"HOROVOD_ELASTIC_TIMEOUT"}
# and this is one of ringtrain.spark: test_spark.py
FOR_SPARK = {"HOROVOD_SPARK_START_TIMEOUT"}


def test_the_table_has_all_of_horovods_variables_once():
    assert sorted(one.name for one in horovod_variables.TABLE) == sorted(AT_RUN_TIME)


def test_the_document_has_the_table():
    assert horovod_variables.markdown() in PAGE.read_text(), "run `python -m ringtrain.options.horovod_variables`"


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_a_variable_sets_an_option_or_is_said_to_have_no_effect(name):
    value, effects = EFFECTS.get(name, ("17", {}))
    environ = {name: value}
    before, after = table.resolve({}, {}), table.resolve({}, environ)
    changed = {option: after[option] for option in after if after[option] != before[option]}
    assert set(changed) == set(effects) <= set(table.set_by_user({}, environ))
    assert all(changed[option] == effect or float(changed[option]) == effect for option, effect in effects.items())
    said = horovod_variables.sentences(environ)
    has_effect = bool(effects) or name in FOR_RINGRUN | FOR_SPARK
    assert BY_NAME[name].has_effect == has_effect
    assert said == ([] if has_effect else [f"{name}=17 has no effect: {BY_NAME[name].meaning}"])


@pytest.mark.parametrize("value", ["", "0"])
@pytest.mark.parametrize("option", [option for option in table.TABLE if option.alias], ids=lambda option: option.alias)
def test_no_variable_that_is_empty_or_0_stops_a_job(option, value):
    value_here = table.resolve({}, {option.alias: value})[option.name]
    if option.type == "number":
        assert float(value_here) == option.minimum
    else:
        assert value_here == ("off" if option.is_switch else value)


def test_nothing_is_said_of_what_is_as_wanted_or_was_for_the_build():
    environ = {
        **dict.fromkeys(WHEN_BUILT, "1"),
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_CONTROLLER": "MPI",
        "HOROVOD_CPU_OPERATIONS": "mpi",
        "HOROVOD_ELASTIC": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
    }
    assert horovod_variables.sentences(environ) == []
    assert table.resolve({}, environ) == table.resolve({}, {})


def test_a_disabled_stall_check_beats_horovods_times_but_not_ours():
    environ = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    assert float(table.resolve({}, environ)["stall_shutdown_time_s"]) == 0
    assert table.resolve({"stall_shutdown_time_s": 3}, environ)["stall_shutdown_time_s"] == "3"
    environ["RINGTRAIN_STALL_WARNING_TIME_S"] = "2"
    assert table.resolve({}, environ)["stall_warning_time_s"] == "2"


def test_it_is_said_once_on_rank_0(tmp_path):
    code = """
import ringtrain as hvd
for _ in range(2):
    hvd.init()
    hvd.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-m", "ringtrain.run", "-np", "2", "--prefix-output", sys.executable, "-c", code],
        env={**os.environ, "HOROVOD_CYCLE_TIME": "5", "HOROVOD_THREAD_AFFINITY": "0,1", "HOROVOD_TIMELINE": "DYNAMIC"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "has no effect" in line]
    assert [line.partition(" has")[0] for line in said] == [
        "[0] ringtrain: HOROVOD_CYCLE_TIME=5",
        "[0] ringtrain: HOROVOD_THREAD_AFFINITY=0,1",
    ]
    assert list(tmp_path.iterdir()) == []  # no timeline named DYNAMIC


def place(*numbers):
    """The variables of rank, size, local rank, local size, cross rank and cross size."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return {f"HOROVOD_{name}": str(number) for name, number in zip(names, numbers, strict=True)}


OMPI = dict(
    zip([f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")], "3512", strict=True)
)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RINGTRAIN_RANK": "0", "RINGTRAIN_SIZE": "1"}, (0, 1, 0, 1, 0, 1)),
        (OMPI | {"RINGRUN_RANKS_OF_HOSTS": "2,2,1"}, (3, 5, 1, 2, 1, 2)),
        (OMPI, (3, 5, 1, 2, 1, 3)),  # as if all hosts had as many
        ({"PMI_RANK": "2", "PMI_SIZE": "3", "RINGRUN_RANKS_OF_HOSTS": "2,1"}, (2, 3, 0, 1, 1, 2)),
        (
            {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "RINGRUN_RANKS_OF_HOSTS": "2,2"},
            (2, 4, 0, 2, 1, 2),
        ),
        (
            # mpirun --map-by node
            {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
            | {"RINGRUN_RANKS_OF_HOSTS": "2,2"},
            (1, 4, 0, 2, 0, 2),
        ),
    ],
    ids=["one rank", "hosts of mpirun", "mpirun alone", "PMI", "Slurm", "other places"],
)
def test_a_rank_gets_the_variables_of_horovodrun_from_those_of_its_launcher(environ, expected):
    variables = rank_wrapper.variables_of_libraries(environ)
    of_horovod = {name: value for name, value in variables.items() if name.startswith("HOROVOD_")}
    assert of_horovod == {**place(*expected), "HOROVOD_HOSTNAME": socket.gethostname()}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [int(variables[name]) for name in names] == [*expected[:4]]


TORCH = {"RINGRUN_TORCH_PLACE": "fe80::1:30017", "RINGRUN_RANKS_OF_HOSTS": "2,2,1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCH, ("1", "fe80::1", "30017")),
        (TORCH | {"MASTER_ADDR": "h9", "MASTER_PORT": "7"}, ("1", None, None)),  # the user's own stay
        (TORCH | {"RINGRUN_RANKS_OF_HOSTS": "5"}, ("1", None, None)),  # on hosts that ringrun does not know
    ],
    ids=["hosts of ringrun", "of the user", "other hosts"],
)
def test_a_rank_gets_the_place_of_torch_where_ringrun_knows_the_hosts(environ, expected):
    variables = rank_wrapper.variables_of_libraries(OMPI | environ)
    assert tuple(variables.get(name) for name in ("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")) == expected


def test_a_process_without_a_rank_gets_none():
    assert rank_wrapper.variables_of_libraries({}) == {}
    assert rank_wrapper.variables_of_libraries({"RINGRUN_PROCESS": "0", "DMLC_ROLE": "worker"}) == {}


PRINTS_ITS_PLACE = """
import json, os
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
def own_place():
    return {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_") or name in NAMES}
own = [own_place()]
import ringtrain as hvd
hvd.init()
own.append(own_place())
print(json.dumps(own), flush=True)
"""


@needs_mpi
@pytest.mark.parametrize(
    "words",
    [["--network", "sockets"], ["--network", "mpi"], ["--min-np", "2", "-H", "localhost:2"]],
    ids=["sockets", "mpi", "elastic"],
)
def test_ringrun_tells_each_rank_its_place_as_horovodrun_and_torchrun_do(words):
    done = ringrun("-np", "2", "--no-prefix-output", *words, "python", "-c", PRINTS_ITS_PLACE)
    assert done.returncode == 0 and "has no effect" not in done.stderr, done.stderr
    found = sorted(map(json.loads, done.stdout.splitlines()), key=lambda pair: pair[1]["HOROVOD_RANK"])
    for rank, (before, after) in enumerate(found):
        of_torch = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        assert after == {**place(rank, 2, rank, 2, 0, 1), **of_torch, "HOROVOD_HOSTNAME": socket.gethostname()}
        assert before.keys() == after.keys()
        assert before == after or "--min-np" in words  # where init() decides
    assert len(found) == 2


LOSES_A_PROCESS = """
import json
import os
import socket
import numpy as np
import ringtrain as hvd
from ringtrain import elastic

hvd.init()

@elastic.run
def train(state):
    if os.environ["RINGRUN_PROCESS"] == "0":
        os._exit(1)
    hvd.allreduce(np.ones(1), name="x")
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    print([int(os.environ[name]) for name in names], (hvd.rank(), hvd.size()), flush=True)

train(elastic.ObjectState(step=0))
"""


@needs_mpi
def test_a_process_whose_rank_changes_has_the_variables_of_its_new_rank():
    words = ["-np", "2", "--min-np", "2", "-H", "localhost:2", "--no-prefix-output"]
    done = ringrun(*words, "python", "-c", LOSES_A_PROCESS)
    assert done.returncode == 0, done.stderr
    # the survivor has local rank 1, and is rank 0 since it has the state
    assert sorted(done.stdout.splitlines()) == ["[0, 2, 1, 2] (0, 2)", "[1, 2, 0, 2] (1, 2)"]


def test_a_variable_that_ringrun_has_set_is_not_said_to_have_no_effect():
    assert horovod_variables.sentences({**place(1, 2, 1, 2, 0, 1), "RINGRUN_SPEAKER": "ringrun"}) == []
    assert len(horovod_variables.sentences(place(1, 2, 1, 2, 0, 1))) == 6
