"""The benchmark: its formulas, its rounds and the command. How fast anything is, no test asks."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness.exact import DTYPES, data, data_of_ranks, reference, require_equal
from harness.socket_ranks import free_port

import ringtrain as hvd
from ringtrain import _core, bench
from ringtrain.bench import arguments as bench_arguments, c10d, cli, peers, ranks, results, ringtrain_competitor
from ringtrain.bench.arithmetic import floor, scaling
from ringtrain.bench.cli import busy_core
from ringtrain.bench.collectives import COLLECTIVES
from ringtrain.bench.measurement import Session
from ringtrain.bench.models import MODELS
from ringtrain.bench.ranks import MpiJob, SingleJob
from ringtrain.bench.results import Result, Round, Row, Spread
from ringtrain.bench.rounds import Competitor, Contestant, Plan, Probe, Progress, measure
from ringtrain.bench.step import OwnMemory
from ringtrain.bench.torch_step import ALONE, TorchStep
from ringtrain.job import launched_by
from ringtrain.job.rendezvous import secret

ROOT = str(Path(bench.__file__).parents[2])
TIMEOUT_S = 120
HALVES = [dtype for dtype in DTYPES if dtype.name in ("float16", "bfloat16")]


# --- formulas and data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bus", "link"),
    [
        ("allreduce", 2 * 7 / 8, 2 * 3 / 4),
        ("allgather", 7 / 8, 3 / 4),
        ("broadcast", 1, 1),
        ("alltoall", 7 / 8, 2 * 3 / 4),
        ("reducescatter", 7 / 8, 3 / 4),
    ],
)
def test_the_bus_factors_are_those_of_nccl_tests(name, bus, link):
    (collective,) = [one for one in COLLECTIVES if one.name == name]
    assert collective.bus_factor(8) == bus
    assert collective.link_factor(8, hosts=4) == link


@pytest.mark.parametrize(
    ("name", "tensors", "values"),
    [
        ("resnet50", 161, 25_557_032),
        ("resnet101", 314, 44_549_160),
        ("vgg16", 32, 138_357_544),
        ("bert-large", 391, 335_141_888),
    ],
)
def test_the_models_have_their_gradients(name, tensors, values):
    shapes = MODELS[name]()
    assert (len(shapes), sum(math.prod(shape) for shape in shapes)) == (tensors, values)


@pytest.mark.parametrize(("text", "expected"), [("4", 4), ("2K", 2048), ("64m", 64 << 20), ("1G", 1 << 30)])
def test_sizes_have_units(text, expected):
    assert bench_arguments.parse_bytes(text) == expected


BAD_FLAGS = [["--min-bytes", "0"], ["--max-bytes", "4T"], ["--peers", "x"], ["--option", "x"], ["--network", "x"]]


@pytest.mark.parametrize("words", BAD_FLAGS)
def test_a_bad_flag_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        cli.main(["allreduce", *words])
    assert words[0] in capsys.readouterr().err


def test_an_unknown_model_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        cli.main(["torch", "--models", "resnet18,alexnet"])
    assert "alexnet: the models are resnet18, resnet50, transformer" in capsys.readouterr().err


def result_of(*seconds):
    rounds = [Round({"ringtrain": {"seconds": own}, "mpi": {"seconds": peer}}, 80.0) for own, peer in seconds]
    return Result("step", {}, {"ranks": 2}, [Row({"bytes": 4}, rounds)], [{"private": 1}], ["a note"])


def test_ratios_are_paired_round_by_round():
    (row,) = result_of((1, 3), (2, 4), (4, 20)).rows
    assert row.spread("mpi") == Spread(4, 3, 20)
    assert row.ratio("mpi", "ringtrain") == Spread(3, 2, 5)


def test_launches_are_merged_with_all_their_rounds(tmp_path):
    merged = results.merge([result_of((1, 3)), result_of((2, 4), (4, 20))])
    assert [one.launch for one in merged.rows[0].rounds] == [0, 1, 1]
    assert (merged.facts, merged.notes) == ([{"private": 1}] * 2, ["a note"])
    path = str(tmp_path / "merged.json")
    results.save(merged, path)
    assert results.load(path) == merged
    summary = json.loads(Path(path).read_text())["rows"][0]["summary"]
    assert summary["mpi"]["seconds / ringtrain"] == {"median": 3, "least": 2, "most": 5}


# --- rounds -----------------------------------------------------------------------------------------------------------


class NearOnce:
    """A probe that finds the cores near in the first round only."""

    def __init__(self):
        self._distances = [80.0]

    def wait_for(self, state, patience_s):
        return self._distances.pop() if self._distances else 480.0


@pytest.mark.parametrize(("only", "rounds"), [(None, 4), ("near", 1), ("far", 0)])
def test_rounds_go_on_while_the_cores_are_as_wanted(only, rounds):
    contestants = [Contestant(name, lambda: None) for name in ("a", "b")]
    seen = []

    def sample(contestant):
        seen.append(contestant.name)
        return {"seconds": 1.0}

    plan = Plan(rounds=4, warmup=1, only=only)
    measured = measure(NearOnce(), plan, Progress(is_shown=False), contestants, sample)
    assert len(measured) == rounds
    assert all(list(one.values) == ["a", "b"] for one in measured)
    assert seen[2:] == [*"abbaabba"][: 2 * rounds]


def test_a_peer_with_a_wrong_result_does_not_take_part():
    arguments = cli.build_parser(cli.MEASUREMENTS).parse_args(["step", "--quiet"])
    session = Session(SingleJob(), arguments)
    array = np.zeros(3)
    double = Competitor("double", lambda tensors: lambda: 2 * tensors[0])
    for values, is_right in ((1, lambda result: result.sum() == 6), (2, lambda result: result.sum() == 12)):
        (contestant,) = session.admit([double], [array], lambda values=values: array.fill(values), is_right)
        assert contestant.name == "double"
    with pytest.raises(RuntimeError, match="double computes a wrong result"):
        session.admit([double], [array], lambda: array.fill(1), lambda result: result.sum() == 3)


def test_a_peer_that_takes_too_long_is_left_out_and_ringtrain_is_not():
    arguments = cli.build_parser(cli.MEASUREMENTS).parse_args(["step", "--quiet", "--patience", "0"])
    session = Session(SingleJob(), arguments)
    own = Competitor(ringtrain_competitor.NAME, lambda tensors: lambda: None, is_own=True)
    competitors = [own, Competitor("slow", own.prepare)]
    (contestant,) = session.admit(competitors, [], lambda: None, lambda result: True)
    assert contestant.name == ringtrain_competitor.NAME
    assert session.notes == ["slow does not take part: one run took 0.0 s, more than --patience 0"]


# --- what is measured with --------------------------------------------------------------------------------------------


def test_a_round_trip_is_timed_and_a_lonely_one_ends():
    board = np.zeros(_core.ROUND_TRIP_BYTES + 128, np.uint8)
    address = (board.ctypes.data + 127) // 128 * 128
    begin = time.monotonic()
    assert _core.round_trip_ns(address, True, 0.05) == math.inf
    assert time.monotonic() - begin < 5
    board.fill(0)
    other = threading.Thread(target=_core.round_trip_ns, args=(address, False, 30.0))
    other.start()
    assert 0 < _core.round_trip_ns(address, True, 30.0) < 30e9
    other.join()


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_the_ranks_of_a_node_measure_their_distance_together():
    job = MpiJob()
    assert (job.rank, job.size, job.hosts) == (hvd.rank(), hvd.size(), 1)
    distance_ns = Probe(job).distance_ns()
    assert len(set(job.gather(distance_ns))) == 1
    assert distance_ns is None or distance_ns > 0


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mpi_sums_16_bit_floats_exactly_with_our_kernels(dtype):
    from mpi4py import MPI

    from ringtrain.bench.peers.mpi import sum_of

    op = sum_of(dtype)
    for count in (1, 7, 1021, 100_003):
        array = data(hvd.rank(), (count,), dtype)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, [array.view(np.uint16), MPI.UINT16_T], op)
        require_equal(array, reference("sum", data_of_ranks(hvd.size(), (count,), dtype)))


@pytest.mark.parametrize("dtype", DTYPES[-4:], ids=str)
def test_scaling_and_the_floor(dtype):
    source, destination = np.arange(100).astype(dtype), np.zeros(100, dtype)
    scaling(destination, source, 0.5)()
    require_equal(destination, (np.arange(100) / 2).astype(dtype))
    floor([source, destination])()
    require_equal(source, (-np.arange(100)).astype(dtype))
    require_equal(destination, (-np.arange(100) / 2).astype(dtype))


def test_a_busy_core_is_busy_until_it_is_left():
    cpu = min(os.sched_getaffinity(0))
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    with busy_core(cpu):
        (child,) = children.read_text().split()
        time.sleep(0.3)
        assert f"Cpus_allowed_list:\t{cpu}\n" in Path(f"/proc/{child}/status").read_text()
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.ranks(2)
def test_own_memory_is_the_segments_and_the_private_pages():
    memory = OwnMemory.read()
    assert 0 < memory.segments <= memory.of_node
    assert memory.private > 0


@pytest.mark.ranks(2)
def test_the_memory_of_segments_is_that_in_use_and_not_their_size():
    page = os.sysconf("SC_PAGESIZE")
    size = 1000 * page
    before = OwnMemory.read()
    hvd.barrier()
    array = hvd.empty(size, np.uint8)
    hvd.barrier()
    grown = OwnMemory.read().of_node - before.of_node
    hvd.barrier()  # arrays may end from here on
    assert abs(grown - 2 * array.nbytes) <= 2 * page


# --- peers ------------------------------------------------------------------------------------------------------------


class TwoRanks(SingleJob):
    size = 2


def test_a_peer_that_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "ringtrain.bench.peers.gloo", raising=False)
    monkeypatch.delitem(sys.modules, "ringtrain.bench.peers.torch_distributed", raising=False)
    found = peers.find(TwoRanks(), ["gloo"])
    assert found.present == [] and "torch" in found.missing["gloo"]


def test_one_rank_has_no_peers():
    assert set(peers.find(SingleJob(), peers.NAMES).missing) == set(peers.NAMES)


# --- the command ------------------------------------------------------------------------------------------------------

needs_mpi = pytest.mark.skipif(
    launched_by.detect() is not None, reason="a launcher cannot be started by a rank of another one"
)
QUICK = ["--rounds", "2", "--warmup", "1", "--peers", "mpi"]
SMALL = ["--min-bytes", "4", "--max-bytes", "4K", "--factor", "32"]
SWEEPS = [one.name for one in COLLECTIVES]
OF_RANKS = [
    *([name, *QUICK, *SMALL, "--dtype", "float16"] for name in SWEEPS),
    ["latency", *QUICK, "--calls", "20", "--max-bytes", "64", "--network", "mpi,sockets", "--cpu"],
]
OF_AUTHORS = [
    ["pending", "--rounds", "2", "--warmup", "1", "--counts", "10", "300", "--kind", "alltoall", "--order", "other"],
    ["overlap", *QUICK, "--layer-us", "50", "--busy-core", "0"],
    ["parameters", *QUICK, "--peers", "none"],
    ["submission", *QUICK, "--gradients", "3", "--steps", "2"],
    ["idle", "--seconds", "0.2"],
]
SEVERAL = """
import json, sys
import measure.__main__, ringtrain.bench.cli
of_users, of_authors = map(json.loads, sys.argv[1:])
for main, lines in ((ringtrain.bench.cli.main, of_users), (measure.__main__.main, of_authors)):
    if any([main(line) for line in lines]):
        sys.exit(1)
