"""Shares of the data: which part is a worker's, and which slices are its devices'."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ringtrain.arrays.adapter import adapter_for


def part(n: int, num_parts: int, part_index: int) -> slice:
    """The share of a worker in `n` examples: all parts together are everything, and differ by one at most.

        mine = data[part(len(data), kv.num_workers, kv.rank)]

    Raises:
        ValueError: there is no such part.
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
