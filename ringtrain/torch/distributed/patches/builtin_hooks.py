"""The builtin hook FP16_COMPRESS of DistributedDataParallel, by torch's hook of Python that computes the same.

Replaces `DistributedDataParallel._register_builtin_comm_hook`. The hook of C++ takes the value of a Future for a list
of C++. Futures that Python completes have values of Python, so without this patch backward() fails.

Since PyTorch 2.1, the oldest that ringtrain takes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ringtrain.torch.distributed.group import ProcessGroup


def take_hooks_of_python() -> None:
    """Replaces the method, for modules whose group is one of ringtrain's."""
    kind: Any = DistributedDataParallel
    register = kind._register_builtin_comm_hook

    @functools.wraps(register)
    def register_of_python(module: Any, comm_hook_type: dist.BuiltinCommHookType) -> None:
        group = module.process_group
        if comm_hook_type != dist.BuiltinCommHookType.FP16_COMPRESS or not isinstance(group, ProcessGroup):
            register(module, comm_hook_type)
            return
        module.logger._set_comm_hook_name(str(comm_hook_type))
        dist._register_comm_hook(module.reducer, group, fp16_compress_hook)

    kind._register_builtin_comm_hook = register_of_python
