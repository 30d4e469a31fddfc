"""The benchmark on GPUs: its arithmetic, its peer, and as much of the command as the doubles can carry."""

import argparse
import importlib.util
import os

import numpy as np
import pytest
from harness.exact import require_equal
from harness.gpu_arrays import GPU
from measure.__main__ import MEASUREMENTS, main
from measure.gpu.aim import Aim
from measure.gpu.measurement import PARTS, Gpu

import ringtrain as hvd
from ringtrain import _core
from ringtrain.bench import cli, peers, results
from ringtrain.bench.measurement import Session
from ringtrain.bench.ranks import MpiJob, SingleJob
from ringtrain.bench.results import Result, Round, Row, Spread
from ringtrain.bench.rounds import ALONE
from ringtrain.job import launched_by

NCCL = "nccl, DDP's buckets"


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("must", "goal", "value", "states"),
    [
        (4, 1.5, 4.1, ["not reached", "not reached"]),
        (4, 1.5, 4.0, ["reached", "not reached"]),
        (4, 1.5, 1.5, ["reached", "reached"]),
        (0.6, 0.85, 0.5, ["not reached", "not reached"]),
        (0.6, 0.85, 0.7, ["reached", "not reached"]),
        (0.6, 0.85, 0.9, ["reached", "reached"]),
    ],
)
def test_an_aim_says_whether_the_median_reaches_it(must, goal, value, states):
    verdict = Aim("figure", must, goal, "us").verdict(Spread(value, 0.1, 9.9))
    assert (
        verdict == f"figure: {value:.2f} [0.10-9.90] us; must {must:g} us: {states[0]}, goal {goal:g} us: {states[1]}"
    )


def printed(rows):
    fact = {"gpus": ["A, GPU-1", "A, GPU-1"], "cuda": "13.0", "nccl": None, "library": "torch 2.13.0"}
    return Gpu().table(Result("gpu", {}, {}, rows, [fact]))


def row_of(part, rounds, **key):
    return Row({"part": part, "model": "resnet50", "tensors": 161, "bytes": 64 << 20, **key}, list(map(Round, rounds)))


def test_the_submission_of_a_gradient_is_reported_in_microseconds():
    lines = printed([row_of("submission", [{"ringtrain": {"seconds": 3e-6}, NCCL: {"seconds": 6e-6}}])])
    (line,) = (line for line in lines if line.startswith(NCCL))
    assert line.split()[-4:] == ["6.00", "[6.00-6.00]", "2.00", "[2.00-2.00]"]
    assert lines[-1].endswith("3.00 [3.00-3.00] us; must 4 us: reached, goal 1.5 us: not reached")


@pytest.mark.parametrize(("late_s", "waited"), [(-1e-3, False), (1e-4, True)])
def test_a_step_is_compared_with_that_of_nccl_and_tells_when_the_host_was_late(late_s, waited):
    ours = {"seconds": 2e-3, "host": 1e-3, "late": -1e-3}
    theirs = {"seconds": 2e-3, "host": 3e-3, "late": late_s}
    lines = printed([row_of("step", [{"ringtrain": ours, NCCL: theirs}] * 2)])
    assert lines[-1].endswith(f"times that of {NCCL}: 1.00 [1.00-1.00]; must 1.1: reached, goal 0.9: not reached")
    assert any(f"wait for the host of {NCCL}:" in line for line in lines) == waited


