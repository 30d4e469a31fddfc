"""A store as users see it: `create` makes a KVStore, which checks keys and values; its Backend does the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar, cast

from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.handles import Pending
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.job import session
from ringtrain.kvstore import places, state_files
from ringtrain.kvstore.backend import Backend, CollectiveBackend, Groups, LocalBackend
from ringtrain.kvstore.entries import KINDS, Entry, Key, grouped, listed, require_fitting
from ringtrain.kvstore.gradient_compression import GradientCompression, require_compressible
from ringtrain.kvstore.row_sparse import RowSparse, as_rows, is_sparse, numbers_of, put_rows, require_place
from ringtrain.kvstore.served import ServedBackend
from ringtrain.kvstore.servers.server_ranks import has_plan
from ringtrain.kvstore.servers.worker import is_worker_by_environment, worker_by_environment, worker_of
from ringtrain.kvstore.updaters import Updater, updater_for

AnyStore = TypeVar("AnyStore", bound="type[KVStoreBase]")


def create(
    name: str = "local",
    *,
    average: bool = False,
    process_set: ProcessSet = global_process_set,
    max_staleness: int | None = None,
    elastic: bool = False,
    atomic: bool = False,
) -> KVStore:
    """Make a store. Mirrors `mxnet.kvstore.create`.

    Args:
        name: its type, in letters of any size. local, local_update_cpu and local_allreduce_cpu add up the values of one
            process in the host's memory; device, local_allreduce_device and nccl where they are. dist and dist_sync add
            up those of all workers in the host's memory, dist_sync_device and dist_device_sync where they are; horovod
            and ringtrain do, too, and update nothing. dist_async and dist_async_device update with each worker's push
            at once, on servers. Or the name of a class that is registered.
        average: of horovod and ringtrain: whether sums are divided by the number of workers.
        process_set: of distributed stores: the ranks that are its workers.
        max_staleness: of asynchronous stores: a pull waits while the slowest worker is that many pushes of the key
            behind this one; 0 keeps all in step, None never waits.
        elastic: of asynchronous stores: workers may come and go, and `num_workers` is how many there are.
        atomic: of asynchronous stores: a push to a key is applied as a whole or, if its worker dies, not at all, and a
            pull reads a key as a whole. Such a key is on one server and has at most 256 MiB.

    Returns:
        A KVStore, or an object of a registered class, made without arguments. A distributed store calls
        `ringtrain.init()` if the script has not. All workers make their distributed stores in the same order.

    Raises:
        ValueError: an unknown name, or an argument that this type does not take.
        StalledError: of stores with servers: not all processes of the job came in time.
        PeerLostError: of stores with servers: the scheduler or a server is gone.
        TypeError: the name is not a str.

    Examples:
        Each of two workers pushes ones; every worker pulls their sum:

        >>> from ringtrain import kvstore
        >>> store = kvstore.create("dist_sync")
        >>> store.init("weight", np.zeros(2, np.float32))
        >>> store.push("weight", np.ones(2, np.float32))
        >>> store.pull("weight").tolist()
        [2.0, 2.0]
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a str, not {name!r}")
    name = name.lower()
    if name in KVStoreBase.kv_registry:
        return cast("KVStore", KVStoreBase.kv_registry[name]())
    kind = KINDS.get(name)
    if kind is None:
        known = ", ".join([*KINDS, *KVStoreBase.kv_registry])
        raise ValueError(f'there is no type "{name}" of store; there are {known}')
    if average and kind.can_update:
        raise ValueError(f'a "{name}" store adds up; average=True is for "horovod" and "ringtrain"')
    if not kind.is_asynchronous and (max_staleness is not None or elastic or atomic):
        raise ValueError(f'max_staleness, elastic and atomic are for "dist_async" stores, not for a "{name}" one')
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(f"max_staleness is a number of pushes from 0 on, or None, not {max_staleness}")
    if not kind.is_distributed:
        if process_set is not global_process_set:
            raise ValueError(f'a "{name}" store has one worker; a process set is for the distributed ones')
        return KVStore(LocalBackend(kind))
    if kind.can_update and process_set is global_process_set and is_worker_by_environment():
        return KVStore(ServedBackend(kind, worker_by_environment(), max_staleness, elastic, atomic))
    if not session.is_initialized():
        session.init()
    has_servers = process_set is global_process_set and has_plan()
    if kind.is_asynchronous or (kind.can_update and has_servers):
        return KVStore(ServedBackend(kind, worker_of(process_set), max_staleness, elastic, atomic))
    return KVStore(CollectiveBackend(kind, process_set, average))


