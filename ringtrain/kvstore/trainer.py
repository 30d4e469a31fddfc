"""Training PyTorch's parameters through a store, as mxnet.gluon does for MXNet: a Trainer, and shares of the data."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringtrain.arrays.adapter import adapter_for
from ringtrain.kvstore import state_files
from ringtrain.kvstore.store import KVStore, create
from ringtrain.kvstore.updaters import LocalUpdater, updater_for

_VARIABLE = "MXNET_UPDATE_ON_KVSTORE"


class Trainer:
    """Sums the gradients of all workers through a store, and updates the weights in the store or on each worker.

    Call `step` after `backward`. Making a Trainer gives all workers the weights of rank 0. All workers make and call it
    together, with the same parameters in the same order.

    Args:
        params: tensors with gradients, pairs of names and tensors, or a dict; those without requires_grad are left out.
        optimizer: as for `set_optimizer` of a store; or an optimizer of torch.optim, which updates on each worker.
        optimizer_params: with a name, MXNet's arguments, such as {"learning_rate": 0.1}.
        kvstore: a store that no other Trainer uses, or the name of one.
        compression_params: as for `set_gradient_compression` of a store.
        update_on_kvstore: whether the store updates the weights, or each worker with the sums of the gradients. By
            default the environment variable MXNET_UPDATE_ON_KVSTORE or else the type of the store decides.

    Raises:
        ValueError: no parameter has requires_grad, update_on_kvstore needs another store, or the store has keys
            or an optimizer already, such as those of another Trainer.
        TypeError: the object is not an optimizer.
    """

    def __init__(
        self,
        params: Iterable[Any] | Mapping[str, Any],
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: Any = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._params = [param for param in _tensors(params) if param.requires_grad]
        if not self._params:
            raise ValueError("Trainer: no parameter has requires_grad=True")
        self._keys = list(range(len(self._params)))
        self._store = create(kvstore) if isinstance(kvstore, str) else kvstore
        self._of_torch = optimizer if hasattr(optimizer, "param_groups") else None
        self._updates_on_store = self._decide(update_on_kvstore)
        self._updater = None if self._of_torch is not None else updater_for(optimizer, dict(optimizer_params or {}))
        if self._of_torch is not None and optimizer_params:
            raise ValueError("optimizer_params need the name of an optimizer, not an object")
        if isinstance(self._store, KVStore):
            self._store.require_unused("Trainer")
        if compression_params is not None:
            self._store.set_gradient_compression(compression_params)
        if self._updates_on_store:
            self._store.set_optimizer(optimizer, **(optimizer_params or {}))
        self._given_scale = self._scale = self._updater.rescale_grad if self._updater is not None else 1.0
        # The gradients that the last update has used, and their versions.
        self._used: list[tuple[weakref.ref[Any], int]] = []
        weights = self._weights()
        self._store.broadcast(self._keys, weights, out=weights)

    @property
    def learning_rate(self) -> float:
        """The learning rate. Raises ValueError if a schedule decides it, or the optimizer has no such attribute."""
        rate = self._require_updater("learning_rate").learning_rate
        if rate is None:
            raise ValueError("learning_rate: a schedule or the optimizer itself decides it; ask that object")
        return rate

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate. Called by all workers together. Raises ValueError if a schedule decides it."""
        self._change("set_learning_rate", lr=lr)

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients of all workers, divide them by `batch_size`, and update the weights.

        A gradient that backward() has not changed since the last update is used up: it counts as none.

        Args:
            batch_size: if the loss is a sum over the batch, the batch size of all workers together; if it is a mean,
                the number of workers.
            ignore_stale_grad: use zeros for parameters without a gradient.

        Raises:
            ValueError: a parameter has no gradient; nothing was sent.
        """
        grads = self._grads(ignore_stale_grad)
        if self._updates_on_store:
            self._store.pushpull(self._keys, self._divided(grads, batch_size), out=self._weights())
        else:
            self._store.pushpull(self._keys, grads)
            self._update(self._divided(grads, batch_size))
        self._note_used(grads)

    def allreduce_grads(self) -> None:
        """Sum the gradients of all workers in place, so that they can be changed, such as clipped, before `update`.

        Raises:
            ValueError: the store updates the weights, or a parameter has no gradient.
        """
        self._require_own_updates("allreduce_grads")
        self._store.pushpull(self._keys, self._grads(False))

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Divide the gradients by `batch_size` and update the weights; called after `allreduce_grads`.

        Raises as `allreduce_grads`.
        """
        self._require_own_updates("update")
        grads = self._grads(ignore_stale_grad)
        self._update(self._divided(grads, batch_size))
        self._note_used(grads)

    def save_states(self, fname: str) -> None:
        """Write the states of the optimizer, on rank 0: an .npz without pickle. Raises ValueError with torch.optim."""
        if self._updates_on_store:
            self._store.save_optimizer_states(fname, dump_optimizer=True)
            return
        updater = self._require_updater("save_states")
        if self._store.rank == 0:
            state_files.save(fname, updater.states(), updater.configuration())

    def load_states(self, fname: str) -> None:
        """Load a file of `save_states`, which all workers can read.

        Raises:
            OSError, ValueError: the file cannot be read, or belongs to another optimizer.
        """
        if self._updates_on_store:
            self._store.load_optimizer_states(fname)
        else:
            self._require_updater("load_states").load_states(state_files.load(fname).arrays)

    def _weights(self) -> list[Any]:
        return [param.detach() for param in self._params]

    def _grads(self, ignore_stale_grad: bool) -> list[Any]:
        missing = [number for number, one in enumerate(self._params) if one.grad is None or self._is_used(number)]
        if missing and not ignore_stale_grad:
            number = missing[0]
            raise ValueError(
                f"parameter {number} of shape {tuple(self._params[number].shape)} has no gradient of this step: call "
                "backward() first, or step(ignore_stale_grad=True) if this batch does not reach it"
            )
        for number in missing:
            param = self._params[number]
            param.grad = param.detach().new_zeros(param.shape)
        return [param.grad for param in self._params]

    def _note_used(self, grads: list[Any]) -> None:
        self._used = [(weakref.ref(grad), grad._version) for grad in grads]

    def _is_used(self, number: int) -> bool:
        if not self._used:
            return False
        gradient, version = self._used[number]
        grad = self._params[number].grad
        return bool(grad._version == version and gradient() is grad)

    def _divided(self, grads: list[Any], batch_size: float) -> list[Any]:
        """Returns the gradients to update with. MXNet's optimizers divide themselves, torch's read param.grad."""
        scale = self._given_scale / batch_size
        if self._of_torch is not None:
            return [grad.mul_(scale) for grad in grads] if scale != 1 else grads
        if self._updater is not None and self._updater.can_rescale:
            if scale != self._scale:
                self._change("step", rescale_grad=scale)
                self._scale = scale
            return grads
        return [grad * scale for grad in grads] if scale != 1 else grads

    def _update(self, grads: list[Any]) -> None:
        if self._of_torch is not None:
            self._of_torch.step()
            return
        updater = self._require_updater("update")
        for key, weight, grad in zip(self._keys, self._weights(), grads, strict=True):
            updater(str(key), grad, weight)

    def _change(self, call: str, **numbers: float) -> None:
        updater = self._require_updater(call)
        if self._updates_on_store:
            self._store.update_optimizer(**numbers)
        updater.change(**numbers)

    def _decide(self, wanted: bool | None) -> bool:
        """Whether the store updates."""
        can = self._of_torch is None and self._store.is_capable("optimizer")
        if wanted and not can:
            who = "an optimizer of torch" if self._of_torch is not None else f'a "{self._store.type}" store'
            raise ValueError(f"update_on_kvstore=True: {who} does not update on the store; leave it out")
        if wanted is None and _VARIABLE in os.environ:
            wanted = os.environ[_VARIABLE] != "0"
        if wanted is None:
            wanted = getattr(self._store, "update_on_kvstore_default", True)
        return can and wanted

    def _require_own_updates(self, call: str) -> None:
        if self._updates_on_store:
            raise ValueError(f"{call}: the store updates the weights; make the Trainer with update_on_kvstore=False")

    def _require_updater(self, call: str) -> LocalUpdater:
        if self._updater is None:
            raise ValueError(f"{call}: use the method of the optimizer of torch")
        return self._updater


