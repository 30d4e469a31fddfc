"""Hosts whose start-up files print where a remote shell starts: what the agents report is found behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.ringrun_job import TIMEOUT_S

SUM = """
import numpy, ringtrain as hvd
hvd.init()
print("sum", hvd.allreduce(numpy.ones(3), op=hvd.Sum)[0])
"""
STORE = """
import numpy, ringtrain.kvstore as kvstore
store = kvstore.create("dist_sync")
store.init("key", numpy.ones(3))
print("sum", 2 * store.pull("key")[0])
"""
# Without the end of a line, with the bytes that reports and frames of wrappers begin with, and not UTF-8.
WELCOME = r'Last login: today \037{"\036\0370s\377 '


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """ssh runs its command here, after such a start-up file."""
    (agent := tmp_path / "as_ssh").write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done; shift\nprintf \'{WELCOME}\'\nexec sh -c "$*"\n'
    )
    agent.chmod(0o755)
    return {**os.environ, "RINGTRAIN_SSH_AGENT": str(agent)}


@pytest.mark.parametrize(
    "words",
    [
        ["ringtrain.run", "-np", "2", "-H", "elsewhere:2", "--network", "sockets", "python", "-c", SUM],
        ["ringtrain.run", "-np", "2", "--min-np", "1", "-H", "elsewhere:2", "python", "-c", SUM],
        ["ringtrain.launch", "-n", "1", "-s", "1", "-H", "{hostfile}", "python", "-c", STORE],
        ["ringtrain.run", "--check", "-np", "2", "-H", "elsewhere,localhost", "--network", "sockets"],
    ],
    ids=["ringrun", "elastic", "ringlaunch", "check"],
)
def test_text_without_the_end_of_a_line_does_no_harm(
    words: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    (hostfile := tmp_path / "hosts").write_text("elsewhere\n")
    module, *words = [str(hostfile) if word == "{hostfile}" else word for word in words]
    words = [sys.executable if word == "python" else word for word in words]
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.decode(errors="replace")
    assert ("sockets join jobs on elsewhere, localhost" if "--check" in words else "sum 2.0") in printed, done