class KVStoreBase:
    """The interface of a store. Mirrors `mxnet.kvstore.KVStoreBase`.

    A store of your own derives from it and is registered:

        @kvstore.KVStoreBase.register
        class MyStore(kvstore.KVStoreBase): ...

        kv = kvstore.create("mystore")
    """

    OPTIMIZER = "optimizer"

    kv_registry: ClassVar[dict[str, type[KVStoreBase]]] = {}

    @staticmethod
    def register(klass: AnyStore) -> AnyStore:
        """Let `create` find a class by its name in lower case, before all types of ringtrain. For a decorator."""
        if not isinstance(klass, type):
            raise TypeError(f"register takes a class, not {klass!r}")
        name = klass.__name__.lower()
        before = KVStoreBase.kv_registry.get(name)
        if before is not None and before is not klass:
            warnings.warn(f'the store "{name}" was {before} and is {klass} now', stacklevel=2)
        KVStoreBase.kv_registry[name] = klass
        return klass

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give the value of rank 0 to all workers, in `out`."""
        raise NotImplementedError

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push `value` and pull the result into `out`; without one into `value`."""
        raise NotImplementedError

    def set_optimizer(self, optimizer: Any) -> None:
        """Make the store update its values with what is pushed."""
        raise NotImplementedError

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do it: `KVStoreBase.OPTIMIZER`, to update its values by itself."""
        raise NotImplementedError

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write down what the optimizer remembers."""
        raise NotImplementedError

    def load_optimizer_states(self, fname: str) -> None:
        """Go on from what `save_optimizer_states` has written."""
        raise NotImplementedError

    @property
    def type(self) -> str:
        """The name of its type."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This worker's number."""
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        raise NotImplementedError


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