def test_the_floor_of_a_staged_allreduce_is_the_slower_one_of_each_round():
    rounds = [
        {
            "ringtrain": {"seconds": 4.0},
            "copies both ways": {"seconds": copies},
            "floor in host memory": {"seconds": 2.0},
        }
        for copies in (1.0, 3.0, 3.6)
    ]
    assert printed([row_of("staged", rounds)])[-1].startswith(
        "share of the slower floor: 0.75 [0.50-0.90]; must 0.6: r"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_step_is_compared_with_one_without_communication(ranks):
    rounds = [{"ringtrain": {"seconds": 1.01}, ALONE: {"seconds": 1.0}}]
    lines = printed([row_of("training", rounds, inputs=[64, 3, 224, 224], ranks=ranks)])
    verdict = "times that without communication: 1.010 [1.010-1.010]; must 1.02: reached, goal 1.005: not reached"
    assert any(line.endswith(verdict) for line in lines)
    assert (lines[-1] == "The aim is that of one rank.") == (ranks > 1)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "step,steps"], "steps: the parts are submission, step, staged, training"),
        (["--peers", "mpi"], "mpi: the peers are nccl, or none"),
        (["--library", "jax"], "invalid choice"),
    ],
)
def test_a_bad_flag_is_refused_with_what_there_is(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["gpu", *words])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(launched_by.detect() is not None, reason="it starts ranks")
def test_without_a_gpu_there_is_one_sentence_and_no_launch(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_core, "gpu_count", lambda: 0)
    assert main(["gpu", "-np", "2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ringtrain.bench: gpu cannot be measured here: the CUDA driver is missing or shows no GPU")


def measured_in(tmp_path, *words):
    """Returns what a rank of this job measures with CuPy, and in `--json` on rank 0."""
    path = str(MpiJob().gather(str(tmp_path / "gpu.json"))[0])
    quick = ["--library", "cupy", "--rounds", "2", "--warmup", "1", "--steps", "1", "--staged-bytes", "1M"]
    assert main(["gpu", *quick, *words, "--json", path]) == 0
    return results.load(path) if MpiJob().rank == 0 else None


@pytest.mark.ranks(2, initialised=False, env=GPU)
def test_submission_and_host_memory_are_measured_on_cupy_arrays(tmp_path):
    result = measured_in(tmp_path)
    assert not hvd.is_initialized()
    if result is None:
        return
    submission, staged = result.rows
    assert (submission.key["part"], submission.competitors()) == ("submission", ["ringtrain"])
    assert (staged.key["bytes"], staged.competitors()) == (
        1 << 20,
        ["ringtrain", "copies both ways", "floor in host memory"],
    )
    assert all(values["seconds"] > 0 for row in result.rows for one in row.rounds for values in one.values.values())
    assert [note.split(" is left out: ")[0] for note in result.notes[-2:]] == ["step", "training"]
    (fact,) = result.facts
    assert len(set(fact["gpus"])) == 2 and fact["gpus"][0].startswith("Double of a GPU, GPU-")


@pytest.mark.ranks(1, initialised=False, env=GPU)
def test_one_rank_passes_nothing_through_host_memory(tmp_path):
    result = measured_in(tmp_path, "--parts", "submission,staged")
    assert [row.key["part"] for row in result.rows] == ["submission"]
    assert result.notes[-1] == "staged is left out: in a job of one rank nothing has to pass through host memory"


@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_each_part_says_what_it_cannot_do(part):
    arguments = cli.build_parser(MEASUREMENTS).parse_args(["gpu", "--peers", "none"])
    session = Session(SingleJob(), arguments)
    session.facts.append({"way": "nccl"})
    for library in ("torch", "cupy"):
        reason = part.why_not(session, argparse.Namespace(name=library))
        assert bool(reason) == (
            (part.name, library) not in [("submission", "torch"), ("submission", "cupy"), ("training", "torch")]
        )


# --- torch ------------------------------------------------------------------------------------------------------------


class TwoRanksOnOneGpu(SingleJob):
    size = 2

    def gather(self, value):
        return [value, value]


@pytest.fixture
def shared_gpu(monkeypatch):
    """Returns the lines about the NCCL of torch, on a GPU that two ranks share."""
    torch = pytest.importorskip("torch", reason="the peer is torch.distributed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(_core, "gpu_uuid", lambda device: "GPU-1")
    return lambda *version: monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)


def test_nccl_that_cannot_share_a_gpu_does_not_take_part(shared_gpu):
    shared_gpu(2, 29, 3)
    found = peers.find(TwoRanksOnOneGpu(), ["nccl"])
    reason = "ranks 0 and 1 share GPU-1, which NCCL allows from 2.30 on, and that of torch is 2.29.3"
    assert (found.present, found.missing) == ([], {"nccl": reason})


def test_a_job_that_forbids_sharing_is_obeyed_and_others_need_no_permission(shared_gpu, monkeypatch):
    from measure.torch import nccl

    shared_gpu(2, 30, 0)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    assert "which NCCL_MULTI_RANK_GPU_ENABLE forbids" in peers.find(TwoRanksOnOneGpu(), ["nccl"]).missing["nccl"]
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    met = []
    monkeypatch.setattr(nccl, "meet", lambda job, backend, device: met.append((backend, device.type)))
    (peer,) = peers.find(TwoRanksOnOneGpu(), ["nccl"]).present
    assert met == [("nccl", "cuda")] and os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    assert [one.name for one in peer.step()] == [NCCL, f"{NCCL}, bucket view"]


def test_torch_without_a_gpu_has_no_nccl(monkeypatch):
    torch = pytest.importorskip("torch", reason="the peer is torch.distributed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU" in peers.find(SingleJob(), ["nccl"]).missing["nccl"]


@pytest.mark.ranks(2, isolated=True)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the peer is torch.distributed")
def test_buckets_average_as_ddp_does():
    import torch
    from measure.torch import nccl

    from ringtrain.bench.peers.torch_distributed import buckets_of, meet

    job = MpiJob()
    meet(job, "gloo")
    shapes = [(3,), (600, 1000), (5, 7), (1 << 18,), (2,)]
    for competitor in nccl.NcclPeer().step():
        gradients = [torch.full(shape, 1.0 + 2 * job.rank) for shape in shapes]
        run = competitor.prepare(gradients)
        for _ in range(2):
            averages = run()
        assert sorted(tuple(one.shape) for one in averages) == sorted(shapes)
        for average in averages:
            require_equal(average.numpy(), np.full(average.shape, 2.0, np.float32))
    assert [len(members) for members in buckets_of(gradients[::-1])] == [2, 3]
    torch.distributed.destroy_process_group()
