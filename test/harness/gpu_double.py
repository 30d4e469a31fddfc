"""Doubles of the CUDA driver and of NCCL for the tests: built from test/gpu/double/, found through LD_LIBRARY_PATH.

    @pytest.mark.ranks(2, env=gpu_double.environment(gpus=2, delay_us=500))
    def test_...():
        assert gpu_double.control().count("streams") == 1

test/gpu/double/settings.h describes their environment variables.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.compiling import filled, folder_of, run_compiler
from harness.rooms import TEST_FOLDER

_SOURCES = TEST_FOLDER / "gpu" / "double"
_FLAGS = ["-std=c++17", "-O1", "-fwrapv", "-ffp-contract=off", "-Wall", "-Wextra", "-fPIC", "-pthread"]
# nodelete: threads of streams may run when the last user of a library has closed it
_LINK = ["-shared", "-pthread", "-Wl,-z,nodelete", "-Wl,--no-undefined"]
_DRIVER, _NCCL = "libcuda.so.1", "libnccl.so.2"
_OF_NCCL = ("reduce", "segment", "communicator", "collective", "transfers", "group")  # and nccl_*
_PREFIX = "RINGTRAIN_GPU_DOUBLE_"
_LEFT_OUT = _PREFIX + "LEFT_OUT"
_SETTINGS = {
    *(
        "gpus",
        "slices",
        "memory",
        "driver_version",
        "nccl_version",
        "delay_us",
        "guard",
        "join_timeout_s",
        "handshake",
        "destroy_us",
        "fail",
    )
}


def environment(*, left_out: Sequence[str] = (), **settings: object) -> dict[str, str]:
    """The variables with which a process finds the doubles. Nothing is built yet: see `prepare`.

    Args:
        left_out: symbols that the libraries lack, as those of an old driver do.
        settings: the variables of test/gpu/double/settings.h, as in `gpus=2`.

    Raises ValueError for a setting that there is not.
    """
    unknown = settings.keys() - _SETTINGS
    if unknown:
        raise ValueError(f"no setting of the doubles: {', '.join(sorted(unknown))}")
    folder = _folder(left_out)
    others = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path not in ("", str(folder))]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), *others]),
        _LEFT_OUT: ",".join(sorted(left_out)),
        **{_PREFIX + name.upper(): str(value) for name, value in settings.items()},
    }


def is_used() -> bool:
    """Whether this process was started in such an environment."""
    return _LEFT_OUT in os.environ


def prepare(variables: Mapping[str, str]) -> None:
    """Build the doubles where `variables`, made by `environment`, want them. Other variables want nothing.

    Raises DoubleUnavailable where there is no compiler.
    """
    if _LEFT_OUT in variables:
        build([name for name in variables[_LEFT_OUT].split(",") if name])


def build(left_out: Sequence[str] = ()) -> Path:
    """The folder of both libraries, built once for all processes of this user.

    Raises DoubleUnavailable where there is no compiler, and RuntimeError with what it says where it fails.
    """
    objects = filled(_folder_of_objects(), _compile_all)
    return filled(_folder(left_out), functools.partial(_link_both, objects, left_out))


class Control:
    """Controls the fakes in the process of a test. Streams and communicators are handles."""

    def __init__(self) -> None:
        self._driver, self._nccl = ctypes.CDLL(_DRIVER), ctypes.CDLL(_NCCL)
        self._driver.gpu_double_count.restype = ctypes.c_longlong
        self._nccl.gpu_double_nccl_count.restype = ctypes.c_longlong
        self._driver.gpu_double_host_view.restype = ctypes.c_void_p

    def count(self, what: str) -> int:
        """How many there are: contexts, streams, events, allocations, device bytes, pinned bytes, most pinned bytes
        (at one time), communicators, registrations, nccl allocations."""
        name = what.encode()
        found = max(self._driver.gpu_double_count(name), self._nccl.gpu_double_nccl_count(name))
        if found < 0:
            raise ValueError(f'"{what}" is not counted')
        return int(found)

    def mark_capturing(self, stream: int, is_capturing: bool) -> None:
        """Of the current context. The double makes no graphs: such a stream refuses all work.

        Meanwhile calls that CUDA calls unsafe are refused, too, as during a capture in the mode "global".
        """
        _require_success(self._driver.gpu_double_mark_capturing(ctypes.c_void_p(stream), int(is_capturing)))

    def set_delay_us(self, delay_us: int) -> None:
        """Before each piece of work on a stream, from now on."""
        self._driver.gpu_double_set_delay_us(ctypes.c_long(delay_us))

    def set_log(self, folder: str | os.PathLike[str]) -> None:
        """Calls are appended to the file <pid> there, from now on; an empty name ends it."""
        self._driver.gpu_double_set_log(os.fspath(folder).encode())

    def set_failures(self, plan: str) -> None:
        """As RINGTRAIN_GPU_DOUBLE_FAIL; calls are counted from now on. An empty plan ends it."""
        self._driver.gpu_double_set_failures(plan.encode())

    def host_view(self, address: int, size: int) -> int:
        """Where the host finds so many bytes of device memory, also if it is guarded. ValueError if it is none."""
        found = self._driver.gpu_double_host_view(ctypes.c_ulonglong(address), ctypes.c_size_t(size))
        if found is None:
            raise ValueError(f"{size} bytes at {address:#x} are no device memory")
        return int(found)


@functools.cache
def control() -> Control:
    """Of the doubles in this process, which runs in `environment`."""
    return Control()


def _require_success(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the double answers {code}")


def _folder_of_objects() -> Path:
    """Its name holds a digest of all that they are made of."""
    return folder_of("gpu-double", _FLAGS, sorted(_SOURCES.glob("*.*")))


def _folder(left_out: Sequence[str]) -> Path:
    objects = _folder_of_objects()
    digest = hashlib.sha256(repr([_LINK, sorted(left_out)]).encode())
    return objects.with_name(f"{objects.name}-{digest.hexdigest()[:8]}")


def _compile_all(folder: Path) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(functools.partial(_compile, folder), sorted(_SOURCES.glob("*.cc"))))


def _compile(folder: Path, source: Path) -> None:
    run_compiler([*_FLAGS, "-c", str(source), "-o", str(folder / f"{source.stem}.o")])


def _link_both(objects: Path, left_out: Sequence[str], folder: Path) -> None:
    hidden = f" local: {' '.join(f'{name};' for name in left_out)}" if left_out else ""
    (folder / "symbols").write_text(f"{{ global: *;{hidden} }};\n")
    every = sorted(objects.glob("*.o"))
    of_nccl = [path for path in every if path.stem.startswith("nccl_") or path.stem in _OF_NCCL]
    _link(folder / _DRIVER, [path for path in every if path not in of_nccl])
    _link(folder / _NCCL, [*of_nccl, folder / _DRIVER])


def _link(library: Path, objects: Sequence[Path]) -> None:
    own = [f"-Wl,-soname,{library.name}", f"-Wl,--version-script={library.parent / 'symbols'}"]
    run_compiler([*_LINK, *own, *map(str, objects), "-lrt", "-o", str(library)])
