"""The worlds as programs: those in C++ are built from core/ and the sources of the product, those in Python imported.

Each tells the stories of a range of seeds in one thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from harness.compiling import filled, folder_of, run_compiler

from simulate.story import Story

_OWN = Path(__file__).resolve().parent / "core"
_TESTS = _OWN.parent.parent
_PRODUCT = _OWN.parent.parent.parent / "csrc"
_PACKAGE = _PRODUCT.parent / "ringtrain"
# The seam is first: its base/clock.h takes the place of the product's.
_FLAGS = ["-std=c++17", "-Wall", "-U_FORTIFY_SOURCE"]
# Most stories are told by code that is worth its time of compilation. Kernels have few elements in a story, and code
# with a bug and former code tell few stories.
_OPTIMISED, _PLAIN = "-O2", "-O0"

# Of each world: its own sources, and those of the product. base/log.cc is the world's own.
_SOURCES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "negotiation": (
        ("main.cc", "fibres.cc", "negotiation.cc"),
        (
            *(f"coordination/{name}.cc" for name in ("coordinator", "ledger", "membership", "messages", "operation")),
            *(f"coordination/{name}.cc" for name in ("gathered", "plan", "plan_cache", "rank_set", "tree_channel")),
            *(f"network/{name}.cc" for name in ("alarm", "endpoint", "network")),
            *(f"base/{name}.cc" for name in ("descriptor", "error", "wait")),
        ),
    ),
    "sockets": (
        ("main.cc", "fibres.cc", "kernel.cc", "sockets.cc"),
        (
            *(f"network/{name}.cc" for name in ("byte_stream", "connector", "dialling", "frame_stream", "handshake")),
            *(f"network/{name}.cc" for name in ("network", "poller", "sealing", "sockets", "tcp")),
            *(f"base/{name}.cc" for name in ("descriptor", "error", "log", "sha256", "wait")),
        ),
    ),
    "store": (
        ("main.cc", "fibres.cc", "store.cc", "store/net.cc"),
        (
            *(f"kvstore/store/{name}.cc" for name in ("actor", "layout", "part")),
            "kvstore/wire/connection.cc",
            *(f"kvstore/server/{name}.cc" for name in ("server", "server_stores", "session")),
            *(f"kvstore/worker/{name}.cc" for name in ("client", "client_store", "direct_path", "remote")),
            *(f"kvstore/worker/{name}.cc" for name in ("remote_server", "store_handle")),
            *(f"kernels/{name}.cc" for name in ("copy", "optimize", "quantize", "reduce", "reduce_scalar")),
            *(f"kernels/{name}.cc" for name in ("reduce_avx2", "reduce_avx512", "reduce_neon")),
            "base/error.cc",
        ),
    ),
}
# Code that the product of earlier commits had in further files: see former.py.
_FORMER: Mapping[str, Sequence[str]] = {
    "negotiation": tuple(
        f"coordination/{name}.cc" for name in ("blobs", "fusion", "mismatch", "node_channel", "ready")
    ),
}
# System calls that the world's own functions take the place of: see core/kernel.h.
_CALLS_OF_SOCKETS = (
    *("accept4", "bind", "close", "connect", "epoll_create1", "epoll_ctl", "epoll_wait", "freeaddrinfo"),
    *("getaddrinfo", "getrandom", "getsockopt", "nanosleep", "open", "ppoll", "readv", "recv", "send", "sendmsg"),
    *("setsockopt", "shutdown", "socket"),
)
_LINKING: Mapping[str, Sequence[str]] = {
    "sockets": [f"-Wl,--wrap={name}" for name in _CALLS_OF_SOCKETS],
    # There is no __wrap_getpid: a file that would ask for the process id of the simulation itself cannot be linked.
    "store": [
        "-Wl,--wrap=getpid",
        *(f"-Wl,--wrap=pthread_mutex_{call}" for call in ("init", "trylock", "consistent", "unlock")),
    ],
}
_PYTHON_WORLDS = ("diloco", "elastic", "scheduler")
NAMES = (*_SOURCES, *_PYTHON_WORLDS)
_PROGRAM = "simulate"
# Stories that the command tells in one process.
SEEDS_AT_A_TIME = 500


class Patch(NamedTuple):
    """A bug to plant: `old`, which the file of csrc/ or of ringtrain/ has once, becomes `new`."""

    file: str
    old: str
    new: str


# A constant is smaller in a world than in the product, so that keys of some elements have several chunks. And fibres
# die where they wait, but processes anywhere: so they wait after each record that says how far a push has come, and in
# some changes of chunks, before they count and after it. One that is killed there does not tidy up.
_IS_FIBRE = "simulation::Fibres::current().is_running()"
_SCALES: Mapping[str, Sequence[Patch]] = {
    "store": (
        Patch("kvstore/store/layout.h", "kChunkBytes = 64 << 10;", "kChunkBytes = 128;"),
        Patch("kvstore/worker/direct_path.cc", "actor->publish();", "actor->publish(), Waiter::nap(0.02);"),
        Patch(
            "kvstore/store/part.cc",
            "void ChunkChange::commit(uint64_t closes) {\n",
            "void ChunkChange::commit(uint64_t closes) {\n"
            f"  if ((chunk_ + part_.record(chunk_).closed.load()) % 4 == 0 && {_IS_FIBRE}) Waiter::nap(0.01);\n",
        ),
        Patch(
            "kvstore/store/part.cc",
            " + closes, std::memory_order_release);\n",
            f" + closes);\n  if ((chunk_ + record.closed.load()) % 4 == 2 && {_IS_FIBRE}) Waiter::nap(0);\n",
        ),
        Patch(
            "kvstore/store/part.cc",
            "  if (!is_open_) return;\n",
            f"  if (!is_open_ || !{_IS_FIBRE}) return;\n",
        ),
    ),
}


class Finding(NamedTuple):
    seed: int
    text: str
    faults: list[str]


class Total(NamedTuple):
    """The sums over the stories of a range of seeds."""

    stories: int
    events: int
    findings: int
    hash: str
    seconds: float


class Program(ABC):
    """A world that can be told."""

    @abstractmethod
    def _lines(self, seeds: range, *words: str) -> Iterator[dict[str, Any]]:
        """Returns the output of core/main.cc for these words."""

    @abstractmethod
    def trace(self, seed: int, without: Sequence[int]) -> None:
        """Print the events of a story."""

    def run(
        self, seeds: range, seconds: float | None = None, without: Sequence[int] = ()
    ) -> tuple[list[Finding], Total]:
        """Tell the stories of these seeds, until the time is over: those with a finding, and what all took."""
        findings, total = [], None
        limit = [] if seconds is None else ["--seconds", str(seconds)]
        for line in self._lines(seeds, "--without", _list(without), *limit):
            if "stories" in line:
                total = Total(**line)
            else:
                findings.append(Finding(line["seed"], line["finding"], line["faults"]))
        if total is None:
            raise RuntimeError(f"the simulation ended early, at a seed from {seeds.start} on")
        return findings, total

    def faults(self, seed: int) -> list[str]:
        """Those that this seed draws, by number."""
        return list(next(self._lines(range(seed, seed + 1), "--faults"))["faults"])

    def needed_faults(self, seed: int) -> list[int]:
        """Few faults, by number, with which the story still has a finding: the others are dropped one by one."""
        count = len(self.faults(seed))
        without: list[int] = []
        for fault in range(count):
            findings, _ = self.run(range(seed, seed + 1), without=[*without, fault])
            if findings:
                without.append(fault)
        return [fault for fault in range(count) if fault not in without]


def program(world: str, patches: Sequence[Patch] = (), product: Path = _PRODUCT, own: Path = _OWN) -> Program:
    """The world of this name, with the bugs that are to be planted in it.

    `product`, `own`: for a world in C++, another csrc/ and another core/.

    Raises DoubleUnavailable where there is no compiler, and RuntimeError with what it says where it fails.
    """
    return _Module(world, patches) if world in _PYTHON_WORLDS else _Compiled(world, patches, product, own)


class _Compiled(Program):
    def __init__(self, world: str, patches: Sequence[Patch], product: Path, own: Path):
        of_world, of_product = _SOURCES[world]
        if product != _PRODUCT:
            of_product = [name for name in (*of_product, *_FORMER.get(world, ())) if (product / name).exists()]
        sources = [*(own / name for name in of_world), *(product / name for name in of_product)]
        headers = sorted([*own.rglob("*.h"), *product.rglob("*.h")])
        flags = [*_FLAGS, f"-I{own / world / 'seam'}", f"-I{own / 'seam'}", f"-I{own}"]
        linking = _LINKING.get(world, ())
        scales = _SCALES.get(world, ())
        correct: Path | None = _Compiled(world, (), product, own)._folder if patches else None
        folder = folder_of(
            f"simulate-{world}", [*flags, *linking, *map(str, (*scales, *patches))], [*sources, *headers]
        )
        build = functools.partial(_build, sources, flags, linking, product, scales, patches, correct)
        self._folder: Path = filled(folder, build)
        self._path = self._folder / _PROGRAM

    def trace(self, seed: int, without: Sequence[int]) -> None:
        words = [str(self._path), str(seed), str(seed + 1), "--trace", "--without", _list(without)]
        subprocess.run(words, check=False)

    def _lines(self, seeds: range, *words: str) -> Iterator[dict[str, Any]]:
        return _lines_of([str(self._path), str(seeds.start), str(seeds.stop), *words])


class _Module(Program):
    """Runs in a process of its own, so that several can run at a time, and as main() of core/main.cc does."""

    def __init__(self, world: str, patches: Sequence[Patch]):
        self._world = world
        self._environment = _environment(_package_with(patches)) if patches else _environment()

    def trace(self, seed: int, without: Sequence[int]) -> None:
        line = self._line(range(seed, seed + 1), "--trace", "--without", _list(without))
        subprocess.run(line, check=False, env=self._environment, cwd=_TESTS)

    def _line(self, seeds: range, *words: str) -> list[str]:
        return [sys.executable, "-m", "simulate.programs", self._world, str(seeds.start), str(seeds.stop), *words]

    def _lines(self, seeds: range, *words: str) -> Iterator[dict[str, Any]]:
        return _lines_of(self._line(seeds, *words), self._environment)


def _lines_of(line: list[str], environment: Mapping[str, str] = os.environ) -> Iterator[dict[str, Any]]:
    done = subprocess.run(line, check=False, stdout=subprocess.PIPE, text=True, env=environment, cwd=_TESTS)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return map(json.loads, done.stdout.splitlines())


def _environment(*first: Path) -> dict[str, str]:
    """The order of sets is part of a story, and must be the same in each telling. `first` is imported from first."""
    path = os.pathsep.join([*map(str, first), str(_TESTS), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _main(world: str, first: str, end: str, *words: str) -> int:
    """As main() of core/main.cc, for a world in Python."""
    _stay_on_one_core(int(first))
    tell: Callable[[int, Sequence[int], bool], Story] = importlib.import_module(f"simulate.{world}").tell
    values = dict(itertools.pairwise(words))
    limit_s = float(values.get("--seconds", "inf"))
    without = [int(number) for number in values.get("--without", "").split(",") if number]
    stories = events = findings = hashes = 0
    begin = time.monotonic()
    for seed in range(int(first), int(end)):
        if time.monotonic() - begin >= limit_s:
            break
        story = tell(seed, without, "--trace" in words)
        stories, events, hashes = stories + 1, events + story.events, hashes ^ story.hash * (2 * seed + 1) % (1 << 64)
        findings += bool(story.finding)
        if "--trace" not in words and (story.finding or "--faults" in words):
            print(json.dumps({"seed": seed, "finding": story.finding, "faults": story.faults}))
    if "--trace" not in words:
        print(json.dumps(Total(stories, events, findings, f"{hashes:016x}", time.monotonic() - begin)._asdict()))
    return int(findings > 0)


def _stay_on_one_core(first: int) -> None:
    """Threads that run in turn wake each other faster there. Ranges that are told at the same time have other cores.

    In a batch a thread that is woken does not stop the one that wakes it, which still has the GIL.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[first // SEEDS_AT_A_TIME % len(cores)]})
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _build(
    sources: Sequence[Path],
    flags: Sequence[str],
    linking: Sequence[str],
    product: Path,
    scales: Sequence[Patch],
    bugs: Sequence[Patch],
    correct: Path | None,
    folder: Path,
) -> None:
    """`correct`: the folder of the program without `bugs`, whose objects serve where no bug is in them."""
    # Quotes look beside the including file first, so patched files have the folder of the product after their own.
    patched = patched_folders(product, [*scales, *bugs])
    including = [*flags, *(f"-I{own}" for own in patched.values()), f"-I{product}"]

    def compile_one(source: Path) -> str:
        name = str(source.relative_to(product)) if source.is_relative_to(product) else ""
        object_name = f"{source.parent.name}-{source.stem}.o"
        if correct is not None and not _is_made_of(correct / object_name, [bug.file for bug in bugs]):
            return str(correct / object_name)
        is_plain = correct is not None or product != _PRODUCT or name.startswith("kernels/")
        words = [_PLAIN if is_plain else _OPTIMISED, *including, "-MMD"]
        compiled = str(folder / object_name)
        run_compiler([*words, "-c", str(patched[name] / name if name in patched else source), "-o", compiled])
        return compiled

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources))
    run_compiler([*objects, *linking, "-o", str(folder / _PROGRAM)])


