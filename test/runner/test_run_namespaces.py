"""Ranks in namespaces of their own, as containers make them: the secret reaches them, and they share memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.ringrun_job import TIMEOUT_S

from ringtrain.job.rendezvous import secret

SUM = """
import numpy, ringtrain as hvd
hvd.init()
for _ in range(3):
    total = hvd.allreduce(numpy.ones(3), op=hvd.Sum)
print("sum", total[0], "on", hvd.local_size())
"""
STORE = """
import numpy, ringtrain.kvstore as kvstore
store = kvstore.create("dist_sync")
store.init("key", numpy.ones(3))
print("sum", 2 * store.pull("key")[0], "on 2")
"""
JOBS = {
    "ringrun": ["ringtrain.run", "-np", "2", "--network", "sockets"],
    "elastic": ["ringtrain.run", "-np", "2", "--min-np", "2"],
    "ringlaunch": ["ringtrain.launch", "--launcher", "local", "-n", "1", "-s", "1"],
}
NAMESPACES = {
    "user": ["unshare", "--user", "--map-current-user"],
    "pid": ["unshare", "--pid", "--fork", "--mount-proc"],
}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("namespace", list(NAMESPACES))
@pytest.mark.parametrize("job", list(JOBS))
def test_processes_of_a_namespace_meet(job: str, namespace: str) -> None:
    inside = NAMESPACES[namespace]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system makes no such namespace: {error}")
    printed = run(
        sys.executable, "-m", *JOBS[job], *inside, sys.executable, "-c", STORE if job == "ringlaunch" else SUM
    )
    assert printed.count("sum 2.0 on 2") == (1 if job == "ringlaunch" else 2), printed


def test_a_process_that_inherits_no_descriptor_reads_the_secret_through_proc() -> None:
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SUM!r}], check=True)"
    printed = run(sys.executable, "-m", *JOBS["ringrun"], sys.executable, "-c", starts)
    assert printed.count("sum 2.0 on 2") == 2, printed


def test_an_inherited_descriptor_counts_as_long_as_it_is_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = os.memfd_create("secret")
    os.write(descriptor, b"inherited" * 4)
    state = os.fstat(descriptor)
    monkeypatch.setenv(secret.FILE_VARIABLE, "/proc/0/fd/5")
    words = f"/proc/0/fd/5 {descriptor} {state.st_dev} {state.st_ino}"
    monkeypatch.setenv(secret.DESCRIPTOR_VARIABLE, words)
    for _ in range(2):
        assert secret.job_secret("h1:1") == b"inherited" * 4
    with (tmp_path / "other").open("wb") as other:
        os.dup2(other.fileno(), descriptor)  # as in a child, which has another file there
        with pytest.raises(FileNotFoundError, match="RINGTRAIN_SECRET_FILE names the file of the secret"):
            secret.job_secret("h1:1")
    os.close(descriptor)
    secret.write(tmp_path / "own")
    monkeypatch.setenv(secret.FILE_VARIABLE, str(tmp_path / "own"))  # of the script: beats that of the agent
    assert secret.job_secret("h1:1") == (tmp_path / "own").read_bytes()