def _tensors(params: Iterable[Any] | Mapping[str, Any]) -> list[Any]:
    given = list(params.values() if isinstance(params, Mapping) else params)
    return [one[1] if isinstance(one, tuple) else one for one in given]


def part(n: int, num_parts: int, part_index: int) -> slice:
    """Return the share of a worker in `n` examples. The sizes of the parts differ by at most one.

        mine = data[part(len(data), kv.num_workers, kv.rank)]

    Raises:
        ValueError: part_index is out of range.
    """
    if n < 0 or not 0 <= part_index < num_parts:
        raise ValueError(f"part: {n} examples have no part {part_index} of {num_parts}")
    return slice(n * part_index // num_parts, n * (part_index + 1) // num_parts)


def split_data(data: Any, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Cut an array into slices along one axis: views of it. Mirrors `mxnet.gluon.utils.split_data`.

    Args:
        data: an array of any library.
        num_slice: how many.
        batch_axis: along which axis.
        even_split: refuse what cannot be cut evenly; else the first slices get one more.

    Raises:
        ValueError: fewer examples than slices, an uneven split where it must be even, or no such axis.
    """
    if num_slice < 1:
        raise ValueError(f"split_data: num_slice must be positive, but is {num_slice}")
    if not 0 <= batch_axis < len(data.shape):
        raise ValueError(f"split_data: an array of shape {tuple(data.shape)} has no axis {batch_axis}")
    length = data.shape[batch_axis]
    size, longer = divmod(length, num_slice)
    if even_split and longer:
        raise ValueError(
            f"split_data: {length} examples cannot be split evenly into {num_slice} slices; use a batch size that is a "
            f"multiple of {num_slice}, or even_split=False"
        )
    if size == 0:
        raise ValueError(f"split_data: {length} examples are too few for {num_slice} slices")
    ends = [size * i + min(i, longer) for i in range(num_slice + 1)]
    before = (slice(None),) * batch_axis
    places = [(*before, slice(first, end)) for first, end in itertools.pairwise(ends)]
    return [data[place] for place in places]


def split_and_load(data: Any, devices: Sequence[Any], batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """As `split_data`, one slice for each device, on that device. Mirrors `mxnet.gluon.utils.split_and_load`.

    Args:
        data: an array of any library, or what NumPy makes an array of.
        devices: what the library calls a device: "cuda:0" or a torch.device, the number of a GPU for CuPy; "cpu" for
            the host's memory.
        batch_axis: along which axis.
        even_split: refuse what cannot be cut evenly.

    Raises:
        ValueError: as `split_data`; a device that the library of `data` does not have.
    """
    adapter = adapter_for(data)
    data = adapter.prepare(data)
    slices = split_data(data, len(devices), batch_axis, even_split)
    return [adapter.on_device(one, device) for one, device in zip(slices, devices, strict=True)]