class KVStore(KVStoreBase):
    """Holds an array for each key; `create` makes one. Mirrors `mxnet.kvstore.KVStore`.

    Keys are of one kind, int or str. A key is given alone, with an array, or with a list of arrays that belong to it,
    such as one for each device. A list of keys comes with a list of as many of either. Arrays are those of NumPy,
    PyTorch and CuPy, and what else is on a CUDA device and knows DLPack. Called by one thread at a time.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    # --------------------------------------------------------------------------------------------------- values

    def init(self, key: Any, value: Any) -> None:
        """Give keys their first values. All workers call it, in any order of keys; the value of rank 0 counts.

        Where workers disagree about a shape or a dtype, the next call of anything but `init` says so.

        Raises:
            ValueError: a key has a value already, or comes with several.
            TypeError: no array, a dtype that cannot be sent, or a key of another kind.
        """
        self._backend.require_usable()
        groups = grouped("init", key, value)
        self._backend.entries.require_kind("init", groups)
        for one, values in groups.items():
            if one in self._backend.entries:
                raise ValueError(f"init: key {one!r} has a value already; broadcast gives it another one")
            if len(values) > 1:
                raise ValueError(f"init: key {one!r} comes with {len(values)} values, but takes one")
        self._backend.begin({one: self._first_value(one, values[0]) for one, values in groups.items()})

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
            handles = self._backend.push(self._given("push", key, value), priority, copy)
            return None if copy else Pushes(handles)
        self._backend.require_usable()
        handles = []
        for one, values in with_rows.items():
            entry = self._with_rows("push", one)
            handles += self._backend.push_rows(entry, [as_rows("push", one, value) for value in values], priority)
        dense = {one: values for one, values in groups.items() if one not in with_rows}
        if dense:
            handles += self._backend.push(self._given("push", list(dense), list(dense.values())), priority, copy)
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
        self._backend.require_usable()
        if out is None:
            values = [
                places.for_reading(self._backend.value(self._backend.entries.find("pull", one)))
                for one in listed("pull", key)
            ]
            return values if isinstance(key, list | tuple) else values[0]
        self._backend.pull(self._backend.entries.pulled("pull", key, out), priority)
        return None

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """As `push` and `pull` in one, without copies. Without `out` the values are overwritten.

        In a distributed store without updater it is an allreduce of the values: the sums are where they were wanted,
        and the store does not keep them. `pull` refuses such a key until it is pushed again.
        """
        groups = self._given("pushpull", key, value)
        outs = dict(self._backend.entries.pulled("pushpull", key, value if out is None else out))
        if len(outs) != len(groups) or any(entry not in outs for entry, _ in groups):
            raise ValueError("pushpull: value and out are of different keys")
        self._backend.pushpull([(entry, values, outs[entry]) for entry, values in groups], priority)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give the value of rank 0 to all workers: to the keys, and to `out`. For keys with or without a value.

        Raises as `init` and `pull`.
        """
        self._backend.require_usable()
        groups = grouped("broadcast", key, value)
        self._backend.entries.require_kind("broadcast", groups)
        ready = {one: self._first_value(one, values[0]) for one, values in groups.items()}
        for one, array in ready.items():
            if one in self._backend.entries:
                require_fitting("broadcast", self._backend.entries[one], array)
        for one in ready:
            if one in self._backend.entries:
                self._backend.finish(self._backend.entries[one])
        self._backend.begin(ready)
        if self._backend.updater is not None:
            for one in ready:
                self._backend.updater.replaced(str(one), self._backend.value(self._backend.entries[one]))
        self.pull(key, out, priority)

    # --------------------------------------------------------------------------------------------------- updates

    def set_updater(self, updater: Callable[[Key, Any, Any], object]) -> None:
        """Have `updater(key, sum, stored)` called for each sum that is pushed: it writes into `stored`.

        In a distributed store `push` waits for the sums of all workers and calls it on every rank, so that what it
        reads is the same everywhere; all workers push the same keys in the same order. With servers and
        kv_python_updaters=on it runs there instead.
        """
        self._backend.require_usable()
        self._require_can_update()
        if not callable(updater):
            raise TypeError(f"set_updater takes a function of key, sum and stored value, not {updater!r}")
        self.wait()
        self._backend.use(None, updater)

    def set_optimizer(self, optimizer: Any, **numbers: Any) -> None:
        """Make the store update its values. All workers call it, with the same optimizer.

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
        self._backend.require_usable()
        self._require_can_update()
        updater = updater_for(optimizer, numbers)
        self.wait()  # before the round, so that no worker's pushes meet the new optimizer
        self._backend.require_same("set_optimizer", updater.configuration())
        self._backend.use(updater, None)

    def update_optimizer(self, **numbers: Any) -> None:
        """Go on with other numbers, such as `lr=0.01`, and what the optimizer remembers. All workers call it.

        Raises:
            ValueError: no optimizer is set, or it has no such number.
            MismatchError: workers give different ones.
        """
        self._backend.require_usable()
        updater = self._require_optimizer("update_optimizer")
        self.wait()
        self._backend.require_same("update_optimizer", numbers)
        updater.change(**numbers)

    def is_capable(self, capability: str) -> bool:
        """Whether the store can update its values: the only capability there is, `KVStoreBase.OPTIMIZER`."""
        if capability.lower() != KVStoreBase.OPTIMIZER:
            raise ValueError(f'unknown capability "{capability}"; there is "{KVStoreBase.OPTIMIZER}"')
        return self._backend.kind.can_update

    @property
    def update_on_kvstore_default(self) -> bool:
        """Whether trainers have the store update the weights unless they are told."""
        return self._backend.kind.can_update and self._backend.kind.updates_by_default

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
        self._backend.require_usable()
        compression = GradientCompression.of(compression_params)
        if not self._backend.kind.is_distributed and not self._backend.kind.on_device:
            raise ValueError(f'a "{self.type}" store sends nothing, so there is nothing to compress')
        for entry in self._backend.entries.values():
            require_compressible(entry.key, entry.dtype_name)
        if self._backend.compression not in (None, compression):
            raise ValueError(f"gradient compression is {self._backend.compression} already, and stays so")
        self.wait()  # what is on its way is read as it was sent
        self._backend.require_same("set_gradient_compression", compression._asdict())
        self._backend.compression = compression

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
            state_files.save(fname, updater.states(), updater.configuration() if dump_optimizer else None)

    def load_optimizer_states(self, fname: str) -> None:
        """Go on from what `save_optimizer_states` has written. All workers call it; rank 0 reads the file.

        Raises:
            OSError, ValueError: the file cannot be read, or is of another optimizer; on all workers.
        """
        updater = self._require_optimizer("load_optimizer_states")
        self.wait()
        self._backend.load_states(updater, fname)

    def save(self, fname: str) -> None:
        """Write all values, and what the optimizer remembers: rank 0 does, alone."""
        self.wait()
        for entry in self._backend.entries.values():
            entry.value()  # raises on all workers alike
        if self.rank == 0:
            self._backend.save(fname)

    def load(self, fname: str) -> None:
        """Go on from what `save` has written: its keys are to have values already. Others keep theirs.

        All workers call it; rank 0 reads the file.

        Raises:
            OSError, ValueError: the file cannot be read, or does not fit the keys or the optimizer; on all workers.
        """
        self._backend.require_usable()
        self.wait()
        self._backend.load(fname)

    # --------------------------------------------------------------------------------------------------- workers

    @property
    def type(self) -> str:
        """The name that `create` was given, in lower case."""
        return self._backend.kind.name

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._backend.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._backend.num_workers

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its node."""
        return self._backend.local_rank

    @property
    def num_local_workers(self) -> int:
        """How many workers this node has."""
        return self._backend.num_local_workers

    @property
    def is_recovery(self) -> bool:
        """Whether this worker has taken the place of a lost one: never without servers, where the others end, too."""
        return self._backend.is_recovery

    def get_num_dead_node(self, node_id: int = 7, timeout: int = 60) -> int:
        """Return how many processes the scheduler has not heard of for that long, or knows to be dead.

        Without servers it is 0: the loss of a worker ends the operations of the others with an error.

        Args:
            node_id: the sum of 1 for the scheduler, 2 for the servers and 4 for the workers.
            timeout: in seconds.
        """
        return self._backend.count_dead(node_id, float(timeout))

    def barrier(self) -> None:
        """Wait until all workers have come here."""
        self._backend.require_usable()
        self._backend.barrier()

    def set_barrier_before_exit(self, barrier_before_exit: bool = True) -> None:
        """Set whether this worker waits for the others at its end, for kv_timeout_s at most.

        With servers in the workers it always does, since they need this one; without servers never.
        """
        self._backend.wait_before_exit(barrier_before_exit)

    def wait(self, keys: Any = None) -> None:
        """Wait until all own pushes are in the values, or those of some keys.

        Raises:
            RingtrainError: a push has failed: workers disagree, one of them is lost or does not come.
        """
        self._backend.require_usable()
        entries = (
            self._backend.entries.values()
            if keys is None
            else [self._backend.entries.find("wait", one) for one in listed("wait", keys)]
        )
        for entry in list(entries):
            self._backend.finish(entry)

    def join(self) -> None:
        """Say that this worker has no more data, and wait until all have said so.

        Until then it counts with zeros in the pushes of the others; afterwards all have the same values again.
        """
        self.wait()
        self._backend.join()

    def placement(self) -> dict[Key, list[tuple[int, int, int]]]:
        """Return the pieces of each key: number of the server, first element, elements. Empty without servers."""
        return self._backend.placement()

    @property
    def restored(self) -> dict[Key, float]:
        """The keys that a server has brought back from a snapshot, and how many seconds old that was then: what was
        pushed since is gone. None where no server has died.
        """
        return self._backend.restored()

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
        self._backend.require_usable()
        keys = listed("row_sparse_pull", key)
        outs = [RowSparse() for _ in keys] if out is None else out if isinstance(out, (list, tuple)) else [out]
        ids = row_ids if isinstance(row_ids, (list, tuple)) and len(row_ids) == len(outs) > 1 else [row_ids] * len(outs)
        if len(keys) not in (1, len(outs)):
            raise ValueError(f"row_sparse_pull: {len(keys)} keys take as many outs, not {len(outs)}")
        for one, target, wanted in zip(keys * (len(outs) // len(keys)), outs, ids, strict=True):
            entry = self._with_rows("row_sparse_pull", one)
            require_place("row_sparse_pull", one, target, entry.shape)
            numbers = numbers_of("row_sparse_pull", one, wanted, entry.shape[0])
            put_rows(target, numbers, self._backend.pull_rows(entry, numbers, priority))
        return None if out is not None else outs if isinstance(key, (list, tuple)) else outs[0]

    def _with_rows(self, call: str, key: Key) -> Entry:
        entry = self._backend.entries.find(call, key)
        if not entry.shape:
            raise ValueError(f"{call}: key {key!r} has no rows; use pushes and pulls of the whole value")
        return entry

    def send_command_to_servers(self, head: int, body: str) -> None:
        """Call the controllers of all servers with it, and wait until they are done.

        Raises:
            ValueError: a number that is one of MXNet's own, no servers, or servers in the workers, which have no
                controller.
            RemoteError: a controller has failed; with its traceback.
        """
        self._backend.require_usable()
        self._backend.command(head, str(body))

    def require_unused(self, call: str, keys: Iterable[Key] | None = None) -> None:
        """Checks before a trainer takes the store that nothing else uses it: keys and optimizer would be those of both.

        Args:
            keys: those that the trainer will init, if others and an optimizer may be there.

        Raises:
            ValueError: a key has a value, or an updater is set.
        """
        entries = self._backend.entries
        used = [f"key {one!r}" for one in (entries if keys is None else keys) if one in entries][:1]
        if keys is None and (self._backend.updater is not None or self._backend.function is not None):
            used.append("an updater")
        if used:
            raise ValueError(
                f"{call}: this store has {' and '.join(used)} already, of another trainer or of the script; make a "
                "store for each trainer with create()"
            )

    def _given(self, call: str, key: Any, value: Any) -> Groups:
        self._backend.require_usable()
        return self._backend.entries.pushed(call, key, value)

    def _first_value(self, key: Key, value: Any) -> Any:
        array = places.readable(value)
        if self._backend.compression is not None:
            require_compressible(key, adapter_for(array).dtype_name(array))
        return array

    def _require_can_update(self) -> None:
        if not self._backend.kind.can_update:
            raise ValueError(
                f'a "{self.type}" store only adds up: update the weights yourself, or use "dist_sync_device"'
            )

    def _require_optimizer(self, call: str) -> Updater:
        self._backend.require_usable()
        if self._backend.updater is None:
            raise ValueError(f"{call}: the store has no optimizer; call set_optimizer first")
        return self._backend.updater

    # For MXNet's scripts.

    def _barrier(self) -> None:
        self.barrier()

    def _set_updater(self, updater: Callable[[Key, Any, Any], object]) -> None:
        self.set_updater(updater)
