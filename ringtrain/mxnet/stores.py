"""Key-value stores of ringtrain for MXNet's Trainer, Module and `mx.kv`.

As soon as ringtrain.mxnet is imported, `mx.kv.create("ringtrain")` and `"horovod"` make one; after `replace_kvstore()`
so do MXNet's own names of distributed stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import mxnet
import numpy as np
from mxnet import autograd, model
from mxnet.gluon import trainer as gluon_trainer
from mxnet.kvstore.base import KVStoreBase
from mxnet.module import module

from ringtrain import kvstore
from ringtrain._core import OpKind, ReduceOp
from ringtrain.arrays.mxnet import memory_of
from ringtrain.engine.process_sets import global_process_set
from ringtrain.engine.submission import Reduction
from ringtrain.job import session
from ringtrain.kvstore.entries import KINDS, grouped
from ringtrain.mxnet.engine import push, require_dense, takes
from ringtrain.mxnet.library import forwarded, raises_mxnet_errors
from ringtrain.mxnet.operations import broadcast_

# MXNet looks these words up in the type of a store; a Module multiplies its batch by the workers only if it has both.
_TYPES = {"dist_ringtrain": "dist_sync_ringtrain", "dist_horovod": "dist_sync_horovod"}
_KINDS = {"dist_ringtrain": "ringtrain", "dist_horovod": "horovod"}


class Store(KVStoreBase):  # type: ignore[misc]
    """A store of `ringtrain.kvstore` that takes NDArrays, and waits for them. Its methods are those of that store."""

    name = ""

    @raises_mxnet_errors
    def __init__(self) -> None:
        self._store = kvstore.create(_KINDS.get(self.name, self.name))
        self._updater: Any = None
        self._rate: float | None = None

    @raises_mxnet_errors
    def init(self, key: Any, value: Any) -> None:
        self._store.init(key, _read(_dense(value)))

    @raises_mxnet_errors
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        self._follow()
        self._store.push(key, _read(value), priority)

    @raises_mxnet_errors
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """As MXNet's: `ignore_sparse` leaves out arrays of row_sparse, which `row_sparse_pull` fills."""
        outs = grouped("pull", key, out)
        dense = {one: [array for array in arrays if not _has_rows(array)] for one, arrays in outs.items()}
        dense = {one: arrays for one, arrays in dense.items() if arrays}
        if dense:
            self._store.pull(list(dense), _written(list(dense.values())), priority)
        if not ignore_sparse:
            for one, arrays in outs.items():
                self._pull_all_rows(one, [array for array in arrays if _has_rows(array)], priority)

    def _pull_all_rows(self, key: Any, outs: list[Any], priority: int) -> None:
        for out in outs:
            whole = mxnet.nd.empty(out.shape, dtype=out.dtype)
            self._store.pull(key, memory_of(whole), priority)
            with autograd.pause():  # as in row_sparse_pull
                whole.tostype("row_sparse").copyto(out)

    @raises_mxnet_errors
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self._follow()
        self._store.pushpull(key, _read(value), None if out is None else _written(out), priority)

    @raises_mxnet_errors
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self._store.broadcast(key, _read(value), _written(out), priority)

    @raises_mxnet_errors
    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        targets = list(out) if isinstance(out, (list, tuple)) else [out]
        rows = [kvstore.RowSparse() for _ in targets]
        is_list = isinstance(out, (list, tuple))
        self._store.row_sparse_pull(key, rows if is_list else rows[0], priority, _read(row_ids))
        for target, found in zip(targets, rows, strict=True):
            made = mxnet.nd.sparse.row_sparse_array((found.rows, found.indices), shape=target.shape, dtype=target.dtype)
            with autograd.pause():  # Gluon fetches rows within record()
                made.copyto(target)

    @raises_mxnet_errors
    def require_unused(self, trainer: str, keys: Iterable[Any] | None = None) -> None:
        if not isinstance(self, AllreduceStore):  # whose keys keep nothing
            self._store.require_unused(trainer, keys)

    @raises_mxnet_errors
    def set_optimizer(self, optimizer: Any) -> None:
        try:
            self._store.set_optimizer(optimizer)
        except TypeError:  # one whose formula only MXNet has
            self._store.set_optimizer(_OptimizerOfNDArrays(optimizer))
        self._updater = _Updater(optimizer)
        self._rate = _rate_of(optimizer)

    def _follow(self) -> None:
        """Takes over a learning rate that the script has set since, such as by Trainer.set_learning_rate."""
        if self._updater is None or (rate := _rate_of(self._updater.optimizer)) == self._rate:
            return
        self._rate = rate
        if self._store.is_capable(KVStoreBase.OPTIMIZER):
            self._store.update_optimizer(learning_rate=rate)

    @raises_mxnet_errors
    def _set_updater(self, updater: Callable[[Any, Any, Any], object]) -> None:
        def update(key: Any, total: Any, stored: Any) -> None:
            value = _ndarray(stored)
            updater(key, _ndarray(total), value)
            stored[...] = value.asnumpy()

        self._store.set_updater(update)

    @property
    def type(self) -> str:
        return _TYPES.get(self.name, self.name)

    rank, num_workers, local_rank, num_local_workers = (
        property(attrgetter(f"_store.{name}")) for name in ("rank", "num_workers", "local_rank", "num_local_workers")
    )