def _is_made_of(compiled: Path, names: Sequence[str]) -> bool:
    """Whether one of these files of the product is the source of this object, or included there."""
    files = compiled.with_suffix(".d").read_text().split()
    return any(file.endswith(f"/{name}") for file in files for name in names)


def patched_folders(product: Path, patches: Sequence[Patch]) -> Mapping[str, Path]:
    """Writes the files with their patches. Returns for each of them a folder that stands for the product's.

    A file with the same text has the same folder in all programs, so that ccache knows what includes it.
    """
    texts = _texts_with(product, patches)

    def write(name: str, folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(texts[name])

    return {
        name: filled(folder_of("patched", [name, text], []), functools.partial(write, name))
        for name, text in texts.items()
    }


def _package_with(patches: Sequence[Patch]) -> Path:
    """Returns a folder with ringtrain/ whose files are links, except those with patches."""
    texts = _texts_with(_PACKAGE, patches)

    def link(folder: Path) -> None:
        package = folder / _PACKAGE.name
        shutil.copytree(_PACKAGE, package, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in texts.items():
            (package / name).unlink()
            (package / name).write_text(text)

    words = [str(_PACKAGE), *map(str, texts.items())]
    return filled(folder_of("patched-package", words, sorted(_PACKAGE.rglob("*.py"))), link)


def _texts_with(product: Path, patches: Sequence[Patch]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for patch in patches:
        text = texts.get(patch.file) or (product / patch.file).read_text()
        if text.count(patch.old) != 1:
            raise RuntimeError(f"{patch.file} does not have once: {patch.old}")
        texts[patch.file] = text.replace(patch.old, patch.new)
    return texts


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
