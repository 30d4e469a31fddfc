"""`ringtrain.run(function)`: results and exceptions of ranks come back to the caller."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi

import ringtrain
from ringtrain.job import launched_by
from ringtrain.runner import function
from ringtrain.runner.hosts import UsageError

# what these tests run is imported by the ranks under this file's own name
MODULE = """
import os
import sys
import threading
import numpy
import ringtrain as hvd

class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one + two)

def total(start, step=1):
    hvd.init()
    return hvd.rank(), float(hvd.allreduce(numpy.full(2, start + step * hvd.rank()), op=hvd.Sum)[0])

def fail(rank):
    hvd.init()
    hvd.barrier()
    if hvd.rank() == rank:
        raise KeyError("the cause")
    hvd.barrier()

def fail_strangely():
    raise Unpicklable("a", "b")

def die():
    hvd.init()
    if hvd.rank() == 1:
        os.kill(os.getpid(), 9)
    hvd.barrier()

def leave(rank, code, is_sudden):
    hvd.init()
    hvd.barrier()
    if hvd.rank() == rank:
        os._exit(code) if is_sudden else sys.exit(code)
    hvd.barrier()

def lock():
    hvd.init()
    return threading.Lock() if hvd.rank() == 1 else None

def say():
    print("hello", os.environ["GREETING"])
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "functions_of_ranks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("functions_of_ranks")
    del sys.modules["functions_of_ranks"]


@needs_mpi
@pytest.mark.fast
def test_results_come_in_the_order_of_the_ranks(functions: Any) -> None:
    assert ringtrain.run(functions.total, (10,), {"step": 2}, np=3) == [(0, 36.0), (1, 36.0), (2, 36.0)]


@needs_mpi
@pytest.mark.fast
def test_the_first_exception_is_raised_with_the_traceback_of_its_rank(functions: Any) -> None:
    with pytest.raises(KeyError, match="the cause") as caught:
        ringtrain.run(functions.fail, (1,), np=3)
    assert isinstance(caught.value.__cause__, function.RankTraceback)
    assert "on rank 1" in str(caught.value.__cause__) and 'raise KeyError("the cause")' in str(caught.value.__cause__)


@needs_mpi
def test_an_exception_that_cannot_be_pickled_is_told(functions: Any) -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: ab"):
        ringtrain.run(functions.fail_strangely, np=1)


@needs_mpi
def test_a_rank_that_dies_is_an_error(functions: Any) -> None:
    with pytest.raises(RuntimeError, match=r"^the first to fail was rank 1 .*SIGKILL"):
        ringtrain.run(functions.die, np=2)


@needs_mpi
@pytest.mark.parametrize("is_sudden", [False, True])
@pytest.mark.parametrize(
    ("code", "message"),
    [(0, r"rank 1 ended without a result \(exit code 0\)"), (3, r"rank 1.* with exit code 3")],
)
def test_a_rank_that_exits_is_an_error(functions: Any, code: int, message: str, is_sudden: bool) -> None:
    with pytest.raises(RuntimeError, match=message):
        ringtrain.run(functions.leave, (1, code, is_sudden), np=2)


@needs_mpi
def test_a_result_that_cannot_be_pickled_is_told(functions: Any) -> None:
    with pytest.raises(TypeError, match=r"the result of rank 1 cannot be pickled: .*lock"):
        ringtrain.run(functions.lock, np=2)


