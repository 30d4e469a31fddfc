"""A group as torch 2.14 and newer see it: hooks around its operations, and a Backend for each device.

torch's own groups pass each operation by the hooks to the Backend of the tensors' device, in C++, which takes longer
than a small all_reduce does. So a group of ringtrain is called directly, as in older versions, until something hooks
itself in: from then on its operations go that way, by a group of torch's with the same Backend.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

# Whether groups of this torch have hooks, and Backends may be classes of Python.
HAS_HOOKS = hasattr(c10d, "PreHookArgs")

_OPERATIONS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)
# Methods of a Backend that are those of its group.
_FORWARDED = (
    *("rank", "size", "getBackendName", "set_timeout", "eager_connect_single_device", "perform_nocolor_split"),
    *("shutdown", "abort", "get_error", "get_reconfigure_handle", "reconfigure"),
    *("register_abort_hook", "unregister_abort_hook"),
)
_Base: Any = c10d.Backend if HAS_HOOKS else object


DEVICES = ["cpu", "cuda"] if torch.version.cuda is not None else ["cpu"]


class Backend(_Base):  # type: ignore[misc]
    """The operations of a group as torch calls them for tensors of one device, when it has called the hooks."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        self._operations = type(group)  # also while the group has hooks

    supports_coalescing = False
    supports_splitting = True
    supports_time_estimate = False

    @property
    def supports_reconfigure(self) -> bool:
        return bool(self._group.supports_reconfigure)

    @property
    def options(self) -> Any:
        return self._group.options

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self._group.monitored_barrier(opts.timeout, wait_all_ranks)


class Hookable:
    """Methods that groups have from torch 2.14 on."""

    if HAS_HOOKS:
        supports_reconfigure = False

        def get_error(self) -> Any:
            """Returns torch's ErrorType of the group: an abort() is none."""
            return c10d.ErrorType.SUCCESS

        def get_reconfigure_handle(self) -> str:
            """Refused: see ReconfigurableGroup."""
            raise RuntimeError("this group keeps its ranks: give enable_reconfigure=True to init_process_group()")

        def reconfigure(self, opts: Any) -> Any:
            """Refused: see ReconfigurableGroup."""
            raise RuntimeError("this group keeps its ranks: give enable_reconfigure=True to init_process_group()")

        @functools.cached_property
        def _backend(self) -> Backend:
            return Backend(self)

        @functools.cached_property
        def _hooked(self) -> Any:
            """A group of torch's, which calls hooks and then the Backend."""
            group: Any = self
            kind = dist.ProcessGroup.BackendType.CUSTOM
            hooked: Any = dist.ProcessGroup(group.get_group_store(), group.rank(), group.size())
            for device in DEVICES:
                hooked._register_backend(torch.device(device), kind, group._backend)
            hooked._set_default_backend(kind)
            hooked._set_group_name(group.group_name)
            hooked._set_group_desc(group.group_desc)
            return hooked

        def get_backend(self, device: torch.device) -> Backend:
            if torch.device(device).type not in DEVICES:
                raise RuntimeError(f"ringtrain's groups are for tensors on {' and '.join(DEVICES)}, not on {device}")
            return self._backend

        def with_hooks(self) -> Any:
            """Returns the group of torch's that has the hooks of this one, by which all operations go from now on."""
            hooked = self._hooked
            kind: Any = self._backend._operations
            self.__class__ = _with_hooks(kind)
            return hooked

        def _forget_hooks(self) -> None:
            """The group has ended: what it and its Backend keep of each other goes."""
            self.__class__ = self.__dict__.pop("_backend")._operations if "_backend" in self.__dict__ else type(self)
            self.__dict__.pop("_hooked", None)

        @functools.cached_property
        def _hook_ids(self) -> set[tuple[str, int]]:
            return set()

        def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
            """Has the hook called before each operation, with torch's PreHookArgs."""
            self.with_hooks().register_pre_hook(hook_id, hook)
            self._hook_ids.add(("pre", hook_id))

        def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
            """Has the hook called after each operation has begun, with torch's PostHookArgs."""
            self.with_hooks().register_post_hook(hook_id, hook)
            self._hook_ids.add(("post", hook_id))

        def unregister_pre_hook(self, hook_id: int) -> None:
            """Without hooks the group is called directly again."""
            self._hooked.unregister_pre_hook(hook_id)
            self._note_end_of("pre", hook_id)

        def unregister_post_hook(self, hook_id: int) -> None:
            """Without hooks the group is called directly again."""
            self._hooked.unregister_post_hook(hook_id)
            self._note_end_of("post", hook_id)

        def _note_end_of(self, when: str, hook_id: int) -> None:
            self._hook_ids.discard((when, hook_id))
            if not self._hook_ids:
                self.__class__ = self._backend._operations

        @functools.cached_property
        def _abort_hooks(self) -> dict[int, Callable[[], None]]:
            return {}

        def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
            """Has the hook called when the group is aborted, before that."""
            self._abort_hooks[hook_id] = hook

        def unregister_abort_hook(self, hook_id: int) -> None:
            self._abort_hooks.pop(hook_id, None)

        def _call_abort_hooks(self) -> None:
            for hook in list(self._abort_hooks.values()):
                hook()

    else:

        def _call_abort_hooks(self) -> None:
            """There are none."""

        def _forget_hooks(self) -> None:
            """There are none."""


class _Begun(threading.local):
    """The Works that this thread's call by way of hooks has begun; None outside of such a call."""

    works: list[Any] | None = None


_begun = _Begun()


def _of_group(name: str) -> Callable[..., Any]:
    def call(backend: Backend, *given: Any, **named: Any) -> Any:
        work = getattr(backend._operations, name)(backend._group, *given, **named)
        if _begun.works is not None:
            _begun.works.append(work)
        return work

    return call


def _by_hooks(name: str) -> Callable[..., Any]:
    def call(group: Any, *given: Any, **named: Any) -> Any:
        outer, _begun.works = _begun.works, []
        try:
            of_torch = getattr(group._hooked, name)(*given, **named)
            return _begun.works[-1] if _begun.works else of_torch  # torch's has fewer methods, and other errors
        finally:
            _begun.works = outer

    return call


def asking(frame: FrameType | None) -> FrameType | None:
    """Returns the frame that called an operation: `frame` called the group, perhaps by way of hooks."""
    while frame is not None and frame.f_code.co_name == "call" and frame.f_globals is globals():
        frame = frame.f_back
    return frame


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda backend, *given, **named: getattr(backend._group, name)(*given, **named)


for _name in _OPERATIONS:
    setattr(Backend, _name, _of_group(_name))
for _name in _FORWARDED:
    setattr(Backend, _name, _forwarded(_name))


@functools.cache
def _with_hooks(kind: Any) -> Any:
    """Returns the class that a group of this class takes when it gets a hook."""
    return type(kind.__name__, (kind,), {name: _by_hooks(name) for name in _OPERATIONS})
