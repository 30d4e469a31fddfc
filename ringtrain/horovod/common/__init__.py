"""`horovod.common`: the parts that the frameworks of Horovod share, and that libraries import from there.

Here are all modules of `horovod.common` that ringtrain has, but `process_sets`: `finder` finds this one under each of
their names.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ringtrain import ops
from ringtrain._core import ReduceOp
from ringtrain.elastic import ObjectState as ObjectState, State as State, run_fn as run_fn
from ringtrain.errors import (
    HorovodInternalError as HorovodInternalError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
)
from ringtrain.job import session
from ringtrain.job.engine_process import with_variables
from ringtrain.timeline import recording
from ringtrain.training.optimizer import split_evenly

# --- `horovod.common.basics`: the calls about the job as methods of one object, as libraries have it ------------------


class HorovodBasics:
    """The names of `hvd` for the job and the reductions.

    Args:
        pkg_path, args: which library to load, in Horovod. There is one only, so they do not matter.
    """

    Average, Sum, Adasum = ops.Average, ops.Sum, ops.Adasum
    Min, Max, Product = ops.Min, ops.Max, ops.Product

    start_timeline = staticmethod(recording.start_timeline)
    stop_timeline = staticmethod(recording.stop_timeline)

    def __init__(self, pkg_path: str = "", *args: Any):
        pass


_NAMES_OF_HVD = (
    "is_initialized init shutdown size local_size cross_size rank local_rank cross_rank is_homogeneous"
    " mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built"
    " cuda_built rocm_built"
)
for _name in _NAMES_OF_HVD.split():
    setattr(HorovodBasics, _name, staticmethod(getattr(session, _name)))


# --- `horovod.common.elastic`: what a state is, and how a function of it is run again ---------------------------------


# --- `horovod.common.exceptions`: what to catch -----------------------------------------------------------------------


class HorovodVersionMismatchError(ImportError):
    """A framework of another version than Horovod was built for. Never raised: ringtrain is built for none."""

    def __init__(self, name: str, version: str, installed_version: str):
        super().__init__(f"{name} {version}, but Horovod was built for {installed_version}", name=name)
        self.version = version
        self.installed_version = installed_version


# --- `horovod.common.util`: what there is, and small help that libraries take from there ------------------------------


T = TypeVar("T")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
_THERE = ("torch", "mxnet")


def _cache(f: Callable[..., T]) -> Callable[..., T]:
    """A function that calls `f` once for each set of arguments."""
    results: dict[tuple[Any, ...], T] = {}

    @functools.wraps(f)
    def cached(*args: Any, **kwargs: Any) -> T:
        key = (args, frozenset(kwargs.items()))
        if key not in results:
            results[key] = f(*args, **kwargs)
        return results[key]

    return cached


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether `horovod.<ext_base_name>` can be imported: "torch" or "mxnet", where that is installed."""
    return ext_base_name in _THERE and importlib.util.find_spec(ext_base_name) is not None


def get_ext_suffix() -> str:
    """How the names of C extensions of this Python end."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where an extension named by the last of `args` would be, in folders before it, beside the file `pkg_path`."""
    *folders, name = args
    return os.path.join(os.path.dirname(pkg_path), *folders, name + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError where `extension_available` is false of `ext_name`, such as "horovod.torch"."""
    framework = ext_name.removeprefix("horovod.")
    if not extension_available(framework):
        raise ImportError(f"{ext_name} is not there: ringtrain has {', '.join(_THERE)}, if it is installed")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a GPU for the framework."""
    return extension_available(ext_base_name) and session.cuda_built()


def _whether(built: Callable[[], T]) -> Callable[..., T]:
    """Returns a call of `hvd` with the argument that it has in `horovod.common.util`."""
    return lambda verbose=False: built()


mpi_built, gloo_built = _whether(session.mpi_built), _whether(session.gloo_built)
nccl_built, ddl_built = _whether(session.nccl_built), _whether(session.ddl_built)
ccl_built = _whether(session.ccl_built)


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """A context in which these environment variables are set; those that are None stay as they are."""
    return with_variables({name: value for name, value in kwargs.items() if value is not None})


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """A function of `op` and `average`, the older spelling of it, that returns the op of `reduce_ops` that is meant."""

    def choose(op: ReduceOp | None, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op is not None:
            return op
        if average is not None:
            warnings.warn("`average` is the older spelling of `op`", DeprecationWarning, stacklevel=2)
        return reduce_ops.Sum if average is False else reduce_ops.Average

    return choose


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether it is 1, 2, 4, 8 and so on. Adasum takes any number of ranks here."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741
    """A list in n parts whose lengths differ by at most 1, the longer ones first."""
    return split_evenly(l, n)


def is_iterable(x: Any) -> bool:
    """Whether iter(x) works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Nothing: Horovod compares the framework with the one that it was built against, and there is none here."""


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether one version is not older than another, "major.minor.patch". Needs the package `packaging`.

    Raises:
        ValueError: one of them is not a string, or `target` has not three parts.
    """
    from packaging.version import parse

    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions must be strings, not {ver!r} and {target!r}")
    if target.count(".") != 2:
        raise ValueError(f"the target must be major.minor.patch, not {target}")
    return bool(parse(ver) >= parse(target))