for _name in ("set_gradient_compression", "is_capable", "save_optimizer_states", "load_optimizer_states", "barrier"):
    setattr(Store, _name, raises_mxnet_errors(forwarded("_store", _name)))
Store._barrier = Store.barrier
Store._send_command_to_servers = raises_mxnet_errors(forwarded("_store", "send_command_to_servers"))


class AllreduceStore(Store):
    """One that only adds up: operations of MXNet's engine, so that the script goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._prefix = f"mx.kv/{_made.count}/"
        _made.count += 1

    @raises_mxnet_errors
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        outs = grouped("pushpull", key, value if out is None else out)
        for one, values in grouped("pushpull", key, value).items():
            require_dense([*values, *outs[one]])
            if not takes(values):
                super().pushpull(one, values, outs[one], priority)
                continue
            total = values[0] if len(values) == 1 else mxnet.nd.add_n(*values)
            first, *others = outs[one]
            is_in_place = total.handle.value == first.handle.value
            reduction = Reduction(ReduceOp.Sum)
            inputs = () if is_in_place else (total,)
            push(*(OpKind.ALLREDUCE, inputs, (first,), f"{self._prefix}{one}", global_process_set, priority, reduction))
            for other in others:
                first.copyto(other)

    @raises_mxnet_errors
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        outs = grouped("broadcast", key, out)
        for one, values in grouped("broadcast", key, value).items():
            first, *others = outs[one]
            if values[0] is not first:
                values[0].copyto(first)
            broadcast_(first, 0, f"{self._prefix}{one}", priority)
            for other in others:
                first.copyto(other)


class _BytePSStore(Store):
    """MXNet makes a local store of this name, with which each worker would train alone."""

    name = "byteps"

    @raises_mxnet_errors
    def __init__(self) -> None:
        raise ValueError('there is no type "byteps" of store in ringtrain; use "ringtrain" or "dist_sync"')


class _Made:
    """How many stores there are of a generation of ranks, which all make them in the same order."""

    count = 0


_made = _Made()


def _begin_generation(_settings: dict[str, str]) -> None:
    _made.count = 0


session.at_init(_begin_generation)


class _Updater:
    """Holds the optimizer of a store, for gluon."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def _rate_of(optimizer: Any) -> float | None:
    """Returns the learning rate; None where a schedule decides it."""
    return None if optimizer.lr_scheduler is not None else float(optimizer.lr)


