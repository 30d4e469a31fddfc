"""The prediction of how a step scales: its formulas, the rounds of real Coordinators, and the tables."""

import argparse
import math

import pytest
from harness import timelines
from harness.simulation import Request, Simulation
from test_bench import run

from ringtrain import _core
from ringtrain._core import OpKind
from ringtrain.bench import models, scaling
from ringtrain.bench.measurement import CannotMeasure
from ringtrain.bench.results import Result, Round, Row
from ringtrain.bench.scaling import (
    ALGORITHMS,
    PUBLISHED,
    Cluster,
    Gradient,
    Scaling,
    allreduce_s,
    levels_of_tree,
    spread_over_backward,
    step_s,
)

MEGA = 10**6


def cluster(ranks, ranks_per_host=1, latency_s=0.0, bytes_per_s=float(MEGA), node_bytes_per_s=math.inf):
    return Cluster(ranks, ranks_per_host, latency_s, bytes_per_s, node_bytes_per_s)


# --- formulas ---------------------------------------------------------------------------------------------------------


def messages_of_round(hosts):
    """Sent and received by the rank that has most of them, when all operations are known."""

    if hosts <= 8:
        return 2 * (hosts - 1)

    def of(rank):
        first = 4 * rank + 1
        children = max(0, min(hosts, first + 4) - first)
        return 2 * (children + (rank > 0))

    return max(of(0), of(1))


@pytest.mark.parametrize("hosts", [1, 2, 3, 5, 6, 8, 21, 64, 300])
def test_a_round_has_the_messages_of_real_coordinators(hosts):
    simulation = Simulation(hosts)
    known = [[Request(OpKind.ALLREDUCE, "gradient", shape=[16])]] * hosts
    simulation.round(known)
    before = simulation.messages_handled()
    simulation.round(known)
    after = simulation.messages_handled()
    assert max(late - early for late, early in zip(after, before, strict=True)) == messages_of_round(hosts)


@pytest.mark.parametrize(("hosts", "levels"), [(1, 0), (2, 1), (5, 1), (6, 2), (21, 2), (22, 3), (32768, 8)])
def test_the_tree_of_a_round_has_four_children(hosts, levels):
    assert levels_of_tree(hosts) == levels


@pytest.mark.parametrize("ranks", [2, 8, 1024])
@pytest.mark.parametrize(("algorithm", "part"), [("ring", 1.0), ("auto", 1.0), ("halving", 1.25)])
def test_without_latency_an_allreduce_takes_what_its_bytes_take(algorithm, part, ranks):
    """A quarter of those of halving, which two ranks may do as a doubling, is not hidden behind the step before."""
    seconds = allreduce_s(cluster(ranks), algorithm, 1000 * MEGA)
    bytes_s = 2 * (ranks - 1) / ranks * 1000
    assert bytes_s <= seconds <= max(part, 1.001) * bytes_s * 1.001


def test_of_many_ranks_on_a_host_only_the_flat_halves_cross_the_link_more_than_once():
    at_once = {name: allreduce_s(cluster(32, 4), name, 1000 * MEGA) for name in ALGORITHMS}
    assert at_once.pop("halving") == pytest.approx(4 * 1.25 * 2 * 31 / 32 * 1000)
    assert at_once == pytest.approx({"ring": 2 * 31 / 32 * 1000, "auto": 1750})


