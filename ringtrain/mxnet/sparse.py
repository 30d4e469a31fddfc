"""Gradients that have some rows only, such as those of an embedding: gathered and added up."""

from __future__ import annotations

from typing import Any

import mxnet
import numpy as np

from ringtrain import ops
from ringtrain.process_sets import ProcessSet


def average_rows(gradient: Any, name: str, process_set: ProcessSet) -> None:
    """Make a row_sparse gradient that of all ranks: each row that some rank has is the average over all of them.

    Waits for the gradient, and for the other ranks. All of them get the same bits.
    """
    numbers = gradient.indices.asnumpy().astype(np.int64)
    rows = gradient.data.asnumpy()
    if not numbers.size:  # MXNet says that these have no dimensions
        rows = np.zeros((0, *gradient.shape[1:]), gradient.dtype)
    of_all = ops.allgather(numbers, f"{name}.indices", process_set)
    rows_of_all = ops.allgather(np.ascontiguousarray(rows), f"{name}.rows", process_set)
    merged = np.unique(of_all)
    total = np.zeros((merged.size, *gradient.shape[1:]), np.float64 if gradient.dtype == np.float64 else np.float32)
    np.add.at(total, np.searchsorted(merged, of_all), rows_of_all)
    total /= process_set.size() or 1
    if merged.size:
        average = mxnet.nd.sparse.row_sparse_array(
            (total.astype(gradient.dtype), merged), shape=gradient.shape, dtype=gradient.dtype, ctx=gradient.context
        )
    else:
        average = mxnet.nd.sparse.zeros("row_sparse", gradient.shape, ctx=gradient.context, dtype=gradient.dtype)
    average.copyto(gradient)
