"""`ringtrain run|doctor|...`: one command line for all of them."""

import importlib
import subprocess
import sys

import pytest

import ringtrain
from ringtrain.__main__ import COMMANDS, main


@pytest.mark.fast
def test_a_job_is_started_as_by_ringrun():
    words = [
        "run",
        "-np",
        "2",
        "--no-prefix-output",
        "python",
        "-c",
        "import ringtrain as r; r.init(); print(r.size())",
    ]
    done = subprocess.run([sys.executable, "-m", "ringtrain", *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_arguments_and_its_exit_code(name, monkeypatch):
    given = []
    monkeypatch.setattr(importlib.import_module(COMMANDS[name][0]), "main", lambda words: given.append(words) or 7)
    assert main([name, "--flag", "x"]) == 7
    assert given == [["--flag", "x"]]


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)


@pytest.mark.parametrize("words", [[], ["dotcor"]])
def test_no_command_is_refused(words, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("usage: ringtrain COMMAND")


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{ringtrain.__version__}\n"
