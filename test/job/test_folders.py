"""Containers without a home folder, an entry in the list of users, or a folder that can be written to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.ringrun_job import TIMEOUT_S
from harness.socket_ranks import free_port
from harness.spec import FOLDER_OF_LAUNCHERS

from ringtrain.record.folders import private_folder, temporary_folder

SUM = """
import os, numpy, ringtrain as hvd
hvd.init()
os.write(1, f"sum {hvd.allreduce(numpy.ones(3), op=hvd.Sum)[0]}\\n".encode())  # in one piece: ranks write to one pipe
"""
FUNCTION = """
import operator, ringtrain
print("sum", *ringtrain.run(operator.add, (1.0, 1.0), num_proc=1))
"""
# Starts the ranks of a job by hand.
TWO = f"""
import os, subprocess, sys
place = {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1], "WORLD_SIZE": "2", "RINGTRAIN_NETWORK": "sockets"}}
ranks = [
    subprocess.Popen([sys.executable, "-c", {SUM!r}], env={{**os.environ, **place, "RANK": str(rank)}}) for rank in "01"
]
sys.exit(max(rank.wait() for rank in ranks))
"""
JOBS = {
    "by hand": ["-c", TWO, "{port}"],
    "one rank": ["-c", SUM],
    "ringrun": ["-m", "ringtrain.run", "-np", "2", "--network", "sockets", sys.executable, "-c", SUM],
    "elastic": ["-m", "ringtrain.run", "-np", "2", "--min-np", "2", sys.executable, "-c", SUM],
    "mpirun": ["-m", "ringtrain.run", "-np", "2", sys.executable, "-c", SUM],
    "function": ["-c", FUNCTION],
}
SUMS = {"one rank": ["sum 1.0"], "function": ["sum 2.0"]}


@pytest.fixture(autouse=True)
def folder_of_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private_folder.cache_clear()
    yield tmp_path
    private_folder.cache_clear()


def require_sums(job: str, before: list[str], environment: dict[str, str]) -> None:
    words = [word.format(port=free_port()) if word == "{port}" else word for word in JOBS[job]]
    done = subprocess.run(
        [*before, sys.executable, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line for line in done.stdout.splitlines() if "sum" in line]
    assert [line[line.index("sum") :] for line in printed] == SUMS.get(job, ["sum 2.0"] * 2)


def require(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system cannot do that: {error}")


@pytest.mark.parametrize("home", ["", "/proc", "/proc/nonexistent"])
def test_a_user_without_an_entry_needs_no_home(home: str, folder_of_test: Path) -> None:
    """The secret is in a folder of its own then."""
    as_user = ["unshare", "--user", "--map-user=12345"]
    require(*as_user, "true")
    environment = {**os.environ, "TMPDIR": str(folder_of_test), "HOME": home}
    for name in ("XDG_CONFIG_HOME", *([] if home else ["HOME"])):
        environment.pop(name, None)
    require_sums("by hand", as_user, environment)
    (secret,) = folder_of_test.rglob("secret")
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("job", list(JOBS))
def test_nothing_but_shared_memory_can_be_written_to(job: str, folder_of_test: Path) -> None:
    """As in a container with readOnlyRootFilesystem."""
    temporary = sorted(
        {"/tmp", "/var/tmp", tempfile.gettempdir(), str(folder_of_test), os.environ.get("TMPDIR", "/tmp")}
    )
    script = 'for m in / %s; do mount --bind $m $m; mount -o remount,ro,bind $m; done; cd /; exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", script % " ".join(temporary), "sh"]
    require(*inside, "true")
    environment, others = {**os.environ, "TMPDIR": str(folder_of_test)}, ("XDG_CONFIG_HOME", FOLDER_OF_LAUNCHERS)
    require_sums(job, inside, {name: value for name, value in environment.items() if name not in others})


def test_a_private_folder_is_of_this_user_alone(folder_of_test: Path) -> None:
    folder = Path(private_folder())
    assert folder == folder_of_test / f"ringtrain-{os.geteuid()}" and str(folder) == private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("trap", ["open", "link", "file"])
def test_a_private_folder_that_another_user_may_have_made_is_not_used(trap: str, folder_of_test: Path) -> None:
    usual, other = folder_of_test / f"ringtrain-{os.geteuid()}", folder_of_test / "other"
    other.mkdir(mode=0o700)
    if trap == "open":
        usual.mkdir()
        usual.chmod(0o770)
    elif trap == "link":
        usual.symlink_to(other)
    else:
        usual.touch()
    folder = Path(private_folder())
    assert folder not in (usual, other) and folder.parent == folder_of_test
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and str(folder) == private_folder()


def test_where_no_folder_can_be_written_to_shared_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(os, "access", lambda *given: False)
    assert temporary_folder() == "/dev/shm"
