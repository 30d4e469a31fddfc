"""The same operations in stories that differ in delays alone: their results must have the same bits.

A seed draws operations: dtypes, sizes from 1 to a million, averages with weights, process sets, groups, codes. A story
draws the order in which each rank submits them and how long it sleeps meanwhile, so that other operations share a plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import ringtrain as hvd

DTYPES = [np.dtype(one) for one in ("float32", "float32", "float16", ml_dtypes.bfloat16, "float64", "int32")]
OPS = [hvd.Sum, hvd.Sum, hvd.Average, hvd.Average, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum]
CALLS, KINDS, MOST_ELEMENTS = 40, 2, 10**6


class Call(NamedTuple):
    """One operation; `sizes` has several of a group."""

    kind: str  # allreduce, group or reducescatter
    sizes: list[int]
    dtype: np.dtype
    op: Any
    place: int  # of the process set
    is_weighted: bool
    compression: Any
    prescale: float

    def arrays(self, seed: Sequence[int], rank: int) -> list[np.ndarray]:
        """The arrays of a rank."""
        draw = np.random.default_rng([*seed, rank])
        arrays = [draw.standard_normal(size) * 3 for size in self.sizes]
        return [array.astype(self.dtype) for array in arrays]

    def submit(self, name: str, arrays: list[np.ndarray], sets: Sequence[hvd.ProcessSet]) -> Any:
        """Submits the operation, and returns its Handle."""
        more: dict[str, Any] = {"process_set": sets[self.place], "name": name, "op": self.op}
        if self.kind == "reducescatter":
            return hvd.reducescatter_async(arrays[0], **more)
        more |= {"compression": self.compression, "prescale_factor": self.prescale}
        if self.is_weighted:
            more["weight"] = 1.0 + hvd.rank() % 3
        if self.kind == "group":
            return hvd.grouped_allreduce_async(arrays, **more)
        return hvd.allreduce_async(arrays[0], **more)


def calls_of(seed: int, sets: int) -> list[Call]:
    """Draws operations for so many process sets: some of each of a few kinds, which share plans."""
    draw = np.random.default_rng(seed)
    most = 10 ** draw.uniform(2, np.log10(MOST_ELEMENTS))
    kinds = [_kind(draw, sets) for _ in range(KINDS)]
    calls = []
    for _ in range(CALLS):
        like = kinds[draw.integers(KINDS)]
        sizes = [int(most ** draw.uniform(0, 1) if draw.random() < 0.5 else draw.uniform(1, most)) for _ in like.sizes]
        calls.append(like._replace(sizes=sizes))
    return calls


def _kind(draw: np.random.Generator, sets: int) -> Call:
    kind = draw.choice(["allreduce", "allreduce", "allreduce", "group", "reducescatter"])
    dtype, op = DTYPES[draw.integers(len(DTYPES))], OPS[draw.integers(len(OPS))]
    if op == hvd.Adasum and (dtype.kind == "i" or kind == "reducescatter"):
        op = hvd.Sum
    sizes = [0] * (3 if kind == "group" else 1)
    is_average = op == hvd.Average and dtype.kind != "i"
    is_weighted = bool(is_average and kind != "reducescatter" and draw.random() < 0.4)
    has_codes = kind == "allreduce" and dtype == np.float32 and op in (hvd.Sum, hvd.Average) and draw.random() < 0.3
    compressions = [hvd.Compression.two_bit(0.5, force=True), hvd.Compression.fp16, hvd.Compression.bf16]
    compression = compressions[draw.integers(3)] if has_codes else hvd.Compression.none
    prescale = 0.7 if is_average and draw.random() < 0.3 else 1.0
    return Call(str(kind), sizes, dtype, op, int(draw.integers(sets)), is_weighted, compression, prescale)


def tell(seed: int, story: int, sets: Sequence[hvd.ProcessSet], delay_s: float = 0.002) -> list[str]:
    """Carries out the operations of a seed, and returns a digest of each result of this rank."""
    calls = calls_of(seed, len(sets))
    delays = np.random.default_rng([seed, story, hvd.rank()])
    own = [index for index, call in enumerate(calls) if sets[call.place].included()]
    arrays = {index: calls[index].arrays([seed, index], hvd.rank()) for index in own}
    handles = {}
    for index in delays.permutation(own):
        if delays.random() < 0.3:
            time.sleep(delays.random() * delay_s)
        # what a code leaves out is kept by name: each story begins without
        name = f"{seed}.{index}" if calls[index].compression is hvd.Compression.none else f"{seed}.{story}.{index}"
        handles[index] = calls[index].submit(name, arrays[index], sets)
    return [_digest(hvd.synchronize(handles[index])) for index in own]


def _digest(result: Any) -> str:
    parts = result if isinstance(result, list) else [result]
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()[:16]


@contextlib.contextmanager
def process_sets() -> Iterator[list[hvd.ProcessSet]]:
    """All ranks, and where there are three or more the first and the last ones."""
    ranks = range(hvd.size())
    own = [hvd.add_process_set(some) for some in (ranks[:-1], ranks[1:])] if hvd.size() >= 3 else []
    yield [hvd.global_process_set, *own]
    for process_set in own:
        hvd.remove_process_set(process_set)


def differences(seed: int, sets: Sequence[hvd.ProcessSet]) -> list[str]:
    """Tells two stories of a seed, and returns what differs between them on this rank, and from rank 0."""
    calls = calls_of(seed, len(sets))
    own = [call for call in calls if sets[call.place].included()]
    one, other = (tell(seed, story, sets) for story in range(2))
    different = [call for call, first, second in zip(own, one, other, strict=True) if first != second]
    where = f"seed {seed}, np={hvd.size()}, rank {hvd.rank()}"
    found = [f"{where}: {len(different)} of {len(own)} differ, first {different[0]}"] if different else []
    is_of_all = [call.place == 0 and call.kind != "reducescatter" for call in own]
    of_all = [int(digest, 16) >> 1 for digest, is_it in zip(one, is_of_all, strict=True) if is_it]
    rows = hvd.allgather(np.array([of_all], np.int64), name=f"{seed}.digests")
    if (rows != rows[0]).any():
        found.append(f"{where}: the ranks have other bits")
    return found
