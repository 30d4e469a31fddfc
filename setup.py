"""Builds ringtrain._core from csrc/ with nothing but a C++17 compiler and nanobind: no MPI, no CUDA, no framework."""

import os
import shutil
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

        def compile_together(sources: list[str], *args: object, **kwargs: object) -> list[str]:
            with ThreadPoolExecutor(workers) as pool:
                objects = pool.map(lambda source: compile_one_by_one([source], *args, **kwargs), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_together
        super().build_extension(ext)


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
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
