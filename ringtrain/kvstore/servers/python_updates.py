"""Optimizers and updaters in Python that workers send and a server runs, on gradients that the core collects.

They are sent as pickles, which can run any code when they are loaded. They come from workers, which know the secret of
the job, and are loaded only if option kv_python_updaters allows it.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import time
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

import ringtrain._core as _core
from ringtrain.kvstore.servers.roles import ROLE_VARIABLE
from ringtrain.pickling import pickler

# The number of the command that sends an optimizer, as in MXNet.
COMMAND = 0
# The prefix of the entries of the directory that describe a key by its number.
NUMBER = "number/"
_DTYPES = {_core.DTYPES[name]: np.dtype(name) for name in ("float32", "float64")}
# The longest time of updates before the server looks for commands.
_TURN_S = 0.05

Array = np.ndarray[Any, Any]
# Called with a key, a gradient and the value, which it changes.
Update = Callable[[Any, Array, Array], object]


class Sent(Protocol):
    """The object in a pickle."""

    def __call__(self, key: Any, grad: Array, stored: Array) -> object: ...

    def change(self, **numbers: Any) -> None:
        """Changes numbers, such as the learning rate."""


class _Known(NamedTuple):
    """A key as the workers know it."""

    key: int | str
    shape: tuple[int, ...]


def words_of_updater(store: int, sent: Sent) -> str:
    """Returns the command that makes servers update a store with this. Raises TypeError if it cannot be pickled."""
    try:
        data = pickler().dumps(sent)
    except Exception as error:
        raise TypeError(f"the servers cannot be sent this optimizer: {error}") from error
    return json.dumps({"store": store, "pickle": base64.b64encode(data).decode()})


def words_of_change(store: int, numbers: dict[str, Any]) -> str:
    """Returns the command that changes numbers. Raises TypeError for other values."""
    return json.dumps({"store": store, "numbers": numbers})


def _loaded(data: bytes) -> Any:
    """Loads a pickle, without the variable by which MXNet, if that imports it, would take itself for a server."""
    role = os.environ.pop(ROLE_VARIABLE, None)
    try:
        return pickle.loads(data)
    finally:
        if role is not None:
            os.environ[ROLE_VARIABLE] = role


class PythonUpdates:
    """Runs on the main thread of a server.

    Args:
        find: asks the directory, as `SchedulerClient.find`.
        is_allowed: option kv_python_updaters.
    """

    def __init__(
        self, server: _core.StoreServer, find: Callable[[int, dict[str, int], float], dict[str, Any]], is_allowed: bool
    ):
        self._server = server
        self._find = find
        self._is_allowed = is_allowed
        self._updaters: dict[int, Sent] = {}  # by store
        self._known: dict[tuple[int, int], _Known] = {}  # by store and number of the key

    def has_any(self) -> bool:
        return bool(self._updaters)

    def obey(self, words: str) -> None:
        """Carries out a command. Raises PermissionError, and what loading the pickle raises."""
        self._require_allowed()
        said = json.loads(words)
        store = int(said["store"])
        if "pickle" in said:
            self._updaters[store] = _loaded(base64.b64decode(said["pickle"]))
        else:
            self._updaters[store].change(**said["numbers"])

    def saved(self) -> bytes:
        """Returns the optimizers with their states, for `restore`. Raises what pickle raises."""
        data: bytes = pickler().dumps(self._updaters)
        return data

    def restore(self, saved: bytes) -> None:
        """Continues with the result of `saved`. Raises as `obey`."""
        self._require_allowed()
        self._updaters = _loaded(saved)

    def carry_out(self) -> None:
        """Updates with all gradients that have arrived, or waits a moment for some. Raises what an updater raises."""
        end_s = time.monotonic() + _TURN_S
        while (left_s := end_s - time.monotonic()) > 0:
            taken = self._server.take(left_s)
            if taken is None:
                return
            (store, part, piece), (number, begin, count), dtype, gradient, value = taken
            known = self._key(store, number)
            is_whole = begin == 0 and count == prod(known.shape)
            shape = known.shape if is_whole else (count,)
            grad, stored = (np.frombuffer(data, _DTYPES[dtype]).reshape(shape).copy() for data in (gradient, value))
            self._updaters[store](known.key, grad, stored)
            self._server.finish(part, piece, stored.tobytes())

    def _require_allowed(self) -> None:
        if not self._is_allowed:
            raise PermissionError(
                "this server does not run Python that workers send it; set RINGTRAIN_KV_PYTHON_UPDATERS=on for it, too"
            )

    def _key(self, store: int, number: int) -> _Known:
        known = self._known.get((store, number))
        if known is None:
            name = f"{NUMBER}{number}"
            entry = self._find(store, {name: 1}, 0)[name]
            key = int(entry["key"]) if entry["is_int"] else str(entry["key"])
            known = self._known[store, number] = _Known(key, tuple(entry["shape"]))
        return known
