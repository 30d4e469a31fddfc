"""A store as users see it: keys and values are checked here, and an engine carries out what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.arrays.adapter import adapter_for
from ringtrain.handles import Pending
from ringtrain.kvstore import places, states
from ringtrain.kvstore.base import KVStoreBase
from ringtrain.kvstore.engine import Engine
from ringtrain.kvstore.entries import Entry, Key, grouped, listed, require_fitting
from ringtrain.kvstore.gradient_compression import GradientCompression, require_compressible
from ringtrain.kvstore.sparse import (
    Array,
    RowSparse,
    as_rows,
    is_sparse,
    numbers_of,
    put_rows,
    require_place,
    sum_of,
)
from ringtrain.kvstore.updaters import updater_for


class Pushes:
    """Pushes under way, as `push(copy=False)` returns them: for `ringtrain.synchronize` and `ringtrain.poll`."""

    def __init__(self, handles: Sequence[Pending[Any]]) -> None:
        self._handles = handles

    def poll(self) -> bool:
        """Whether the arrays may be changed."""
        return all(handle.poll() for handle in self._handles)

    def wait(self) -> None:
        """Wait until the arrays may be changed."""
        for handle in self._handles:
            handle.wait()


class KVStore(Engine):
    """Holds an array for each key; `create` makes one. Mirrors `mxnet.kvstore.KVStore`.

    Keys are of one kind, int or str. A key is given alone, with an array, or with a list of arrays that belong to it,
    such as one for each device. A list of keys comes with a list of as many of either. Arrays are those of NumPy,
    PyTorch and CuPy, and what else lies on a CUDA device and knows DLPack. Called by one thread at a time.
    """

    # --------------------------------------------------------------------------------------------------- values

    def init(self, key: Any, value: Any) -> None:
        """Give keys their first values. All workers call it, in any order of keys; the value of rank 0 counts.

        Where workers disagree about a shape or a dtype, the next call of anything but `init` says so.

        Raises:
            ValueError: a key has a value already, or comes with several.
            TypeError: no array, a dtype that cannot be sent, or a key of another kind.
        """
        self._require_usable()
        groups = grouped("init", key, value)
        self._entries.require_kind("init", groups)
        for one, values in groups.items():
            if one in self._entries:
                raise ValueError(f"init: key {one!r} has a value already; broadcast gives it another one")
            if len(values) > 1:
                raise ValueError(f"init: key {one!r} comes with {len(values)} values, but takes one")
        self._begin_all({one: self._first_value(one, values[0]) for one, values in groups.items()})

    def push(self, key: Any, value: Any, priority: int = 0, copy: bool = True) -> Pushes | None:
        """Add up the values of each key, of all workers, and give the sum to the updater; without one, to the key.

        Returns before that is done. Workers match their pushes of a key one by one; how many other keys they push
        between them does not matter.

        Args:
            key: of keys that have a value.
            value: of their shapes and dtypes; float32 for 16-bit floats, too. It is not changed. Also a RowSparse, or a
                sparse_coo tensor of PyTorch, such as the gradient of an embedding: all other rows are zero.
            priority: what is higher is sent first.
            copy: whether the arrays may be changed at once. If not, leave them alone until `ringtrain.synchronize` of
                what is returned, or the next pull of the keys.

        Returns:
            With `copy=False` what `ringtrain.synchronize` waits for; else None.

        Raises:
            KeyError: a key without a value.
            ValueError: another shape or dtype.
            TypeError: no array, or a key of another kind.
        """
        groups = grouped("push", key, value)
        with_rows = {one: values for one, values in groups.items() if any(map(is_sparse, values))}
        if not with_rows:
            handles = self._push_all(self._given("push", key, value), priority, copy)
            return None if copy else Pushes(handles)
        self._require_usable()
        handles = []
        for one, values in with_rows.items():
            entry = self._with_rows("push", one)
            handles += self._push_rows(entry, [as_rows("push", one, value) for value in values], priority)
        dense = {one: values for one, values in groups.items() if one not in with_rows}
        if dense:
            handles += self._push_all(self._given("push", list(dense), list(dense.values())), priority, copy)
        return None if copy else Pushes(handles)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Wait for this worker's own pushes of the keys and give their values.

        Args:
            key: of keys that have a value.
            out: arrays of their shapes and any dtypes, which get the values.
            priority: what is higher is sent first, where values have to be sent.
            ignore_sparse: accepted; no value is sparse.

        Returns:
            Without `out` the value, or a list of the values of a list of keys: read-only views of NumPy's, good until
            the next push, or new arrays of other libraries. Else None.

        Raises:
            KeyError: a key without a value.
            ValueError: another shape, an array that cannot be written to, or a key whose value `pushpull` has given
                away.
            RingtrainError: a push has failed: workers disagree, one of them is lost or does not come.
        """
        self._require_usable()
        if out is None:
            values = [places.for_reading(self._current(self._entries.find("pull", one))) for one in listed("pull", key)]
            return values if isinstance(key, list | tuple) else values[0]
        self._pull_all(self._entries.pulled("pull", key, out), priority)
        return None

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """As `push` and `pull` in one, without copies. Without `out` the values are overwritten.

        In a distributed store without updater it is an allreduce of the values: the sums are where they were wanted,
        and the store does not keep them. `pull` refuses such a key until it is pushed again.
        """
        groups = self._given("pushpull", key, value)
        outs = dict(self._entries.pulled("pushpull", key, value if out is None else out))
        if len(outs) != len(groups) or any(entry not in outs for entry, _ in groups):
            raise ValueError("pushpull: value and out are of different keys")
        self._pushpull([(entry, values, outs[entry]) for entry, values in groups], priority)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give the value of rank 0 to all workers: to the keys, and to `out`. For keys with or without a value.

        Raises as `init` and `pull`.
        """
        self._require_usable()
        groups = grouped("broadcast", key, value)
        self._entries.require_kind("broadcast", groups)
        ready = {one: self._first_value(one, values[0]) for one, values in groups.items()}
        for one, array in ready.items():
            if one in self._entries:
                require_fitting("broadcast", self._entries[one], array)
        for one in ready:
            if one in self._entries:
                self._finish(self._entries[one])
        self._begin_all(ready)
        if self._updater is not None:
            for one in ready:
                self._updater.replaced(str(one), self._current(self._entries[one]))
        self.pull(key, out, priority)

    # --------------------------------------------------------------------------------------------------- updates

    def set_updater(self, updater: Callable[[Key, Any, Any], object]) -> None:
        """Have `updater(key, sum, stored)` called for each sum that is pushed: it writes into `stored`.

        In a distributed store it runs on every rank, on equal sums, when the key is pulled or pushed again.
        """
        self._require_usable()
        self._require_can_update()
        if not callable(updater):
            raise TypeError(f"set_updater takes a function of key, sum and stored value, not {updater!r}")
        self.wait()
        self._use(None, updater)

    def set_optimizer(self, optimizer: Any, **numbers: Any) -> None:
        """Have the store update its values. All workers call it, with the same optimizer.

        Another one that was set before is forgotten, with all that it remembers. Workers compare what they set.

        Args:
            optimizer: of `ringtrain.optim` or MXNet, a name such as "sgd", or any object with `create_state(key,
                weight)` and `update(key, weight, grad, state)`.
            numbers: with a name, such as `learning_rate=0.1`.

        Raises:
            ValueError: an unknown name or number, or a store that does not update.
            TypeError: no optimizer.
            MismatchError: workers set different ones; the message names what differs.
        """
        self._require_usable()
        self._require_can_update()
        updater = updater_for(optimizer, numbers)
        self._require_same("set_optimizer", updater.configuration())
        self.wait()
        self._use(updater, None)

    def update_optimizer(self, **numbers: Any) -> None:
        """Go on with other numbers, such as `lr=0.01`, and what the optimizer remembers. All workers call it.

        Raises:
            ValueError: no optimizer is set, or it has no such number.
            MismatchError: workers give different ones.
        """
        self._require_usable()
        updater = self._require_optimizer("update_optimizer")
        self._require_same("update_optimizer", numbers)
        self.wait()
        updater.change(**numbers)

    def is_capable(self, capability: str) -> bool:
        """Whether the store can update its values: the only capability there is, `KVStoreBase.OPTIMIZER`."""
        if capability.lower() != KVStoreBase.OPTIMIZER:
            raise ValueError(f'unknown capability "{capability}"; there is "{KVStoreBase.OPTIMIZER}"')
        return self._kind.can_update

    @property
    def update_on_kvstore_default(self) -> bool:
        """Whether trainers have the store update the weights unless they are told."""
        return self._kind.can_update and self._kind.updates_by_default

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Send float32 gradients in fewer bits from now on. All workers call it after the same pushes.

        Args:
            compression_params: a dict with "type": "2bit" or "1bit", with a "threshold", which remember on the worker
                what was left out, or "fp16" or "bf16".

        Raises:
            ValueError: unknown parameters; others than before; a key is not float32; the store sends nothing.
            MismatchError: workers give different ones.
            RingtrainError: a push of before has failed.
        """
        self._require_usable()
        compression = GradientCompression.of(compression_params)
        if not self._kind.is_distributed and not self._kind.on_device:
            raise ValueError(f'a "{self.type}" store sends nothing, so there is nothing to compress')
        for entry in self._entries.values():
            require_compressible(entry.key, entry.dtype_name)
        if self._compression not in (None, compression):
            raise ValueError(f"gradient compression is {self._compression} already, and stays so")
        self._require_same("set_gradient_compression", compression._asdict())
        self.wait()  # what is on its way is read as it was sent
        self._compression = compression

    # --------------------------------------------------------------------------------------------------- files

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write what the optimizer remembers: rank 0 does, alone. An .npz without pickle, there when it is whole.

        Args:
            fname: of the file.
            dump_optimizer: write down its name and numbers, too.
        """
        updater = self._require_optimizer("save_optimizer_states")
        self.wait()
        if self.rank == 0:
            states.save(fname, updater.states(), updater.configuration() if dump_optimizer else None)

    def load_optimizer_states(self, fname: str) -> None:
        """Go on from what `save_optimizer_states` has written. All workers call it; rank 0 reads the file.

        Raises:
            OSError, ValueError: the file cannot be read, or is of another optimizer; on all workers.
        """
        updater = self._require_optimizer("load_optimizer_states")
        self.wait()
        self._load_states(updater, fname)

    def save(self, fname: str) -> None:
        """Write all values, and what the optimizer remembers: rank 0 does, alone."""
        self.wait()
        for entry in self._entries.values():
            entry.value()  # raises on all workers alike
        if self.rank == 0:
            self._save(fname)

    def load(self, fname: str) -> None:
        """Go on from what `save` has written: its keys are to have values already. Others keep theirs.

        All workers call it; rank 0 reads the file.

        Raises:
            OSError, ValueError: the file cannot be read, or does not fit the keys or the optimizer; on all workers.
        """
        self._require_usable()
        self.wait()
        self._load(fname)

    # --------------------------------------------------------------------------------------------------- workers

    @property
    def type(self) -> str:
        """The name that `create` was given, in lower case."""
        return self._kind.name

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return 1

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its node."""
        return 0

    @property
    def num_local_workers(self) -> int:
        """How many workers this node has."""
        return 1

    @property
    def is_recovery(self) -> bool:
        """Whether this worker has come in the place of one that was lost: never, since the others do not go on."""
        return False

    def get_num_dead_node(self, node_id: int = 7, timeout: int = 60) -> int:
        """How many workers are dead: none, since the loss of one ends the operations of the others with an error."""
        return 0

    def barrier(self) -> None:
        """Wait until all workers have come here."""

    def set_barrier_before_exit(self, barrier_before_exit: bool = True) -> None:
        """Whether workers with servers wait for each other at their end; accepted by stores without."""

    def wait(self, keys: Any = None) -> None:
        """Wait until all own pushes are in the values, or those of some keys.

        Raises:
            RingtrainError: a push has failed: workers disagree, one of them is lost or does not come.
        """
        self._require_usable()
        entries = (
            self._entries.values()
            if keys is None
            else [self._entries.find("wait", one) for one in listed("wait", keys)]
        )
        for entry in list(entries):
            self._finish(entry)

    def join(self) -> None:
        """Say that this worker has no more data, and wait until all have said so.

        Until then it counts with zeros in the pushes of the others; afterwards all have the same values again.
        """
        self.wait()

    @property
    def restored(self) -> dict[Key, float]:
        """The keys that a server has brought back from a snapshot, and how many seconds old that was then: what was
        pushed since is gone. None where no server has died.
        """
        return {}

    # ---------------------------------------------------------------------------------------------------- rows

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> Any:
        """Wait for this worker's own pushes of the keys and give some of their rows.

        Args:
            key: of keys of at least one dimension.
            out: a RowSparse or a sparse_coo tensor of PyTorch, which gets them; or a list, of one key or of one each of
                a list of keys.
            priority: what is higher is sent first.
            row_ids: numbers of rows, in any order; or a list of them, one for each of `out`.

        Returns:
            Without `out`, a RowSparse of a key, or a list of those of a list of keys.
        """
        self._require_usable()
        keys = listed("row_sparse_pull", key)
        outs = [RowSparse() for _ in keys] if out is None else out if isinstance(out, (list, tuple)) else [out]
        ids = row_ids if isinstance(row_ids, (list, tuple)) and len(row_ids) == len(outs) > 1 else [row_ids] * len(outs)
        if len(keys) not in (1, len(outs)):
            raise ValueError(f"row_sparse_pull: {len(keys)} keys take as many outs, not {len(outs)}")
        for one, target, wanted in zip(keys * (len(outs) // len(keys)), outs, ids, strict=True):
            entry = self._with_rows("row_sparse_pull", one)
            require_place("row_sparse_pull", one, target, entry.shape)
            numbers = numbers_of("row_sparse_pull", one, wanted, entry.shape[0])
            put_rows(target, numbers, self._pull_rows(entry, numbers, priority))
        return None if out is not None else outs if isinstance(key, (list, tuple)) else outs[0]

    def _with_rows(self, call: str, key: Key) -> Entry:
        entry = self._entries.find(call, key)
        if not entry.shape:
            raise ValueError(f"{call}: key {key!r} has no rows; use pushes and pulls of the whole value")
        return entry

    def _push_rows(self, entry: Entry, values: Sequence[RowSparse], priority: int) -> list[Pending[Any]]:
        """All of the value, with zeros."""
        dtype = numpy_adapter.cast(np.empty(0, np.float32), entry.dtype_name).dtype
        total = sum_of(entry.key, values, entry.shape, dtype)
        whole = np.zeros(entry.shape, dtype)
        whole[total.indices] = total.rows
        return self._push_all(self._given("push", entry.key, whole), priority, copies=False)

    def _pull_rows(self, entry: Entry, numbers: Array, priority: int) -> Array:
        """A new array, of rows that the key has."""
        value = self._current(entry)
        return np.ascontiguousarray(adapter_for(value).on_host(value)[numbers])

    # For MXNet's scripts.

    def send_command_to_servers(self, head: int, body: str) -> None:
        """Raises ValueError: there are no servers."""
        raise ValueError("send_command_to_servers: there are no servers; every worker has all values")

    def _barrier(self) -> None:
        self.barrier()

    def _set_updater(self, updater: Callable[[Key, Any, Any], object]) -> None:
        self.set_updater(updater)
