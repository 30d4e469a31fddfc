"""What every store can be asked for, and the stores that users register."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, TypeVar

AnyStore = TypeVar("AnyStore", bound="type[KVStoreBase]")


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
        """Have the store update its values with what is pushed."""
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