"""


def start(command_line, status=0):
    """Run a command line and return what it printed."""
    done = subprocess.run(
        [sys.executable, *command_line],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/test", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def run(words, tmp_path, module="ringtrain.bench"):
    """Run the command; return its result and what it printed."""
    path = str(tmp_path / "result.json")
    printed = start(["-m", module, *words, "--json", path])
    return results.load(path), printed


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The results of several measurements in one job of two ranks, by name, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    lines = [
        json.dumps([[*words, "--json", str(folder / words[0])] for words in some]) for some in (OF_RANKS, OF_AUTHORS)
    ]
    printed = start(["-m", "ringtrain.run", "-np", "2", sys.executable, "-c", SEVERAL, *lines])
    return {words[0]: results.load(str(folder / words[0])) for words in [*OF_RANKS, *OF_AUTHORS]}, printed


def require_sane(result, competitors, rounds=2):
    for row in result.rows:
        assert row.competitors() == competitors and len(row.rounds) == rounds
        assert all(0 < values["seconds"] < 60 for one in row.rounds for values in one.values.values())


@needs_mpi
@pytest.mark.parametrize("name", SWEEPS)
def test_a_collective_is_swept_over_sizes(measured, name):
    result, printed = measured[0][name], measured[1]
    require_sane(result, ["ringtrain", "mpi"])
    assert [row.key["bytes"] for row in result.rows] == [4, 128, 4096]
    assert result.environment["ranks"] == 2 and result.arguments["dtype"] == "float16"
    assert f"{name}: 2 ranks on 1 host" in printed and "busbw GB/s" in printed


@needs_mpi
def test_parameters_are_broadcast_beside_one_array_of_as_many_bytes(measured):
    require_sane(measured[0]["parameters"], ["ringtrain", "ringtrain, one array"])
    assert "resnet50: 161 parameters, 102.2 MB" in measured[1]


@needs_mpi
def test_latency_has_percentiles_for_each_network(measured):
    result, printed = measured[0]["latency"], measured[1]
    require_sane(result, ["ringtrain", "ringtrain over sockets", "mpi"])
    assert "ringtrain: network=mpi" in printed and "cpu us" in printed
    assert [row.key["bytes"] for row in result.rows] == [4, 16, 64]
    for one in result.rows[0].rounds:
        assert all(v["min"] <= v["p10"] <= v["seconds"] <= v["p99"] for v in one.values.values())
        assert all(v["cpu"] > 0 for v in one.values.values())


@needs_mpi
def test_operations_in_flight_are_measured_for_growing_numbers_of_them(measured):
    result, printed = measured[0]["pending"], measured[1]
    require_sane(result, ["ringtrain"])
    assert [row.key["operations"] for row in result.rows] == [10, 300] and "us each" in printed


@needs_mpi
def test_a_compression_is_measured_beside_the_allreduce_without(tmp_path):
    result, printed = run(["allreduce", "-np", "2", *QUICK, *SMALL, "--compression", "two_bit"], tmp_path)
    require_sane(result, ["ringtrain", "uncompressed", "mpi"])
    assert "uncompressed" in printed


@needs_mpi
def test_ranks_without_mpi_measure_sockets(tmp_path):
    result, printed = run(["allreduce", "-np", "2", *QUICK, *SMALL, "--network", "sockets", "--cpu"], tmp_path)
    require_sane(result, ["ringtrain"])
    assert "2 ranks on 1 host" in printed and "no MPI" in printed
    assert "mpi does not take part: the ranks were started without MPI" in printed


@needs_mpi
def test_overlap_knows_when_each_gradient_was_there(measured):
    result, printed = measured[0]["overlap"], measured[1]
    require_sane(result, ["compute", "communicate", "together"])
    (fact,) = result.facts
    assert len(fact["finished_s"]) == 161 and min(fact["finished_s"]) > 0 and fact["backward_s"] > 0
    assert "hidden behind the computing" in printed


@needs_mpi
def test_submissions_are_measured_of_each_library(measured):
    result, printed = measured[0]["submission"], measured[1]
    names = ["NumPy, allreduce_async_", "NumPy, DistributedOptimizer"]
    require_sane(result, [*names, "torch, hook"] if importlib.util.find_spec("torch") else names)
    assert "3 gradients" in printed


@needs_mpi
def test_idle_ranks_are_asked_for_their_processor_time(measured):
    assert [row.key for row in measured[0]["idle"].rows] == [{"rank": 0}, {"rank": 1}]


@pytest.mark.slow
@needs_mpi
def test_a_step_is_measured_with_its_floor_and_its_memory_in_two_launches(tmp_path):
    quick = ["--rounds", "1", "--warmup", "0", "--peers", "mpi"]
    words = ["step", "-np", "2", "--launches", "2", *quick, "--shared", "--option", "mailbox_kb=64"]
    result, printed = run(words, tmp_path)
    mpi = [f"mpi, {how}" for how in ("per tensor", "1 MB fusion", "2 MB fusion", "64 MB fusion")]
    shared = ["ringtrain.empty"] if hasattr(hvd, "empty") else []
    require_sane(result, ["ringtrain", "floor", *shared, *mpi], rounds=2)
    assert result.rows[0].key == {"model": "resnet50", "tensors": 161, "bytes": 102_228_128}
    assert len(result.facts) == 2 and all(0 < fact["segments"] <= fact["of_node"] for fact in result.facts)
    assert "of the floor" in printed and "memory of ringtrain itself" in printed


@pytest.mark.slow
@needs_mpi
def test_a_training_step_is_measured_beside_one_without_communication(tmp_path):
    pytest.importorskip("torch", reason="a torch model is trained")
    sizes = ["--models", "resnet18", "--batch-size", "2", "--image-size", "32", "--steps", "1"]
    once = ["--rounds", "1", "--warmup", "0", "--peers", "gloo"]
    result, printed = run(["torch", "-np", "2", *once, *sizes], tmp_path)
    shared, ddp = "ringtrain, shared view", ["DDP, gloo", "DDP, gloo, bucket view"]
    require_sane(result, ["ringtrain", "no communication", shared, *ddp], rounds=1)
    assert result.rows[0].key == {"model": "resnet18", "tensors": 62, "bytes": 46_758_048, "inputs": [2, 3, 32, 32]}
    assert "exposed ms" in printed and "2x3x32x32 on each rank" in printed


@pytest.mark.slow
@needs_mpi
def test_operations_and_trainings_of_torch_distributed_are_measured_beside_gloo(tmp_path):
    pytest.importorskip("torch", reason="a backend of torch is measured")
    from ringtrain.bench import torch_groups

    sizes = ["--sizes", "4,1K", "--models", "resnet18", "--batch-size", "2", "--image-size", "32", "--steps", "1"]
    result, printed = run(["c10d", "-np", "2", "--rounds", "1", "--warmup", "0", *sizes], tmp_path)
    operations, trainings = result.rows[:-2], result.rows[-2:]
    expected = [{"operation": one, "bytes": size} for one in c10d.OPERATIONS for size in (4, 1024)]
    whole = ("all_reduce", "all_reduce_in_pairs", "broadcast", "send_recv")
    split = [one for one in c10d.OPERATIONS if one not in whole]
    for key in expected:
        if key["operation"] in split:
            key["bytes"] = max(8, key["bytes"])  # a value for each rank
    assert [row.key for row in operations] == expected
    for row in operations:
        peers = ["gloo", "mpi"] if row.key["operation"] in torch_groups.OF_MPI else ["gloo"]
        require_sane(Result("c10d", {}, {}, [row]), ["ringtrain", *peers], rounds=1)
    assert [(row.key["training"], row.key["model"]) for row in trainings] == [("ddp", "resnet18"), ("fsdp", "resnet18")]
    for row in trainings:
        floor = f"{row.key['training']} of one rank"
        require_sane(Result("c10d", {}, {}, [row]), ["ringtrain", "no communication", floor, "gloo"], rounds=1)
    assert "all_to_all_single" in printed and "fsdp, resnet18: 62 gradients" in printed


def test_a_group_of_one_rank_is_not_measured(capsys):
    pytest.importorskip("torch", reason="a backend of torch is measured")
    with pytest.raises(SystemExit):
        cli.main(["c10d", "--operations", "all_reduce,scan"])
    assert "scan: the operations are all_reduce, all_gather_into_tensor" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="c10d needs at least two ranks: use -np 2"):
        cli.main(["c10d"])


def test_torch_models_have_their_parameters():
    pytest.importorskip("torch", reason="the models are those of torch")
    from ringtrain.bench import torch_training as training
    from ringtrain.bench.torch_step import MODELS as NAMES

    assert tuple(training.MODELS) == NAMES
    shapes = [tuple(parameter.shape) for parameter in training.resnet50().parameters()]
    assert sorted(shapes) == sorted(MODELS["resnet50"]())


def test_torch_is_asked_for_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["torch"])
    assert "torch needs torch; pip install torch" in capsys.readouterr().err


def test_exposed_communication_is_what_a_step_takes_longer():
    values = {"ringtrain": {"seconds": 1.5}, ALONE: {"seconds": 1.0}, "DDP, gloo": {"seconds": 2.0}}
    row = Row({"model": "resnet18", "tensors": 1, "bytes": 4, "inputs": [1]}, [Round(values)])
    printed = TorchStep().table(Result("torch", {}, {}, [row]))
    ours, alone, ddp = (line.split() for line in printed[3:6])
    assert ours[1:] == ["1500.00", "[1500.00-1500.00]", "1.50", "[1.50-1.50]", "500.00", "[500.00-500.00]"]
    assert alone[2:] == ["1000.00", "[1000.00-1000.00]", "0.67", "[0.67-0.67]"]
    assert ddp[-3:] == ["1000.00", "[1000.00-1000.00]", "2.00"]


def test_the_time_of_the_wrapper_of_a_peer_is_told_apart():
    seconds = {"ringtrain": 1.5, ALONE: 1.0, "ddp of one rank": 1.25, "gloo": 2.0}
    key = {"training": "ddp", "model": "resnet18", "tensors": 1, "bytes": 4, "inputs": [1]}
    row = Row(key, [Round({name: {"seconds": one} for name, one in seconds.items()})])
    printed = c10d.C10d().table(Result("c10d", {}, {}, [row]))
    ours, _, floor, gloo = (line.split() for line in printed[4:8])
    assert ours[-4:] == ["500.00", "[500.00-500.00]", "250.00", "[250.00-250.00]"]
    assert floor[-3:] == ["250.00", "[250.00-250.00]", "0.50"]
    assert gloo[-6:] == ["1000.00", "[1000.00-1000.00]", "2.00", "750.00", "[750.00-750.00]", "3.00"]


def test_negotiation_is_simulated_without_a_launcher(tmp_path):
    result, _ = run(["negotiation", "--max-ranks", "32", "--tensors", "5"], tmp_path, "measure")
    assert [row.key["ranks"] for row in result.rows] == [2, 4, 8, 16, 32]
    assert result.rows[-1].rounds[0].values["steady"]["messages"] == 10


def test_one_rank_needs_no_launcher(tmp_path):
    result, printed = run(["allreduce", *QUICK, *SMALL], tmp_path)
    require_sane(result, ["ringtrain"])
    assert "mpi does not take part: a job of one rank has no other rank" in printed


@needs_mpi
def test_a_launch_that_fails_is_reported():
    words = ["allreduce", "-np", "2", *QUICK, "--option", "mailbox_kb=0"]
    printed = start(["-m", "ringtrain.bench", *words], status=1)
    assert "launch 1 of 1 ended with status" in printed and "mailbox_kb" in printed


@pytest.mark.parametrize(
    "keys",
    [
        [{"bytes": 4}, {"bytes": 8}],
        [{"rank": 0}, {"rank": 1}],
        [{"model": "vgg16"}],
        [{"model": "a"}, {"model": "b"}],
        [{"part": "a", "bytes": 4}, {"part": "b", "bytes": 8}],
        [],
    ],
)
def test_a_result_is_drawn(keys, tmp_path):
    pytest.importorskip("matplotlib")
    from ringtrain.bench.report import draw

    result = result_of((1, 3), (2, 4))
    result.environment["hosts"] = 1
    result.rows = [Row(key, result.rows[0].rounds) for key in keys]
    path = tmp_path / "result.png"
    draw(result, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_rank_that_measures_alone_does_not_wait_for_ever(tmp_path, monkeypatch):
    secret.write(tmp_path / "secret")
    place = {"RINGTRAIN_RENDEZVOUS": f"127.0.0.1:{free_port()}", "RINGTRAIN_RANK": "1", "RINGTRAIN_SIZE": "2"}
    for name, value in {**place, secret.FILE_VARIABLE: str(tmp_path / "secret")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_MEETING_S", 0.5)
    with pytest.raises(hvd.StalledError, match="rank 0"):
        ranks.join(["sockets"])


# --- links ------------------------------------------------------------------------------------------------------------


def test_links_between_hosts_say_what_a_step_would_send(two_hosts, tmp_path):
    path = tmp_path / "links.json"
    bench = [sys.executable, "-m", "ringtrain.bench", "links", "--rounds", "2", "--warmup", "1", "--seconds", "0.01"]
    command = [*bench, "-np", "4", "-H", ",".join(f"{name}:2" for name in two_hosts.names), "--json", str(path)]
    done = subprocess.run(
        two_hosts.command_on(0, [*command, "--parameters", "1M", "--every", "10"]),
        env={**os.environ, **two_hosts.environment, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = results.load(str(path))
    require_sane(result, [ringtrain_competitor.NAME])
    assert [row.key for row in result.rows] == [
        {"link": list(two_hosts.names)},
        {"operation": "allreduce"},
        {"operation": "allgather"},
    ]
    assert result.facts == [{"hosts": list(two_hosts.names), "ranks": [2, 2], "islands": [[0, 1], [2, 3]]}]
    sent = {line.rsplit(None, 2)[0]: line.split()[-2] for line in done.stdout.splitlines() if "DiLoCo" in line}
    # half of the ring's bytes twice: 4 bytes a parameter; the codes have a scale of 4 bytes for each 256 parameters
    assert sent == {
        "DiLoCo, every=10": "0.40",
        "DiLoCo, every=10, fp16": "0.20",
        "DiLoCo, every=10, int8": "0.10",
        "DiLoCo, every=10, int4": "0.05",
    }
    milliseconds = [float(line.split()[-1]) for line in done.stdout.splitlines() if "DistributedOptimizer" in line]
    assert len(milliseconds) == 2 and min(milliseconds) > 0  # fp16 may take as long: the rates are measured


def test_links_need_two_hosts():
    assert "all ranks are on one: give several hosts with -H" in start(["-m", "ringtrain.bench", "links"], 1)


def test_numbers_of_parameters_have_units():
    refused = start(["-m", "ringtrain.bench", "links", "--parameters", "many"], 2)
    assert 'must be a number of parameters such as 25.6M, not "many"' in refused


@pytest.mark.parametrize("name", ["jax", "overlap", "pending"])
def test_a_measurement_of_developers_says_where_it_is(name):
    refused = start(["-m", "ringtrain.bench", name, "-np", "2"], 2)
    assert f"{name} is measured in a checkout of ringtrain: cd test && python -m measure {name}" in refused
    assert f"usage: python -m measure {name} " in start(["-m", "measure", name, "--help"])
