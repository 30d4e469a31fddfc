"""From any array to what the core needs of it, through the adapter of its library."""

from __future__ import annotations

from typing import Any, Protocol

from ringtrain.adapters import numpy as numpy_adapter

# (address, dtype number of the core, shape)
View = tuple[int, int, tuple[int, ...]]


class Adapter(Protocol):
    """What one array library can do for ringtrain. `adapters/` has a module of these functions for each."""

    def prepare(self, array: Any) -> Any:
        """The array itself if the core can read it where it lies, else a contiguous copy.

        Raises TypeError for a dtype that the core does not have.
        """

    def is_in_place(self, array: Any) -> bool:
        """Whether the core may write the result where the array lies. Raises ValueError if nobody may write to it."""

    def empty_like(self, array: Any) -> Any: ...

    def view(self, array: Any) -> View: ...

    def view_in_place(self, array: Any) -> View | None:
        """The view of an array that can be read and written where it lies, or None: the other functions know why."""

    def assign(self, target: Any, source: Any) -> None: ...

    def from_memory(self, memory: Any, dtype: int, shape: list[int], like: Any) -> Any:
        """An array of the library over bytes that the core allocated."""

    def rows(self, array: Any) -> Any:
        """The array, or a 0-d array as one of shape (1,): for operations along the first dimension."""


def adapter_for(array: Any) -> Adapter:
    """The adapter of the library that made `array`.

    Raises:
        TypeError: no library that ringtrain knows made it.
    """
    if numpy_adapter.accepts(array):
        return numpy_adapter
    raise TypeError(
        f"ringtrain cannot send a {type(array).__module__}.{type(array).__qualname__}; it takes NumPy arrays or numbers"
    )