class _OptimizerOfNDArrays:
    """An optimizer of MXNet, or of a class of the script, for the arrays of a store, which are NumPy's."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.description = f"{kind.__qualname__} {numbers_of(optimizer)}"  # which workers compare

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.learning_rate)

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._optimizer.set_learning_rate(rate)

    def create_state(self, key: str, weight: Any) -> Any:
        return self._optimizer.create_state(_index(key), _ndarray(weight))

    def update(self, key: str, weight: Any, grad: Any, state: Any) -> None:
        value = _ndarray(weight)
        self._optimizer.update(_index(key), value, _ndarray(grad), state)
        weight[...] = value.asnumpy()


def numbers_of(optimizer: Any) -> dict[str, float]:
    """Returns the public numbers of an optimizer of MXNet, but not how often it was called."""
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if not name.startswith("_") and name != "num_update"}


def _index(key: str) -> int | str:
    return int(key) if key.lstrip("-").isdigit() else key


def _ndarray(array: np.ndarray[Any, Any]) -> Any:
    return mxnet.nd.array(array, dtype=array.dtype)


def _has_rows(array: Any) -> bool:
    return isinstance(array, mxnet.nd.sparse.RowSparseNDArray)


def _dense(value: Any) -> Any:
    """The same with whole arrays: a store keeps all rows of a row_sparse weight."""
    if isinstance(value, (list, tuple)):
        return [_dense(one) for one in value]
    return value.tostype("default") if _has_rows(value) else value


def _read(value: Any) -> Any:
    """Arrays of NumPy with the same elements, in the same lists."""
    if isinstance(value, (list, tuple)):
        return [_read(one) for one in value]
    if _has_rows(value):
        return kvstore.RowSparse(value.indices.asnumpy(), value.data.asnumpy())
    if isinstance(value, mxnet.nd.NDArray):
        require_dense([value])
        return memory_of(value) if value.context.device_type != "gpu" else value.asnumpy()
    return value


def _written(out: Any) -> Any:
    """Arrays of NumPy over the memory of those that get values."""
    if isinstance(out, (list, tuple)):
        return [_written(one) for one in out]
    require_dense([out])
    return memory_of(out)


def _register(names: Sequence[str]) -> None:
    for name in names:
        kind = KINDS[_KINDS.get(name, name)]
        base = Store if kind.can_update else AllreduceStore
        KVStoreBase.kv_registry[name] = made = type(f"{base.__name__}_{name}", (base,), {"name": name})
        if kind.can_update:
            # With row_sparse gradients it takes MXNet's own stores and no other, which it asks isinstance() about.
            gluon_trainer.KVStore = (made, *_as_tuple(gluon_trainer.KVStore))


def replace_kvstore() -> None:
    """Let MXNet's own names of distributed stores, such as "dist_sync", make ringtrain's."""
    _register([name for name, kind in KINDS.items() if kind.is_distributed])


def _as_tuple(classes: Any) -> tuple[Any, ...]:
    return classes if isinstance(classes, tuple) else (classes,)


_create, _create_sparse = model._create_kvstore, model._create_sparse_kvstore


def _create_kvstore(store: Any, num_device: int, arg_params: Any) -> Any:
    """As MXNet's, but it makes stores of ringtrain for one device, too, where MXNet trains without one."""
    if isinstance(store, str) and issubclass(KVStoreBase.kv_registry.get(store.lower(), KVStoreBase), Store):
        store = mxnet.kv.create(store)
    return _create(store, num_device, arg_params)


def _for_trainer(create: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `create` for a Trainer of Gluon: all have numbers from 0 as keys, and a store has one optimizer."""

    def create_for_trainer(store: Any, *arguments: Any) -> Any:
        made, updates = create(store, *arguments)
        if isinstance(made, Store):
            made.require_unused("Trainer")
        return made, updates

    return create_for_trainer


def _create_kvstore_of_module(store: Any, num_device: int, arg_params: Any) -> Any:
    """As `_create_kvstore`, for a Module: keys are names, and the modules of a SequentialModule may share a store."""
    made, updates = _create_kvstore(store, num_device, arg_params)
    if isinstance(made, Store):
        made.require_unused("Module", arg_params)
    return made, updates


def _create_sparse_kvstore(store: Any) -> Any:
    """As MXNet's, which takes its own stores and names, and here those of ringtrain that can update weights."""
    if isinstance(store, Store) and store.is_capable(KVStoreBase.OPTIMIZER):
        return store, True
    return _create_sparse(store)


for _place in (model, module):
    _place._create_kvstore, _place._create_sparse_kvstore = _create_kvstore_of_module, _create_sparse_kvstore
gluon_trainer._create_kvstore = _for_trainer(_create_kvstore)
gluon_trainer._create_sparse_kvstore = _for_trainer(_create_sparse_kvstore)
_register(["ringtrain", "horovod", "dist_ringtrain", "dist_horovod"])
KVStoreBase.kv_registry.setdefault("byteps", _BytePSStore)
