"""A model of a store, in forty lines without any library: programs of random calls run on it and on a real one."""

from __future__ import annotations

from typing import Any

import numpy as np
from harness.exact import data

import ringtrain as hvd


class Model:
    """The values that every worker sees, of keys that all workers push alike."""

    def __init__(self, workers: int, updates: bool, is_distributed: bool) -> None:
        self.workers, self.updates, self.is_distributed = workers, updates, is_distributed
        self.values: dict[Any, np.ndarray] = {}
        self.is_given_away: dict[Any, bool] = {}

    def init(self, key: Any, value: np.ndarray) -> None:
        self.values[key], self.is_given_away[key] = value, False

    def push(self, key: Any, of_workers: list[list[np.ndarray]]) -> None:
        wide = [array.astype("float64") for arrays in of_workers for array in arrays]
        total = np.sum(wide, axis=0).astype(self.values[key].dtype)
        self.values[key] = (total - self.values[key]).astype(total.dtype) if self.updates else total
        self.is_given_away[key] = False

    def pushpull(self, key: Any, of_workers: list[list[np.ndarray]]) -> None:
        self.push(key, of_workers)
        self.is_given_away[key] = self.is_distributed and not self.updates


def update(key: Any, total: Any, stored: Any) -> None:
    """As Model.push does it, for arrays of any library."""
    stored *= -1
    stored += total


class Program:
    """A seeded sequence of calls. `to` and `back` make arrays of a library of NumPy's, and these of those."""

    def __init__(self, kv: Any, model: Model, seed: int, dtype: Any, keys: list[Any], to: Any, back: Any) -> None:
        self.kv, self.model, self.dtype, self.keys, self.to, self.back = kv, model, dtype, keys, to, back
        self.random = np.random.default_rng(seed)  # the same on all workers
        self.shape = {key: [(), (5,), (3, 4), (0,), (1031,)][place % 5] for place, key in enumerate(keys)}
        self.calls = 0
        if model.updates:
            kv.set_updater(update)
        shuffled = keys if kv.rank % 2 else keys[::-1]
        for key in shuffled:
            kv.init(key, to(self.given(kv.rank, key)))
        for key in keys:
            model.init(key, self.given(0, key))

    def given(self, rank: int, key: Any, place: int = 0) -> np.ndarray:
        return data(rank, self.shape[key], self.dtype, seed=1000 * self.calls + 10 * self.keys.index(key) + place)

    def run(self, count: int) -> None:
        for self.calls in range(1, count + 1):
            chosen = [key for key in self.keys if self.random.random() < 0.5] or self.keys[:1]
            call = self.random.choice([self.push, self.push, self.pull, self.pushpull])
            call(chosen, devices=int(self.random.integers(1, 3)))
        self.pull(self.keys, 1)

    def of_workers(self, key: Any, devices: int) -> list[list[np.ndarray]]:
        return [[self.given(rank, key, place) for place in range(devices)] for rank in range(self.model.workers)]

    def push(self, keys: list[Any], devices: int) -> None:
        """In another order on every second worker, as a list or one by one, and one key twice.

        A function of the script updates in the push: then all workers push in the same order, but for keys of one list.
        """
        keys = [*keys, keys[0]]
        mine = {key: [self.to(array) for array in self.of_workers(key, devices)[self.kv.rank]] for key in keys}
        before = {key: [self.back(array).copy() for array in arrays] for key, arrays in mine.items()}
        copies = bool(self.random.integers(2))
        if self.random.integers(2):
            order = keys[:-1] if self.kv.rank % 2 else keys[-2::-1]
            handles = [self.kv.push(order, [mine[key] for key in order], copy=copies)]
            handles.append(self.kv.push(keys[-1], mine[keys[-1]], copy=copies))
        else:
            order = keys if self.kv.rank % 2 or self.model.updates else keys[::-1]
            handles = [self.kv.push(key, mine[key], priority=-place, copy=copies) for place, key in enumerate(order)]
        for key in keys:
            self.model.push(key, self.of_workers(key, devices))
        for handle in handles:
            if not copies:
                hvd.synchronize(handle)
        for key, arrays in before.items():
            for array, now in zip(arrays, mine[key], strict=True):
                np.testing.assert_array_equal(self.back(now), array)
                now *= 0  # the store does not keep it

    def pull(self, keys: list[Any], devices: int) -> None:
        for key in keys:
            if self.model.is_given_away[key]:
                self.push([key], 1)
        outs = [[self.to(np.full(self.shape[key], 77, self.dtype)) for _ in range(devices)] for key in keys]
        self.kv.pull(keys, out=outs)
        for key, arrays in zip(keys, outs, strict=True):
            for array in arrays:
                self.require(key, array)

    def pushpull(self, keys: list[Any], devices: int) -> None:
        mine = {key: [self.to(array) for array in self.of_workers(key, devices)[self.kv.rank]] for key in keys}
        for key in keys:
            self.model.pushpull(key, self.of_workers(key, devices))
        if self.random.integers(2):
            self.kv.pushpull(keys, [mine[key] for key in keys])
            outs = mine
        else:
            outs = {key: [self.to(np.full(self.shape[key], 77, self.dtype))] for key in keys}
            self.kv.pushpull(keys, [mine[key] for key in keys], out=[outs[key] for key in keys])
        for key in keys:
            for array in outs[key]:
                self.require(key, array)

    def require(self, key: Any, array: Any) -> None:
        value = self.back(array)
        assert (value.dtype, value.shape) == (self.model.values[key].dtype, self.shape[key])
        np.testing.assert_array_equal(value, self.model.values[key], err_msg=f"key {key} after call {self.calls}")
