"""Which bucket of DistributedDataParallel an all_reduce is, and of which parameters, for messages.

torch's C++ reduces the buckets in order during backward(), and passes tensors alone. So the buckets are counted, and
the parameters are those that torch notes for its logs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.autograd.graph
from torch.nn.parallel import DistributedDataParallel

_MOST_LOOKS = 8  # until torch has noted the parameters, which it does in the second step at the latest, or never
# Of the function that the patch error_classes replaces. Older versions than 2.3 do not have it.
_engine_code = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_constructor_code = DistributedDataParallel.__init__.__code__
# Modules of which torch may note the parameters of each bucket, and how often that was looked at.
_unknown: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[DistributedDataParallel, list[_Parameters]] = weakref.WeakKeyDictionary()


class _Parameters:
    """Has the parameters of one bucket."""

    def __init__(self, named: list[tuple[str, int]]) -> None:
        names = [name for name, _ in named]
        self.elements = sum(count for _, count in named)
        self.text = ", ".join(names if len(names) < 4 else [names[0], f"{len(names) - 2} more", names[-1]])


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.numbers: Iterator[int] = iter(())  # of buckets in this backward()


_of_thread = _OfThread()
_of_engine: Iterator[int] = iter(())  # of the last backward(), in threads that torch's engine has for GPUs


def begin_backward() -> None:
    """Called by each backward() of this thread, by the patch error_classes.

    Not later, when torch holds a lock that its notes need.
    """
    global _of_engine
    _of_thread.numbers = _of_engine = itertools.count()
    for module in list(_unknown):
        looks = _unknown[module] = _unknown[module] + 1
        found = _parameters_in(module)
        if found:
            _known[module] = found
        if found or looks == _MOST_LOOKS:
            del _unknown[module]


def is_called_by_backward(frame: FrameType | None) -> bool:
    """Whether what this frame calls was called by torch's C++ during backward().

    None: no function of Python has called it. Gradients on a GPU are computed in such a thread.
    """
    return frame is None or frame.f_code is _engine_code


class Buckets:
    """Knows the buckets of the modules of one group."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def note(self, frame: FrameType | None) -> None:
        """Remember the module whose constructor has called the function with this frame, if one has."""
        caller = frame.f_back if frame is not None else None
        constructor = caller.f_back if caller is not None else None
        if constructor is not None and constructor.f_code is _constructor_code:
            module = constructor.f_locals["self"]
            self._modules.add(module)
            _unknown[module] = 0

    def detail(self, tensor: torch.Tensor, frame: FrameType | None) -> str:
        """Returns what to add to the title of an all_reduce that backward() has called. frame: of its caller."""
        if not tensor.is_floating_point() and not tensor.is_complex():
            return ""  # which parameters were used
        number = next(_of_engine if frame is None else _of_thread.numbers, None)
        if number is None:  # nothing has told of this backward()
            return ""
        text = f", bucket {number} of DistributedDataParallel"
        for module in self._modules:
            buckets = _known.get(module, [])
            if number < len(buckets) and buckets[number].elements == tensor.numel():
                return f"{text} ({buckets[number].text})"
        return text


def _parameters_in(module: Any) -> list[_Parameters]:
    """Returns the parameters of each bucket, [] if torch has not noted them."""
    noted = module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    ignored = module.parameters_to_ignore
    named = [
        (name, one.numel())
        for name, one in module.module.named_parameters()
        if one.requires_grad and name not in ignored
    ]
    buckets = [[int(place) for place in text.split()] for text in noted.split(",") if text.strip()]
    if any(place >= len(named) for places in buckets for place in places):
        return []
    return [_Parameters([named[place] for place in places]) for places in buckets]
