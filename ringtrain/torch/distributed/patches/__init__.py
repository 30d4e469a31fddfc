"""All that the backend replaces of PyTorch itself: one module each, which says why.

A patch that the user leaves out by RINGTRAIN_TORCH_WITHOUT=name,name, or that is for other versions of PyTorch, leaves
PyTorch as it was. Before the backend is loaded, offer_torch_backend() (ringtrain/runner/installed.py) has registered
it, and under RINGTRAIN_AS_GLOO a class that stands for that of gloo until there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ringtrain.runner import installed
from ringtrain.torch.distributed.patches import (
    builtin_hooks,
    error_classes,
    gloo,
    hooks,
    kept_works,
    monitored_barrier,
    set_timeout,
    shared_buckets,
)


class Patch(NamedTuple):
    """One of them: for the versions of PyTorch from `first` to the last one before `end`."""

    name: str
    first: tuple[int, int]
    end: tuple[float, float]
    replace: Callable[[], None]

    def is_for(self, version: str) -> bool:
        """Whether it is for this PyTorch, such as "2.13.0+cpu". Those under development count as released."""
        major, minor = version.split(".")[:2]
        return self.first <= (int(major), int(minor)) < self.end


_NO_END = (math.inf, 0)

PATCHES = (
    Patch("error_classes", (2, 3), _NO_END, error_classes.restore_classes),
    Patch("kept_works", (2, 1), _NO_END, kept_works.keep_works),
    Patch("builtin_hooks", (2, 1), _NO_END, builtin_hooks.take_hooks_of_python),
    Patch("shared_buckets", (2, 1), _NO_END, shared_buckets.share_buckets),
    Patch("monitored_barrier", (2, 1), (2, 14), monitored_barrier.take_groups_of_ringtrain),
    Patch("set_timeout", (2, 3), (2, 14), set_timeout.take_groups_of_ringtrain),
    Patch("hooks", (2, 14), _NO_END, hooks.attach_to_groups),
    Patch("gloo", (2, 1), _NO_END, gloo.replace_if_asked),
)


def apply() -> None:
    """Called once, when the backend is imported.

    Raises:
        ValueError: the user leaves out a name that no patch has.
    """
    left_out = installed.patches_left_out()
    unknown = left_out - {patch.name for patch in PATCHES}
    if unknown:
        raise ValueError(
            f"{installed.WITHOUT_VARIABLE} has {', '.join(map(repr, sorted(unknown)))}, which is not a patch; the "
            f"patches are {', '.join(patch.name for patch in PATCHES)}"
        )
    for patch in PATCHES:
        if patch.name not in left_out and patch.is_for(torch.__version__):
            patch.replace()
