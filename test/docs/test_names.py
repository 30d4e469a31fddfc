"""Names in pages, docstrings and comments exist: modules, attributes, files, targets of make, variables and flags."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from harness import names
from harness.rooms import TEST_FOLDER

import ringtrain as hvd
from ringtrain.options.table import TABLE
from ringtrain.runner import check

ROOT = TEST_FOLDER.parent


@pytest.mark.alike
def test_every_name_in_backticks_exists() -> None:
    options = [option.name for option in TABLE]
    assert names.gone(ROOT, options) == []


@pytest.mark.alike
def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    for folder in ("ringtrain/runner", "csrc/base", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("dist/\n")
    (tmp_path / "Makefile").write_text("demo:\n")
    (tmp_path / "ringtrain" / "__init__.py").write_text("from ringtrain.runner.job import Job\n")
    module = tmp_path / "ringtrain" / "runner" / "job.py"
    module.write_text(
        'class Job:\n    """As `Job.start` in other.py."""\n\n    ranks = 1\n    # `ringtrain.runner.jobs`\n'
    )
    (tmp_path / "csrc" / "base" / "wait.h").write_text("// See Waiter::nap and `old_name`.\nclass Waiter {};\n")
    good = "`make demo` `hvd.Job` `Job.ranks` `runner/job.py` `dist/` `torch.Tensor` `--cache-capacity`"
    bad = "`make install` `hvd.Task` `runner/task.py` `--cache-size` `RINGTRAIN_CACHE_SIZE` `find_tasks()`"
    (tmp_path / "docs" / "faq.md").write_text(f"{good}\n{bad}\n")
    found = names.gone(tmp_path, ["cache_capacity"])
    of_page = [one.partition(": ")[2] for one in found if one.startswith("docs/faq.md:2: ")]
    assert " ".join(f"`{name}`" for name in of_page) == bad
    assert [one for one in found if not one.startswith("docs/")] == [
        "ringtrain/runner/job.py:2: Job.start",
        "ringtrain/runner/job.py:2: other.py",
        "ringtrain/runner/job.py:5: ringtrain.runner.jobs",
        "csrc/base/wait.h:1: old_name",
        "csrc/base/wait.h:1: Waiter::nap",
    ]


def test_every_module_that_the_package_offers_exists() -> None:
    for name in hvd._MODULES:
        assert getattr(hvd, name) is importlib.import_module(f"ringtrain.{name}")


@pytest.mark.parametrize("name", ["compression", "handles", "objects", "process_sets", "nothing"])
def test_the_package_has_no_module_that_has_moved(name: str) -> None:
    assert not hasattr(hvd, name)


def test_check_build_asks_which_frameworks_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in ("torch", "mxnet"):
        monkeypatch.setattr(check, "find_spec", lambda package, there=there: package == there or None)
        report = check.build_report()
        assert ("[X] PyTorch" in report) == (there == "torch") and ("[X] MXNet" in report) == (there == "mxnet")
        assert "[ ] TensorFlow" in report