@needs_mpi
def test_output_of_ranks_appears_here(functions: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert ringtrain.run(functions.say, np=2, env={"GREETING": "you"}) == [None, None]
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello you", "[1] hello you"]


@needs_mpi
def test_a_script_may_run_its_own_functions(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    script = tmp_path / "script.py"
    script.write_text("import ringtrain\nbase = 5\nprint(ringtrain.run(lambda x: x + base, (1,), np=2))\n")
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.stdout == "[6, 6]\n", result.stderr


@pytest.fixture
def no_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


@pytest.mark.usefixtures("no_cloudpickle")
def test_without_cloudpickle_a_function_of_the_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> None: ...

    with pytest.raises(TypeError, match=r"local.* cannot be pickled: .*pip install cloudpickle"):
        ringtrain.run(local)
    monkeypatch.setattr(local, "__module__", "__main__")
    with pytest.raises(TypeError, match="is defined in a notebook or in the script itself"):
        ringtrain.run(local)


@needs_mpi
@pytest.mark.usefixtures("no_cloudpickle")
def test_a_function_of_a_module_needs_no_cloudpickle() -> None:
    assert ringtrain.run(operator.add, (1, 2), np=2) == [3, 3]


def test_an_argument_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match="add or its arguments cannot be pickled"):
        ringtrain.run(operator.add, (1, os.scandir()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_proc": 0}, ValueError, "num_proc must be at least 1, not 0"),
        ({"np": -1}, ValueError, "num_proc must be at least 1, not -1"),
        ({"num_proc": "2"}, TypeError, "num_proc must be a whole number, not '2'"),
        ({"num_proc": 3, "hosts": "h1:2"}, UsageError, "num_proc=3 is more than the 2 slots of hosts='h1:2'"),
        ({"hosts": "h1", "hostfile": "hosts"}, ValueError, "give hosts or hostfile, not both"),
        ({"hostfile": "/no/such/hosts"}, UsageError, "the hostfile /no/such/hosts cannot be read"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "give use_gloo or use_mpi, not both"),
        ({"network_interface": "a", "network_interfaces": ["b"]}, ValueError, "not both"),
        ({"network_interfaces": [1]}, TypeError, r"network_interfaces must be names such as \[\"eth0\"\], not \[1\]"),
        ({"ssh_port": "22"}, TypeError, "ssh_port must be a whole number, not '22'"),
        ({"ssh_port": 0}, ValueError, "ssh_port must be at least 1, not 0"),
        ({"ssh_identity_file": "/no/such/key"}, UsageError, "ssh_identity_file /no/such/key is not a file"),
        ({"mpi_args": ["-x"]}, TypeError, "mpi_args must be a text"),
        ({"mpi_args": "'open"}, ValueError, "mpi_args: No closing quotation"),
        ({"hosts": ""}, UsageError, 'hosts: "" is not a host'),
        ({"hosts": ["h1"]}, TypeError, "hosts must be a text"),
        ({"start_timeout": -1}, ValueError, "start_timeout must be a number of seconds from 0, not -1"),
        ({"start_timeout": float("nan")}, ValueError, "start_timeout must be"),
        ({"start_timeout": "5"}, TypeError, "start_timeout must be a number of seconds, not '5'"),
        ({"env": {"A": 1}}, TypeError, "env must map names to texts, but maps 'A' to 1"),
        ({"env": {"A=B": "1"}}, ValueError, "env has 'A=B': '1', which cannot be a variable"),
        ({"env": "A=1"}, TypeError, "env must be a mapping"),
        ({"args": "ab"}, TypeError, "args must be a tuple or a list, not 'ab'"),
        ({"func": 7}, TypeError, "must be a function, not 7"),
    ],
    ids=str,
)
def test_a_bad_argument_is_named_before_anything_starts(
    arguments: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched_by, "detect", lambda: None)
    monkeypatch.setattr(function, "choose_launcher", lambda *_: pytest.fail("something was started"))
    with pytest.raises(error, match=message):
        ringtrain.run(**{"func": operator.add, "args": (1, 2), **arguments})


def test_a_rank_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_by, "detect", lambda: launched_by.Launch("MPI", 1, 2, None, None))
    with pytest.raises(UsageError, match="called by rank 1"):
        ringtrain.run(operator.add, (1, 2))


LOUD = """
import io, os, sys
import ringtrain

def loud():
    print("gr\\u00fcn", flush=True)
    print("rot", file=sys.stderr, flush=True)
    return 7

kept = os.dup(1)
{before}
results = ringtrain.run(loud, num_proc=1)
os.write(kept, f"results {{results}}".encode())
"""


@pytest.mark.parametrize(
    "before",
    [
        "sys.stdout = io.TextIOWrapper(open(os.devnull, 'wb'), encoding='ascii')",
        "sys.stdout = sys.stderr = None",
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = open('/dev/full', 'w')",
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)",
        "os.close(1); os.close(2)",
    ],
    ids=["ascii", "none", "closed", "full", "reader gone", "descriptors closed"],
)
def test_results_come_back_where_output_cannot_be_printed(before: str) -> None:
    script = LOUD.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stdout.endswith("results [7]"), done.stdout + done.stderr