def test_with_latency_alone_a_ring_takes_its_steps_and_halving_the_logarithm():
    fast = cluster(64, latency_s=1e-3, bytes_per_s=1e15)
    round_s = 2 * 3
    assert 1e3 * allreduce_s(fast, "ring", MEGA // 1000) == pytest.approx(round_s + 2 * 63, rel=1e-2)
    assert 1e3 * allreduce_s(fast, "halving", 8) == pytest.approx(round_s + 6, rel=1e-3)


@pytest.mark.parametrize("size", [8, 200_000, 3_000_000, 100 * MEGA])
def test_a_prediction_is_what_the_fastest_algorithm_of_the_ranks_takes(size):
    place = cluster(300, latency_s=5e-5, bytes_per_s=1.25e9)
    chosen = allreduce_s(place, "auto", size)
    assert chosen <= min(allreduce_s(place, "ring", size), allreduce_s(place, "halving", size))
    _, seconds, _ = _core.predict_allreduce("auto", 300, size, 5e-5, 1.25e9)
    assert chosen == scaling.round_s(place) + seconds


def test_the_table_says_what_limits_many_ranks():
    slow_link = cluster(4096, 1, latency_s=5e-6, bytes_per_s=1e8, node_bytes_per_s=1e10)
    far = cluster(4096, 1, latency_s=1e-2, bytes_per_s=1e11, node_bytes_per_s=1e10)
    gradients = [Gradient(0.0, 10 * MEGA)]
    assert scaling.limit_of(slow_link, 0.001, gradients) == "the link of a host (0.8 Gbit/s for data)"
    assert scaling.limit_of(far, 0.001, gradients) == "the latency of a message (10000 us)"
    rows = _predictions_of("--link-gbit", "1", "--model", "vgg16", "--step-ms", "100")
    last = Scaling().table(Result("scaling", {}, {}, rows))[-1]
    assert "at 4096 ranks, limited by the link of a host (0.94 Gbit/s for data)" in last


def test_gradients_ready_together_are_one_plan_and_the_rest_hides_behind_the_computing():
    two = cluster(2)
    # a step of a ring takes some microseconds besides
    assert step_s(two, "ring", 0.0, [Gradient(0.0, 2 * MEGA)] * 5) == pytest.approx(10, abs=1e-4)
    early_and_late = [Gradient(1.0, 4 * MEGA), Gradient(2.0, MEGA), Gradient(100.0, MEGA)]
    assert step_s(two, "ring", 100.0, early_and_late) == pytest.approx(101, abs=1e-4)
    assert step_s(two, "ring", 200.0, early_and_late) == 200


def test_the_last_gradient_is_ready_when_the_step_has_computed():
    gradients = spread_over_backward(3.0, [10, 20, 30], [1, 0, 3])
    assert [(one.ready_s, one.bytes) for one in gradients] == [(2.5, 30), (2.5, 20), (3.0, 10)]


@pytest.mark.parametrize(("model", "billions"), [("resnet50", 3.8), ("resnet101", 7.6), ("vgg16", 15.5)])
def test_the_work_of_a_model_is_what_its_paper_says(model, billions):
    assert sum(models.work_of(model)) == pytest.approx(billions * 1e9, rel=0.02)
    assert len(models.work_of(model)) == len(models.MODELS[model]())


# --- tables -----------------------------------------------------------------------------------------------------------


def test_predictions_stand_beside_what_was_published(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "scaling.png"
    result, printed = run(["scaling", "--plot", str(picture)], tmp_path)
    assert picture.stat().st_size > 0
    assert "Predictions: " in printed and all(setup.title in printed for setup in PUBLISHED)
    published = {
        row.key["part"]: row.spread("published", "efficiency").median
        for row in result.rows
        if "published" in row.competitors()
    }
    assert sorted(published.values()) == [0.68, 0.90, 0.93]
    for row in result.rows:
        assert all(0 < row.spread(name, "efficiency").median <= 1 for name in row.competitors())


def test_a_recorded_step_takes_the_place_of_a_model(tmp_path):
    gradients = [timelines.Gradient("b", 4000, after_percent=25), timelines.Gradient("a", 8000, after_percent=100)]
    job = timelines.MadeUpJob(2, 3, lambda rank, step: 1000 * step, gradients)
    job.write(path := tmp_path / "t.json")
    compute_s, recorded = scaling.recorded_step(str(path))
    assert compute_s == pytest.approx(0.003)  # of the last one
    assert [(one.bytes, round(one.ready_s, 6)) for one in recorded] == [(4000, 0.00075), (8000, 0.003)]


def test_a_file_that_is_no_timeline_is_refused(tmp_path):
    with pytest.raises(CannotMeasure, match=r"^--timeline: .*nothing"):
        scaling.recorded_step(str(tmp_path / "nothing"))


def test_the_constants_of_the_fewest_ranks_predict_the_others():
    arguments = parsed("--link-gbit", "1", "--step-ms", "161")
    rows = []
    for ranks in (2, 4):
        place = cluster(ranks, latency_s=1e-4, bytes_per_s=1e8, node_bytes_per_s=1e10)
        seconds = {
            "8 bytes": allreduce_s(place, "halving", 8),
            "16 MiB": allreduce_s(place, "ring", 16 << 20),
            "step": 1.0,
            "training": 1.0,
        }
        values = {name: {"seconds": one} for name, one in seconds.items()}
        rows.append(Row({"ranks": ranks, "hosts": ranks, "algorithm": "halving"}, [Round(values)]))
    lines = Scaling().table(Result("scaling", vars(arguments), {}, rows))
    small = [line.split()[-1] for line in lines if "8 bytes" in line]
    assert small == ["+0%", "+0%"]
    assert lines[-2] == "constants, from the fewest ranks: 100 us a message, 0.798 of the link"


def _predictions_of(*words):
    return scaling._predictions(parsed("--ranks-per-host", "1", *words))


def parsed(*words):
    parser = argparse.ArgumentParser()
    Scaling().add_flags(parser)
    return parser.parse_args(words)
