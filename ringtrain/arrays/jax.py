"""JAX arrays, outside of jit: the core reads NumPy's view of them, and the result is a new JAX array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringtrain.arrays import numpy as of_values
from ringtrain.arrays.numpy import (
    at_device_of as at_device_of,
    device as device,
    empty_like as empty_like,
    from_memory as from_memory,
    no_copy,
    note_change as note_change,
    require_results as require_results,
    rows as rows,
    stream as stream,
    view as view,
)

MAKES = "jax"
copy_of_small = view_in_place = no_copy


def accepts(array: Any) -> bool:
    return isinstance(array, jax.Array)


# Between `prepare` and the result an array is NumPy's.


def prepare(array: Any) -> Any:
    return of_values.prepare(on_host(array))


def is_in_place(array: Any) -> bool:
    raise ValueError("arrays of JAX are read-only: use the form without the underscore, which returns a new one")


def assign(target: Any, source: Any) -> None:
    is_in_place(target)


assign_host = assign


def returned(array: Any, like: Any) -> jax.Array:
    result: jax.Array = jax.device_put(array, _place_for(np.shape(array), like))
    return result


def _place_for(shape: tuple[int, ...], like: Any) -> Any:
    """Returns the device or the sharding of an array, for one that may have another shape."""
    devices = sorted(like.sharding.addressable_devices, key=lambda device: device.id)
    if len(devices) == 1 or not like.is_fully_addressable:
        return devices[0]
    try:
        like.sharding.shard_shape(shape)
    except ValueError:  # it cannot be split evenly, or has fewer dimensions
        return devices[0]
    return like.sharding


def is_finite(array: Any) -> bool:
    return of_values.is_finite(on_host(array))


def dtype_name(array: Any) -> str:
    return str(array.dtype.name)


def cast(array: Any, dtype_name: str) -> Any:
    return array.astype(dtype_name)


def received_splits(numbers: list[int], sent: Any) -> Any:
    return jnp.array(numbers, jnp.int32) if accepts(sent) else np.array(numbers, np.int64)


def stack(arrays: Sequence[Any]) -> jax.Array:
    return jnp.stack(list(arrays))


def on_host(array: Any) -> Any:
    if not accepts(array):
        return array
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            "this array has no values yet, since it is traced, as by jit or grad: use the operations of ringtrain.jax"
        )
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    raise ValueError(
        f"this array has parts on {len(array.sharding.device_set)} devices, also of other ranks, as those of JAX's own "
        "sharding. Compute over the ranks inside of jit there, as by jnp.mean, or take this rank's own part: "
        "array.addressable_data(0)"
    )


def in_host_memory(array: Any) -> Any:
    return jax.device_put(array, jax.devices("cpu")[0])


def at_place_of(array: Any, like: Any) -> Any:
    return jax.device_put(array, _place_for(np.shape(array), like))


def on_device(array: Any, device: Any) -> Any:
    try:
        return jax.device_put(array, jax.devices(device)[0] if isinstance(device, str) else device)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"JAX has no device {device!r}: {error}") from None
