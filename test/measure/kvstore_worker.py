"""A worker of a job with servers that is measured from outside: `python -m measure.kvstore_worker`.

It prints what it has to say as lines of JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ringtrain.bench.models import MODELS, SGD
from ringtrain.bench.rounds import Array

LATE_S = 0.05
_ROUNDS_BEFORE_READY = 3
# So many bytes of one key are pushed, in at least and at most so many rounds.
_ROUNDS, _MOST_ROUNDS, _BYTES = 5, 200, 64 << 20
_KEYS_BESIDE = 160


class Store(Protocol):
    """Weights under SGD with momentum, on servers."""

    rank: int
    num_workers: int

    def init(self, arrays: Sequence[Array]) -> None:
        """All workers give the first weights."""

    def round(self, keys: Sequence[int]) -> None:
        """Push the gradients of these keys, and pull the weights."""

    def ways(self, keys: Sequence[int]) -> dict[str, Callable[[], None]]:
        """Each that there is to push the gradients of these keys and pull the weights."""

    def barrier(self) -> None:
        """Of all workers."""


class OwnStore:
    """That of ringtrain."""

    def __init__(self, kind: str) -> None:
        from ringtrain import kvstore

        self._store = kvstore.create(kind)
        self._store.set_optimizer("sgd", **SGD)
        self.rank, self.num_workers = self._store.rank, self._store.num_workers

    def init(self, arrays: Sequence[Array]) -> None:
        self._gradients = [np.ones_like(one) for one in arrays]
        self._weights = list(arrays)
        self._store.init(list(range(len(arrays))), self._weights)

    def round(self, keys: Sequence[int]) -> None:
        gradients, weights = ([of[key] for key in keys] for of in (self._gradients, self._weights))
        self._store.pushpull(list(keys), gradients, out=weights)

    def ways(self, keys: Sequence[int]) -> dict[str, Callable[[], None]]:
        names = list(keys)
        gradients, weights = ([of[key] for key in keys] for of in (self._gradients, self._weights))

        def push_and_pull(copy: bool) -> None:
            self._store.push(names, gradients, copy=copy)
            self._store.pull(names, out=weights)

        return {
            "pushpull": lambda: self.round(keys),
            "push(copy=False), pull": lambda: push_and_pull(False),
            "push, pull": lambda: push_and_pull(True),
        }

    def barrier(self) -> None:
        self._store.barrier()


class PsLiteStore:
    """The store of ps-lite."""

    def __init__(self, kind: str) -> None:
        import mxnet  # reads the variables

        self._mxnet = mxnet
        self._store = mxnet.kv.create(kind)
        self._store.set_optimizer(mxnet.optimizer.create("sgd", **SGD))
        self.rank: int = self._store.rank
        self.num_workers: int = self._store.num_workers

    def init(self, arrays: Sequence[Array]) -> None:
        self._gradients = [self._mxnet.nd.ones(one.shape) for one in arrays]
        self._weights = [self._mxnet.nd.array(one) for one in arrays]
        for key, weight in enumerate(self._weights):
            self._store.init(key, weight)

    def round(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._store.push(key, self._gradients[key], priority=-key)
        for key in keys:
            self._store.pull(key, out=self._weights[key], priority=-key)
        for key in keys:
            self._weights[key].wait_to_read()

    def ways(self, keys: Sequence[int]) -> dict[str, Callable[[], None]]:
        return {"push, pull": lambda: self.round(keys)}

    def barrier(self) -> None:
        self._store._barrier()


_PEERS: dict[str, Callable[[str], Store]] = {"ps_lite": PsLiteStore}


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker that is measured.", allow_abbrev=False)
    parser.add_argument("part", choices=tuple(_PARTS))
    parser.add_argument("--peer", choices=tuple(_PEERS), help="in place of ringtrain")
    parser.add_argument("--type", default="dist_async")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--sizes", default="")
    parser.add_argument("--hot-bytes", type=int, default=8 << 20)
    arguments = parser.parse_args()
    make = OwnStore if arguments.peer is None else _PEERS[arguments.peer]
    _PARTS[arguments.part](make(arguments.type), arguments)


def _cost(store: Store, arguments: argparse.Namespace) -> None:
    """Says when its first round was over and when it is ready, then waits for its standard input to end."""
    arrays = _weights_of(arguments.model)
    store.init(arrays)
    keys = range(len(arrays))
    store.round(keys)
    at = time.monotonic()
    for _ in range(_ROUNDS_BEFORE_READY):
        store.round(keys)
    store.barrier()
    _say({"first_round_at": at, "own_bytes": 2 * sum(one.nbytes for one in arrays)})
    sys.stdin.read()


def _round(store: Store, arguments: argparse.Namespace) -> None:
    """How long a round takes each way, in seconds, while all do the same: of the model, and of a key of each size."""
    of_model = _weights_of(arguments.model)
    sizes = [int(text) for text in arguments.sizes.split(",") if text]
    store.init([*of_model, *(np.zeros(size // 4, np.float32) for size in sizes)])
    stretches = {arguments.model: (list(range(len(of_model))), _ROUNDS)}
    for key, size in enumerate(sizes, len(of_model)):
        stretches[f"{size} bytes"] = ([key], max(_ROUNDS, min(_MOST_ROUNDS, _BYTES // size)))
    for of, (keys, rounds) in stretches.items():
        for way, run in store.ways(keys).items():
            for _ in range(_ROUNDS_BEFORE_READY):
                run()
            store.barrier()
            _wait_until_told()
            begin = time.perf_counter()
            for _ in range(rounds):
                run()
            seconds = (time.perf_counter() - begin) / rounds
            _say({"of": of, "way": way, "rounds": rounds, "seconds": seconds})
    store.barrier()


def _straggler(store: Store, arguments: argparse.Namespace) -> None:
    """Worker 0 counts its rounds: alone, beside the others, and beside others of which each is late."""
    arrays = _weights_of(arguments.model)
    store.init(arrays)
    keys = range(len(arrays))
    rates = {}
    is_first = store.rank == 0
    for name, pause_s in (("alone", None), ("in time", 0.0), ("late", LATE_S)):
        store.barrier()
        if name == "alone" and (not is_first or arguments.type == "dist_sync"):
            continue
        rates[name] = _rounds_in(arguments, lambda: store.round(keys), 0.0 if is_first else pause_s or 0.0)
    store.barrier()
    _say(rates if is_first else {})


def _hot(store: Store, arguments: argparse.Namespace) -> None:
    """How often each worker pushes and pulls one key that all have, and then, without rounds, one that is its own."""
    hot, own = _KEYS_BESIDE, _KEYS_BESIDE + 1 + store.rank
    size = arguments.hot_bytes // 4
    store.init([np.zeros(1000, np.float32)] * _KEYS_BESIDE + [np.zeros(size, np.float32)] * (1 + store.num_workers))
    for key in (hot, own) if arguments.type == "dist_async" else (hot,):
        store.round([key])
        store.barrier()
        _wait_until_told()
        begin = time.perf_counter()
        rate = _rounds_in(arguments, functools.partial(store.round, [key]), 0.0)
        _say({"rate": rate, "rounds": round(rate * (time.perf_counter() - begin))})
        store.barrier()


def _rounds_in(arguments: argparse.Namespace, run: Callable[[], None], pause_s: float) -> float:
    """How many there are in a second. Synchronous ones are as many on each worker, so that nobody is left alone."""
    begin = time.perf_counter()
    count = 0
    while count < 20 if arguments.type == "dist_sync" else time.perf_counter() < begin + arguments.seconds:
        time.sleep(pause_s)
        run()
        count += 1
    return count / (time.perf_counter() - begin)


def _weights_of(model: str) -> list[Array]:
    return [np.zeros(shape, np.float32) for shape in MODELS[model]()]


def _wait_until_told() -> None:
    _say({"ready": True})
    sys.stdin.readline()


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


_PARTS: dict[str, Callable[[Store, argparse.Namespace], None]] = {
    "round": _round,
    "cost": _cost,
    "straggler": _straggler,
    "hot": _hot,
}

if __name__ == "__main__":
    main()
