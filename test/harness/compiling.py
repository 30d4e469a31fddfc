"""Libraries that tests need, compiled once for all processes of this user."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORE = Path(__file__).resolve().parent.parent.parent / "csrc"
# The parts of the core that a store needs: folders, shared memory, and the timeline, which knows operations of ranks.
_FOLDERS_OF_STORES = ("base", "kernels", "network", "gpu", "record", "kvstore")
_FILES_OF_STORES = (
    "memory/shm.cc",
    "coordination/operation.cc",
)
_CHECKED = ("-std=c++17", "-O1", "-g1", "-pthread", "-ffp-contract=off")
# The flags of all programs with a sanitizer: ccache has what one of them has compiled for the next one.
SANITIZED = {
    "address": (*_CHECKED, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=vptr"),
    "thread": (*_CHECKED, "-fsanitize=thread"),
}


class DoubleUnavailable(Exception):
    """A double cannot be built; the message says why."""


def folder_of(what: str, flags: Sequence[str], sources: Iterable[Path]) -> Path:
    """For what is made of these; its name holds a digest of them."""
    digest = hashlib.sha256(repr([_compiler(), list(flags)]).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return Path(tempfile.gettempdir()) / f"ringtrain-{what}-{os.getuid()}" / digest.hexdigest()[:16]


def filled(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Returns `folder`, filled by the process that comes first."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            fill(unfinished)
            unfinished.rename(folder)
    return folder


def program(what: str, flags: Sequence[str], sources: Sequence[Path], headers: Iterable[Path]) -> Path:
    """A program made of these; `flags` are for compiling and linking. Raises as run_compiler()."""

    def build(folder: Path) -> None:
        objects = [str(folder / f"{path.parent.name}-{path.stem}.o") for path in sources]
        lines = [[*flags, "-c", str(path), "-o", out] for path, out in zip(sources, objects, strict=True)]
        # One program after the other, on all cores: ccache has then what the one before has compiled.
        with open(folder.parent.parent / f"ringtrain-programs-{os.getuid()}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(run_compiler, lines))
        run_compiler([*flags, *objects, "-ldl", "-o", str(folder / what)])

    return filled(folder_of(what, flags, [*sources, *sorted(headers)]), build) / what


def run_compiler(arguments: Sequence[str]) -> None:
    """Raises DoubleUnavailable where there is none, and RuntimeError with what it says where it fails."""
    program = _compiler().split()
    if shutil.which(program[0]) is None:
        raise DoubleUnavailable(f"doubles of libraries need a compiler, and there is no {_compiler()}")
    line = [*program, *arguments]
    ended = subprocess.run(line, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(line)}:\n{ended.stderr}")


def store_program(source: Path, sanitizer: str) -> Path:
    """A program in C++ with all that a store needs, built with one of SANITIZED. Raises as `run_compiler`."""
    flags = [*SANITIZED[sanitizer], f"-I{CORE}"]
    of_core = [path for folder in _FOLDERS_OF_STORES for path in sorted((CORE / folder).rglob("*.cc"))]
    sources = [source, *of_core, *(CORE / name for name in _FILES_OF_STORES)]
    return program(source.parent.name.replace("_", ""), flags, sources, CORE.rglob("*.h"))


def _compiler() -> str:
    """Its words. ccache knows most files after a change, which gives all of them another folder."""
    own = os.environ.get("CXX") or shutil.which("g++") or "c++"
    return own if shutil.which("ccache") is None or "ccache" in own else f"ccache {own}"
