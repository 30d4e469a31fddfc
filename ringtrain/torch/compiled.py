"""Operations in functions that torch.compile has compiled: the graph ends before each of them, and goes on after it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ringtrain import ops
from ringtrain.engine.handles import Handle, poll, synchronize
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.job import session
from ringtrain.ops import preemption
from ringtrain.torch import functions, gradients, hooks, ops as differentiable
from ringtrain.torch.adasum import AdasumOptimizer
from ringtrain.torch.diloco import DiLoCoOptimizer
from ringtrain.torch.local_hooks import LocalHooks
from ringtrain.torch.optimizer import Distributed, Join, clip_grad_norm_
from ringtrain.torch.sync_batch_norm import SyncBatchNorm
from ringtrain.torch.wrapped import WrappedOptimizer, _DistributedOptimizer
from ringtrain.training.replicas import check_replicas

_OPTIMIZERS = (Distributed, WrappedOptimizer, AdasumOptimizer, DiLoCoOptimizer, _DistributedOptimizer)
_OPERATIONS = (
    *(session, ops, preemption, differentiable, functions, gradients, hooks),
    *(ProcessSet, Handle, poll, synchronize, differentiable.SparseHandle, hooks.GradientHooks, LocalHooks),
    *(gradients.LeftGradients, *_OPTIMIZERS, Join, clip_grad_norm_, SyncBatchNorm, check_replicas),
)
_PACKAGE = str(Path(__file__).parents[1])
_REASON = (
    "ringtrain talks to other ranks, which no graph can do: compile without fullgraph=True, or call rank() and size() "
    "outside of the function"
)


def keep_operations_out_of_graphs() -> None:
    """For those of ringtrain.torch."""
    keep_out_of_graphs(*_OPERATIONS)


def keep_out_of_graphs(*operations: Any) -> None:
    """Makes torch.compile call functions, and those of modules and classes, where it would trace them.

    As `torch.compiler.disable`, whose wrapper takes longer than a small allreduce: these marks cost a call nothing.
    """
    for one in operations:
        functions_of = (one,) if isinstance(one, types.FunctionType) else vars(one).values()
        for function in functions_of:
            if isinstance(function, types.FunctionType) and function.__module__.startswith("ringtrain."):
                marked: Any = function
                marked._torchdynamo_disable = True
                marked._torchdynamo_disable_msg = _REASON
                for code in _codes_of(function):
                    _skip_frames_of(code)


def _codes_of(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of those that it wraps or defines; of this package only."""
    found = [function.__code__, inspect.unwrap(function).__code__]
    for code in found:  # which grows
        if code.co_filename.startswith(_PACKAGE):
            yield code
            found += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _skip_frames_of(code: types.CodeType) -> None:
    """The frame after the end of a graph, and all frames that it calls, are not compiled either."""
    evaluation: Any = torch._C._dynamo.eval_frame
    if hasattr(evaluation, "set_code_exec_strategy"):
        skips = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(code, evaluation._FrameExecStrategy(skips, skips))
    else:  # older PyTorch goes on with the frames that it calls
        evaluation.skip_code(code)
