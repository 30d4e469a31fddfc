"""Builds ringtrain._core from csrc/ with nothing but a C++17 compiler and nanobind: no MPI, no CUDA, no framework."""

import contextlib
import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NANOBIND = Path(nanobind.include_dir()).parent
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-Wall",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same bits on every CPU
    "-fno-math-errno",  # a square root is one instruction, for several numbers at once
    "-fno-strict-aliasing",
    "-DNB_COMPACT_ASSERTIONS",
]
# From 3.12 on one file is for all versions of Python: nanobind then keeps to the interface that stays. A Python without
# the GIL has none.
STAYS = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
# nanobind counts on Python.h for this header, which does not include it for that interface.
FLAGS_OF_NANOBIND = ["-include", "cstdio"] if STAYS else []
LINES_OF_PROGRESS = 8


class BuildExt(build_ext):
    """Compiles the sources side by side; setuptools would take one after the other."""

    def build_extension(self, ext: Extension) -> None:
        # Whatever is installed from one checkout, an environment for each MPI or a wheel, has the same binary.
        built = ROOT / self.get_ext_filename(ext.name)
        if is_newer(built, [*own_sources(), *ext.depends, "setup.py"]):
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, target)
            return
        compile_one_by_one = self.compiler.compile
        workers = len(os.sched_getaffinity(0))

        def compile_one(source: str, extra_postargs: list[str], **kwargs: object) -> list[str]:
            more = FLAGS_OF_NANOBIND if source.startswith(("csrc/python/", "/")) else []
            return compile_one_by_one([source], extra_postargs=[*extra_postargs, *more], **kwargs)

        def compile_together(sources: list[str], **kwargs: object) -> list[str]:
            objects: list[str] = []
            with ThreadPoolExecutor(workers) as pool:
                compiled = pool.map(lambda source: compile_one(source, **kwargs), sources)
                for number, names in enumerate(compiled, start=1):
                    objects += names
                    if number * LINES_OF_PROGRESS // len(sources) > (number - 1) * LINES_OF_PROGRESS // len(sources):
                        say(f"compiled {number} of {len(sources)} files")
            return objects

        self.compiler.compile = compile_together
        super().build_extension(ext)


def say(text: str) -> None:
    """Writes to the file that a variable names, since pip shows nothing of a build."""
    path = os.environ.get("RINGTRAIN_BUILD_PROGRESS")
    if path is not None:
        with contextlib.suppress(OSError), open(path, "a") as file:
            print(text, file=file)


def is_newer(built: Path, sources: list[str]) -> bool:
    return built.exists() and all(built.stat().st_mtime > (ROOT / source).stat().st_mtime for source in sources)


def own_sources() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cc"))


setup(
    ext_modules=[
        Extension(
            "ringtrain._core",
            sources=[*own_sources(), str(NANOBIND / "src" / "nb_combined.cpp")],
            depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")],
            include_dirs=["csrc", str(NANOBIND / "include"), str(NANOBIND / "ext" / "robin_map" / "include")],
            extra_compile_args=FLAGS,
            extra_link_args=["-Wl,-s"],
            libraries=["dl", "pthread", "rt"],
            define_macros=[("Py_LIMITED_API", "0x030C0000")] if STAYS else [],
            py_limited_api=STAYS,
        )
    ],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STAYS else {},
)
