"""Allreduce beside a parameter server: each rank pushes the gradients of a network and pulls their sums."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringtrain import kvstore
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.models import MODELS, SGD
from ringtrain.bench.peers import OF_STORES, HasUpdates
from ringtrain.bench.report import Table, count_text, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import Array, Competitor, Contestant, cost_for_all
from ringtrain.bench.step import Gradients

_THRESHOLD = 0.5
SERVED = "pushpull, dist_async"


class KVStore:
    name = "kvstore"
    help = "all gradients of a network, pushed to a store and pulled from it"
    peers = OF_STORES
    scales = True

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", choices=tuple(MODELS), default="resnet50", help="default: %(default)s")
        parser.add_argument("--type", choices=("dist_sync", "dist_async"), default="dist_sync", help="of the store")
        parser.add_argument(
            "--optimizer", choices=("none", "sgd"), default="none", help="SGD with momentum; always in dist_async"
        )
        parser.set_defaults(dtype="float32")  # the only one that a gradient may have in both

    def measure(self, session: Session) -> list[Row]:
        if len(session.arguments.network) > 1:
            raise CannotMeasure("kvstore needs one --network: a store belongs to one init()")
        if any(name == "kv_servers" for name, _ in session.arguments.option):
            raise CannotMeasure("kv_servers turns ranks into servers, which cannot measure; leave kv_servers out")
        gradients = Gradients(session)
        session.init()
        kind = session.arguments.type
        updates = session.arguments.optimizer != "none" or kind == "dist_async"
        contestants = _of_updates(session, kind, gradients) if updates else _of_sums(session, gradients)
        session.expect(1)

        def sample(contestant: Contestant) -> dict[str, float]:
            if hasattr(contestant.run, "refill"):
                contestant.run.refill()
            return cost_for_all(session.job, contestant.run)

        what = {"type": kind, "optimizer": "sgd"} if updates else {}
        return [Row({**gradients.key, **what, "workers": session.job.size}, session.rounds(contestants, sample))]

    def table(self, result: Result) -> list[str]:
        return [line for row in result.rows for line in (*self._table_of(row, bool(result.arguments["cpu"])), "")][:-1]

    def _table_of(self, row: Row, has_cpu: bool) -> list[str]:
        peers = [name for name in row.competitors() if name.startswith("ps-lite")]
        cpu = ["cpu ms"] if has_cpu else []
        table = Table(["", "ms [min-max]", *cpu, *(f"time of {peer.split(',')[0]} / this" for peer in peers)], True)
        for name in row.competitors():
            cells = [name, milliseconds_text(row.spread(name))]
            if has_cpu:
                cells.append(milliseconds_text(row.spread(name, "cpu")))
            table.add([*cells, *("" if name == peer else spread_text(row.ratio(peer, name)) for peer in peers)])
        megabytes = f"{row.key['bytes'] / 1e6:.1f} MB"
        how = "".join(f", {row.key[name]}" for name in ("type", "optimizer") if name in row.key)
        what = f"{row.key['model']}: {row.key['tensors']} keys, {megabytes} float32{how}"
        return [f"{what}, {count_text(row.key['workers'], 'worker')}", "", *lines_of(table)]


def _of_sums(session: Session, gradients: Gradients) -> list[Contestant]:
    """Stores without optimizer. Every store is made here, on all ranks in the same order."""
    outs = [np.empty_like(one) for one in gradients.arrays]
    competitors = _ways(_store, outs)
    compressed = Competitor("pushpull, 2bit", lambda arrays: _pushpull(_store(arrays, True), arrays, outs))
    is_right = _as_numpy(gradients.are_summed)
    return [
        *session.admit(competitors, gradients.arrays, gradients.fill, is_right),
        *session.admit([compressed], gradients.arrays, gradients.fill, _are_all(_THRESHOLD * session.job.size)),
        *session.admit(
            [one for peer in session.peers() for one in peer.step()], gradients.arrays, gradients.fill, is_right
        ),
    ]


def _of_updates(session: Session, kind: str, gradients: Gradients) -> list[Contestant]:
    """Stores of weights that begin as zeros."""

    def store(arrays: Sequence[Array], of: str = kind) -> Any:
        made = kvstore.create(of)
        made.set_optimizer("sgd", **SGD)
        made.init(list(range(len(arrays))), [np.zeros_like(one) for one in arrays])
        return made

    own, every = gradients.value, gradients.sum
    rate, workers = SGD["learning_rate"], session.job.size
    # The first round of all. In an asynchronous store a worker sees its own update, and maybe those of others,
    # which momentum repeats.
    bounds = {"dist_sync": (every, every), "dist_async": (own, workers * every)}
    rights = {
        name: _as_numpy(_are_between(-1.01 * rate * most, -0.99 * rate * least))
        for name, (least, most) in bounds.items()
    }
    is_right = rights[kind]
    outs = [np.empty_like(one) for one in gradients.arrays]
    contestants = session.admit(_ways(store, outs), gradients.arrays, gradients.fill, is_right)
    if kind == "dist_sync":  # where each rank has all weights; there, each has a server
        other = Competitor(SERVED, lambda arrays: _pushpull(store(arrays, "dist_async"), arrays, outs), is_own=True)
        contestants += session.admit([other], gradients.arrays, gradients.fill, rights["dist_async"])
    # Last of all: a peer sets variables, by which our own stores would take its servers for theirs.
    peers = [one for peer in session.peers() if isinstance(peer, HasUpdates) for one in peer.updates(kind, SGD)]
    return [*contestants, *session.admit(peers, gradients.arrays, gradients.fill, is_right)]


def _ways(store: Callable[[Sequence[Array]], Any], outs: Sequence[Array]) -> list[Competitor]:
    """To push all gradients and have the values in `outs`."""
    return [
        Competitor("pushpull", lambda arrays: _pushpull(store(arrays), arrays, outs), is_own=True),
        Competitor(
            "push(copy=False), pull", lambda arrays: _push_and_pull(store(arrays), arrays, outs, False), is_own=True
        ),
        Competitor("push, pull", lambda arrays: _push_and_pull(store(arrays), arrays, outs, True), is_own=True),
    ]


def _store(arrays: Sequence[Array], compresses: bool = False) -> Any:
    """A store with a key for each array."""
    store = kvstore.create("dist_sync")
    if compresses:
        store.set_gradient_compression({"type": "2bit", "threshold": _THRESHOLD})
    store.init(list(range(len(arrays))), list(arrays))
    return store


def _pushpull(store: Any, arrays: Sequence[Array], outs: Sequence[Array]) -> Callable[[], Any]:
    keys = list(range(len(arrays)))

    def run() -> Sequence[Array]:
        store.pushpull(keys, arrays, out=outs)
        return outs

    return run


def _push_and_pull(store: Any, arrays: Sequence[Array], outs: Sequence[Array], copies: bool) -> Callable[[], Any]:
    keys = list(range(len(arrays)))

    def run() -> Sequence[Array]:
        store.push(keys, arrays, copy=copies)
        store.pull(keys, out=outs)
        return outs

    return run


def _as_numpy(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """For the results of a peer, too, whose arrays are its own."""
    return lambda results: is_right([one.asnumpy() if hasattr(one, "asnumpy") else one for one in results])


def _are_all(value: float) -> Callable[[Any], bool]:
    return lambda results: all((one == value).all() for one in results)


def _are_between(least: float, most: float) -> Callable[[Any], bool]:
    return lambda results: all(least <= float(one.min()) and float(one.max()) <= most for one in results)
