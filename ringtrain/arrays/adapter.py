"""From any array to what the core needs of it, through the adapter of its library."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import numpy as np

from ringtrain import arrays
from ringtrain.arrays import numpy as numpy_adapter

# (address, dtype number of the core, shape), and on a GPU (..., device, handle of the current stream). Complex numbers
# are pairs of real ones, along a last dimension that only the core sees.
View = tuple[int, int, tuple[int, ...]] | tuple[int, int, tuple[int, ...], int, int]


class Adapter(Protocol):
    """The functions that ringtrain needs of an array library. This folder has a module of them for each library."""

    MAKES: str  # the library of the arrays that `empty_like` makes

    def accepts(self, array: Any) -> bool:
        """Whether the library made it."""

    def prepare(self, array: Any) -> Any:
        """Returns the array itself if the core can read its memory, else a contiguous copy.

        Raises TypeError for a dtype that the core does not have.
        """

    def is_in_place(self, array: Any) -> bool:
        """Whether the core may write the result to the array's memory. Raises ValueError if the array is read-only."""

    def empty_like(self, array: Any) -> Any: ...

    def copy_of_small(self, array: Any) -> Any:
        """A copy, in which the core may work in place, of at most SMALL_BYTES in the host's memory; else None."""

    def view(self, array: Any) -> View: ...

    def view_in_place(self, array: Any) -> View | None:
        """Returns the view of an array that can be read and written in place, or None; other functions say why."""

    def assign(self, target: Any, source: Any) -> None: ...

    def assign_host(self, target: Any, values: np.ndarray[Any, Any]) -> None:
        """Copy an array of NumPy into the target, in its dtype."""

    def note_change(self, array: Any) -> None:
        """Tell the library that the values of the array have changed."""

    def from_memory(self, memory: Any, shape: list[int], like: Any) -> Any:
        """An array of the dtype of `like` over bytes that the core allocated, for what has that shape there."""

    def returned(self, array: Any, like: Any) -> Any:
        """The result for the user, who gave `like`: on its device."""

    def rows(self, array: Any) -> Any:
        """The array, or a 0-d array as one of shape (1,): for operations along the first dimension."""

    def is_finite(self, array: Any) -> Any:
        """Whether no element is NaN or infinite: a bool, or on a GPU a 0-d array, so that the host need not wait."""

    def dtype_name(self, array: Any) -> str: ...

    def cast(self, array: Any, dtype_name: str) -> Any:
        """A copy in another dtype."""

    def stream(self, array: Any) -> int | None:
        """The handle of the library's current stream on the array's GPU; None for an array in the host's memory.

        -1 where the library's stream is unknown, so that the host has to wait for the result.
        """

    def stream_of_device(self, device: int) -> int:
        """The same for a GPU. Only of libraries whose `view_in_place` takes arrays on GPUs."""

    def device(self, array: Any) -> int:
        """The number of the array's GPU; -1 for an array in the host's memory."""

    def stack(self, arrays: Sequence[Any]) -> Any:
        """Arrays of equal shape in one place as one array, along a new first dimension."""

    def on_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The values as a NumPy array; a copy, unless they are in the host's memory."""

    def in_host_memory(self, array: Any) -> Any:
        """As `on_host`, as an array of the library itself where it has arrays there."""

    def at_place_of(self, array: Any, like: Any) -> Any:
        """The array, or a copy of it on the device of `like`, an array of the same library."""

    def at_device_of(self, array: Any) -> AbstractContextManager[Any]:
        """Within it the library computes on the device of the array."""

    def on_device(self, array: Any, device: Any) -> Any:
        """The array, or a copy of it on what the library calls a device. Raises ValueError where it has none such."""

    def require_results(self) -> None:
        """Raises TypeError if `empty_like` and `from_memory` cannot make arrays here."""

    def received_splits(self, numbers: list[int], sent: Any) -> Any:
        """How many rows came from each rank, as an array of the library like the splits that were given."""


# Every other module of this folder is the adapter of the library that has its name. It is imported when the library is
# loaded and an array that is not NumPy's is submitted.
_NO_LIBRARIES = ("adapter", "dlpack", "numpy", "shared_memory")
_adapters: dict[type, Adapter] = {}


@functools.cache
def _libraries() -> tuple[str, ...]:
    import pkgutil  # slow, and not needed for NumPy's arrays

    return tuple(one.name for one in pkgutil.iter_modules(arrays.__path__) if one.name not in _NO_LIBRARIES)


def adapter_for(array: Any) -> Adapter:
    """The adapter of the library that made `array`.

    Raises:
        TypeError: no library that ringtrain knows made it.
    """
    return _adapters.get(type(array)) or _find_adapter(array)


def _find_adapter(array: Any) -> Adapter:
    for adapter in _candidates():
        if adapter.accepts(array):
            _adapters[type(array)] = adapter
            return adapter
    remedy = ""
    if hasattr(array, "__dlpack__"):
        remedy = " Pass numpy.from_dlpack(array), which shares its memory."
    elif isinstance(array, list | tuple):
        remedy = " A list of arrays is for grouped_allreduce and its like, one of numbers for numpy.array(...)."
    elif array is None or isinstance(array, str | bytes | dict):
        remedy = " Send other objects by broadcast_object or allgather_object."
    kind = type(array).__qualname__
    kind = kind if type(array).__module__ == "builtins" else f"{type(array).__module__}.{kind}"
    raise TypeError(
        f"ringtrain cannot send a {kind}; "
        f"it takes arrays of {', '.join(['numpy', *_libraries()])}, what else is on a CUDA device and knows DLPack or "
        f"__cuda_array_interface__, and numbers.{remedy}"
    )


def _candidates() -> Iterator[Adapter]:
    """One after the other, so that those of other libraries are imported only when they are asked."""
    yield cast(Adapter, numpy_adapter)
    # Arrays of the libraries with adapters of their own also speak DLPack.
    for name in (*(name for name in _libraries() if name in sys.modules), "dlpack"):
        yield cast(Adapter, importlib.import_module(f"ringtrain.arrays.{name}"))
