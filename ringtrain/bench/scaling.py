"""How a step scales: predicted by a model for 2 to 32,768 ranks, and the prediction held against real hosts.

Without ranks it predicts. With ranks, best one on each of several hosts, it measures what the model needs and what the
model says: constants come from the fewest ranks, and the table shows by how much the model is off everywhere.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ringtrain as hvd
from ringtrain import _core
from ringtrain.bench import results
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.models import MODELS, work_of
from ringtrain.bench.report import Table, lines_of, milliseconds_text
from ringtrain.bench.results import Result, Round, Row, Spread
from ringtrain.bench.rounds import Array, Contestant, cost_for_all
from ringtrain.record.timeline_files import TraceError
from ringtrain.timeline.report import trace

# --- a step among many ranks, as arithmetic ---------------------------------------------------------------------------
# The link, the algorithms, the rounds between them, overlap. The model leaves out ranks that are slower than others,
# and a network that has less to give than all its links together.


# As tree_channel.h has them.
_CHILDREN, _MOST_DIRECT = 4, 8
_PLAN_BYTES = 128 << 20


@dataclass(frozen=True)
class Cluster:
    """latency_s: of a message, with what both ends do for it. bytes_per_s: of a host's link, each way.
    node_bytes_per_s: of what the ranks of a host do among themselves, and of adding."""

    ranks: int
    ranks_per_host: int
    latency_s: float
    bytes_per_s: float
    node_bytes_per_s: float

    @property
    def hosts(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_host)


@dataclass(frozen=True)
class Gradient:
    """One gradient of a step: when it is ready, in seconds from the beginning of the step, and its bytes."""

    ready_s: float
    bytes: int


def levels_of_tree(hosts: int) -> int:
    """How many messages one after the other go from the last host to the first."""
    levels, last = 0, hosts - 1
    while last > 0:
        levels, last = levels + 1, (last - 1) // _CHILDREN
    return levels


def round_s(cluster: Cluster) -> float:
    """The ranks agree on what to do next: few hosts tell each other, more go up a tree and down again."""
    hops = min(cluster.hosts - 1, 1) if cluster.hosts <= _MOST_DIRECT else 2 * levels_of_tree(cluster.hosts)
    return hops * cluster.latency_s


def ring_s(cluster: Cluster, size: int) -> float:
    """All ranks in one ring, in their order, so that it crosses each link once each way."""
    return between_s("ring", cluster.ranks, size, cluster)


def halving_s(cluster: Cluster, size: int) -> float:
    """All ranks exchange halves of halves with ever nearer ones. While those are on other hosts, all ranks of a host
    use its link at the same time."""
    shared = replace(cluster, bytes_per_s=cluster.bytes_per_s / cluster.ranks_per_host)
    return between_s("doubling", cluster.ranks, size, shared)


def chosen_s(cluster: Cluster, size: int) -> float:
    """Each host sums first, and then the hosts; the stages are at work at the same time, so that the slowest one
    counts."""
    lanes = cluster.ranks_per_host
    lane = replace(cluster, bytes_per_s=cluster.bytes_per_s / lanes)
    return max(_on_node(cluster, size), between_s("auto", cluster.hosts, size // lanes, lane))


def between_s(algorithm: str, places: int, size: int, cluster: Cluster) -> float:
    """Seconds by what the ranks themselves choose by, with allreduce_algorithm=`algorithm`."""
    return _core.predict_allreduce(algorithm, places, size, cluster.latency_s, cluster.bytes_per_s)[1]


def _on_node(cluster: Cluster, size: int) -> float:
    local = cluster.ranks_per_host
    return 2 * (local - 1) / local * size / cluster.node_bytes_per_s


Algorithm = Callable[[Cluster, int], float]
ALGORITHMS: dict[str, Algorithm] = {
    "auto": chosen_s,
    "ring": ring_s,
    "halving": halving_s,
}


def allreduce_s(cluster: Cluster, algorithm: str, size: int) -> float:
    """One allreduce, with the round that agrees on it. One host needs no link, whatever the algorithm."""
    if cluster.hosts == 1:
        return _on_node(cluster, size)
    return round_s(cluster) + ALGORITHMS[algorithm](cluster, size)


def step_s(cluster: Cluster, algorithm: str, compute_s: float, gradients: Sequence[Gradient]) -> float:
    """A step that computes for so long, while its gradients are reduced: what is ready when the ranks come to a round
    is one plan, unless it is too long for one."""
    waiting = sorted(gradients, key=lambda gradient: gradient.ready_s)
    now, first = 0.0, 0
    while first < len(waiting):
        now, size, end = max(now, waiting[first].ready_s), 0, first
        while end < len(waiting) and waiting[end].ready_s <= now:
            if end > first and size + waiting[end].bytes > _PLAN_BYTES:
                break
            size, end = size + waiting[end].bytes, end + 1
        now, first = now + allreduce_s(cluster, algorithm, size), end
    return max(now, compute_s)


def limit_of(cluster: Cluster, compute_s: float, gradients: Sequence[Gradient]) -> str:
    """Returns the limit without which a step would be shortest: bytes, messages, or the work within a host."""
    without = {
        f"the link of a host ({8e-9 * cluster.bytes_per_s:.3g} Gbit/s for data)": replace(
            cluster, bytes_per_s=math.inf
        ),
        f"the latency of a message ({1e6 * cluster.latency_s:.0f} us)": replace(cluster, latency_s=0.0),
        "what the ranks of a host do among themselves": replace(cluster, node_bytes_per_s=math.inf),
    }
    return min(without, key=lambda what: step_s(without[what], "auto", compute_s, gradients))


def spread_over_backward(compute_s: float, sizes: Sequence[int], work: Sequence[float]) -> list[Gradient]:
    """The gradients of a step whose last two thirds are the backward pass, from the last parameter to the first. Each
    takes its share of the work."""
    total, done, gradients = sum(work), 0.0, []
    for size, own in reversed(list(zip(sizes, work, strict=True))):
        done += own
        gradients.append(Gradient(compute_s * (1 + 2 * done / total) / 3, size))
    return gradients


# --- the measurement --------------------------------------------------------------------------------------------------


_MOST_RANKS = 32768
_MANY_RANKS, _GOOD = 4096, 0.9
_SMALL_BYTES, _LARGE_BYTES = 8, 16 << 20
_SMALL, _LARGE, _TOGETHER, _TRAINING = "8 bytes", "16 MiB", "step", "training"
_SMALL_ITERATIONS = 50
# Names of options of what is measured, by those of the model.
_FORCED = {"ring": "ring", "halving": "doubling"}


@dataclass(frozen=True)
class Setup:
    """A job that somebody has measured. `images_per_s`: of one GPU, which is an assumption unless they say it."""

    model: str
    images: int
    images_per_s: float
    ranks_per_host: int
    link_gbit: float
    published: dict[int, float]

    @property
    def title(self) -> str:
        return f"{self.model}, {self.ranks_per_host} ranks a host, {self.link_gbit:g} Gbit/s"


# Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018: 128 servers with four
# P100 each. Laanait et al., "Exascale deep learning for scientific inverse problems", 2019: six V100 a host on Summit,
# with another network than this, whose shapes are not published.
PUBLISHED = (
    Setup("resnet101", 64, 130.0, 4, 25.0, {512: 0.90}),
    Setup("vgg16", 64, 150.0, 4, 25.0, {512: 0.68}),
    Setup("resnet101", 64, 260.0, 6, 200.0, {27600: 0.93}),
)


class Scaling:
    name = "scaling"
    help = "a step on 2 to 32,768 ranks, predicted; with ranks: how far the prediction is off"
    scales = True

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--link-gbit", type=float, metavar="X", help="speed of a host's link; default: the published ones")
        add("--latency-us", type=float, default=5.0, metavar="US", help="of a message (default: %(default)s)")
        add("--link-share", type=float, default=0.94, metavar="S", help="of the link, for data (default: %(default)s)")
        add("--node-gbytes", type=float, default=10.0, metavar="X", help="10^9 bytes/s within a host (default: 10)")
        add("--ranks-per-host", type=int, default=1, metavar="N", help="with --link-gbit (default: %(default)s)")
        add("--model", choices=tuple(MODELS), default="resnet50", help="default: %(default)s")
        add("--step-ms", type=float, metavar="MS", help="compute of a step (default: 500; measured: 8 for a gradient)")
        add("--timeline", metavar="FILE", help="take the last step of this timeline in place of a model")
        add("--constants", metavar="FILE", help="take latency and share of the link from a --json of this with ranks")

    def measure(self, session: Session) -> list[Row]:
        if session.job.size == 1:
            return _predictions(session.arguments)
        if session.arguments.link_gbit is None:
            raise CannotMeasure("scaling with ranks needs the speed of a host's link: --link-gbit")
        if session.job.hosts == 1:
            raise CannotMeasure("scaling with ranks is about the link between hosts: give several with -H")
        rows = []
        for algorithm in _algorithms(session):
            session.init(allreduce_algorithm=_FORCED.get(algorithm, "auto"))
            rows.append(_measured(session, algorithm))
            hvd.shutdown()
        return rows

    def table(self, result: Result) -> list[str]:
        return _errors(result) if "algorithm" in result.rows[0].key else _prediction_table(result)


# --- the prediction ---------------------------------------------------------------------------------------------------


def _predictions(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for title, setup, compute_s, gradients in _jobs(arguments):
        counts = {2} | {setup.ranks_per_host * 2**power for power in range(16)} | set(setup.published)
        for ranks in sorted(count for count in counts if 2 <= count <= _MOST_RANKS):
            cluster = _cluster(arguments, ranks, setup.ranks_per_host, setup.link_gbit)
            values = {
                name: {"efficiency": compute_s / step_s(cluster, name, compute_s, gradients)} for name in ALGORITHMS
            }
            key = {"part": title, "predicted ranks": ranks, "limit": limit_of(cluster, compute_s, gradients)}
            if ranks in setup.published:
                values["published"] = {"efficiency": setup.published[ranks]}
            rows.append(Row(key, [Round(values)]))
    return rows


def _jobs(arguments: argparse.Namespace) -> list[tuple[str, Setup, float, list[Gradient]]]:
    """A prediction to make: title, place, seconds that a step computes, and its gradients."""
    if arguments.link_gbit is None and arguments.timeline is None:
        return [(setup.title, setup, *_of_model(setup.model, setup.images / setup.images_per_s)) for setup in PUBLISHED]
    link = arguments.link_gbit or 25.0
    setup = Setup(arguments.model, 1, 1.0, arguments.ranks_per_host, link, {})
    if arguments.timeline is None:
        return [(setup.title, setup, *_of_model(setup.model, 1e-3 * (arguments.step_ms or 500.0)))]
    title = f"{Path(arguments.timeline).name}, {setup.ranks_per_host} ranks a host, {link:g} Gbit/s"
    return [(title, setup, *recorded_step(arguments.timeline))]


def _of_model(model: str, compute_s: float) -> tuple[float, list[Gradient]]:
    sizes = [4 * int(np.prod(shape)) for shape in MODELS[model]()]
    return compute_s, spread_over_backward(compute_s, sizes, work_of(model))


def recorded_step(path: str) -> tuple[float, list[Gradient]]:
    """The last step of rank 0 in a timeline: how long it computed, and when it submitted each gradient.

    Raises:
        CannotMeasure: it cannot be read, or has no whole step.
    """
    try:
        recorded = trace.read(Path(path))
    except (OSError, TraceError) as error:
        raise CannotMeasure(f"--timeline: {error}") from error
    rank, step = recorded.ranks[0], recorded.steps[-1]
    begin, end = rank.steps[step], rank.steps[step + 1]
    waited = sum(max(0, min(end, last) - max(begin, first)) for first, last in rank.waits)
    compute_s = 1e-9 * (end - begin - waited)
    gradients = [
        Gradient(min(1e-9 * (one.submitted_ns - begin), compute_s), one.bytes)
        for one in rank.operations
        if one.kind == "allreduce" and begin <= one.submitted_ns < end
    ]
    return compute_s, gradients


def _cluster(arguments: argparse.Namespace, ranks: int, ranks_per_host: int, link_gbit: float) -> Cluster:
    latency_s, share = 1e-6 * arguments.latency_us, arguments.link_share
    if arguments.constants:
        measured = results.load(arguments.constants)
        latency_s, bytes_per_s = _constants(measured)
        share = 8e-9 * bytes_per_s / measured.arguments["link_gbit"]
    return Cluster(
        ranks, min(ranks, ranks_per_host), latency_s, share * 1e9 * link_gbit / 8, 1e9 * arguments.node_gbytes
    )


def _prediction_table(result: Result) -> list[str]:
    lines = []
    for part in dict.fromkeys(row.key["part"] for row in result.rows):
        rows = [row for row in result.rows if row.key["part"] == part]
        table = Table(["ranks", *ALGORITHMS, "published"])
        for row in rows:
            values = row.rounds[0].values
            cells = [
                f"{values[name]['efficiency']:.3f}" if name in values else "" for name in (*ALGORITHMS, "published")
            ]
            table.add([str(row.key["predicted ranks"]), *cells])
        lines += [part, *lines_of(table), ""]
    return [
        *lines,
        "Predictions: the part of a step that computes. Stragglers and a busy network are not in them.",
        *_limits(result),
    ]


def _limits(result: Result) -> list[str]:
    """Returns a line for each step that computes for too small a part of its time on many ranks."""
    lines = []
    for row in result.rows:
        spread = row.rounds[0].values
        efficiency = spread["auto"]["efficiency"]
        if row.key["predicted ranks"] == _MANY_RANKS and efficiency < _GOOD:
            lines.append(f"{row.key['part']}: {efficiency:.2f} at {_MANY_RANKS} ranks, limited by {row.key['limit']}")
    return lines


# --- the check --------------------------------------------------------------------------------------------------------


def _algorithms(session: Session) -> list[str]:
    return list(_FORCED) if session.job.hosts == session.job.size else ["auto"]


def _measured(session: Session, algorithm: str) -> Row:
    """Compute is slept, so that the ranks of a machine with few cores do not keep each other from it."""
    job, arguments = session.job, session.arguments
    small, large = np.zeros(_SMALL_BYTES // 4, np.float32), np.zeros(_LARGE_BYTES // 4, np.float32)
    gradients = [np.zeros(shape, np.float32) for shape in MODELS[arguments.model]()]
    layer_s = _layer_s(vars(arguments), len(gradients))

    def reduce(array: Array, name: str) -> None:
        hvd.allreduce_(array, op=hvd.Sum, name=name)

    contestants = [
        Contestant(_SMALL, lambda: reduce(small, _SMALL)),
        Contestant(_LARGE, lambda: reduce(large, _LARGE)),
        Contestant(_TOGETHER, lambda: _train(gradients, 0.0)),
        Contestant(_TRAINING, lambda: _train(gradients, layer_s)),
    ]

    def sample(contestant: Contestant) -> dict[str, float]:
        return cost_for_all(job, contestant.run, _SMALL_ITERATIONS if contestant.name == _SMALL else 1)

    key = {"ranks": job.size, "hosts": job.hosts, "algorithm": algorithm}
    return Row(key, session.rounds(contestants, sample))


def _train(gradients: Sequence[Array], layer_s: float) -> None:
    begin, handles = time.monotonic(), []
    for number, (index, gradient) in enumerate(reversed(list(enumerate(gradients))), 1):
        time.sleep(max(0.0, begin + number * layer_s - time.monotonic()))
        handles.append(hvd.allreduce_async_(gradient, name=f"gradient{index}", priority=-index))
    for handle in handles:
        hvd.synchronize(handle)


def _layer_s(arguments: dict[str, Any], layers: int) -> float:
    step_ms = arguments["step_ms"]
    return 8e-3 if step_ms is None else 1e-3 * step_ms / layers


def _constants(result: Result) -> tuple[float, float]:
    """Latency and bytes a second of the link, from the fewest ranks."""
    fewest = min(row.key["ranks"] for row in result.rows)
    rows = {row.key["algorithm"]: row for row in result.rows if row.key["ranks"] == fewest}
    shortest, longest = (rows.get(name, next(iter(rows.values()))) for name in ("halving", "ring"))
    hosts = shortest.key["hosts"]
    one = Cluster(hosts, 1, 1.0, float("inf"), float("inf"))
    latency_s = shortest.spread(_SMALL).median / allreduce_s(one, "halving", _SMALL_BYTES)
    crossing = 2 * (hosts - 1) / hosts * _LARGE_BYTES
    return latency_s, crossing / longest.spread(_LARGE).median


def _errors(result: Result) -> list[str]:
    arguments = result.arguments
    latency_s, bytes_per_s = _constants(result)
    sizes = [4 * int(np.prod(shape)) for shape in MODELS[arguments["model"]]()][::-1]
    layer_s = _layer_s(arguments, len(sizes))
    table = Table(["ranks", "hosts", "algorithm", "what", "ms [min-max]", "predicted", "off by"])
    errors = []
    for row in result.rows:
        ranks, hosts, algorithm = row.key["ranks"], row.key["hosts"], row.key["algorithm"]
        cluster = Cluster(ranks, ranks // hosts, latency_s, bytes_per_s, 1e9 * arguments["node_gbytes"])
        computing = [Gradient(layer_s * number, size) for number, size in enumerate(sizes, 1)]
        predicted = {
            _SMALL: allreduce_s(cluster, algorithm, _SMALL_BYTES),
            _LARGE: allreduce_s(cluster, algorithm, _LARGE_BYTES),
            _TOGETHER: step_s(cluster, algorithm, 0.0, [Gradient(0.0, size) for size in sizes]),
            _TRAINING: step_s(cluster, algorithm, layer_s * len(sizes), computing),
        }
        for what, seconds in predicted.items():
            time_taken = row.spread(what)
            errors.append(seconds / time_taken.median - 1)
            place = [str(ranks), str(hosts), algorithm, what]
            table.add([*place, milliseconds_text(time_taken), f"{1e3 * seconds:.2f}", f"{errors[-1]:+.0%}"])
    error = Spread.of([abs(one) for one in errors])
    share = 8e-9 * bytes_per_s / arguments["link_gbit"]
    return [
        *lines_of(table),
        f"constants, from the fewest ranks: {1e6 * latency_s:.0f} us a message, {share:.3f} of the link",
        f"the prediction is off by {error.median:.0%} [{error.least:.0%}-{error.most:.0%}]",
    ]
