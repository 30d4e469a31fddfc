"""The benchmark of stores, and its peer. How fast anything is, no test asks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtrain import bench
from ringtrain.bench import results
from ringtrain.job import launched_by

ROOT = Path(bench.__file__).parents[2]
TIMEOUT_S = 120
OWN = ["pushpull", "push(copy=False), pull", "push, pull", "pushpull, 2bit"]
pytestmark = pytest.mark.skipif(
    launched_by.detect() is not None, reason="a launcher cannot be started by a rank of another one"
)


def run(words, folder, *on_path, environment=None):
    """Run the command; return its result and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "ringtrain.bench", "kvstore", *words, "--json", str(folder / "result.json")],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *on_path))), **(environment or {})},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return results.load(str(folder / "result.json")), done.stdout + done.stderr


def test_stores_are_measured_beside_a_parameter_server(tmp_path):
    words = ["-np", "2", "--rounds", "1", "--warmup", "0", "--cpu", "--plot", str(tmp_path / "result.png")]
    result, printed = run(words, tmp_path, ROOT / "test/mxnet_double", environment={"MXNET_DOUBLE": str(tmp_path)})
    (row,) = result.rows
    assert row.competitors() == [*OWN, "ps-lite, push, pull"] and len(row.rounds) == 1
    assert row.key == {"model": "resnet50", "tensors": 161, "bytes": 102_228_128}
    assert "ps-lite / this" in printed and "161 keys, 102.2 MB float32" in printed
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    servers = [json.loads(file.read_text()) for file in tmp_path.glob("s*.*") if file.suffix[1:].isdecimal()]
    assert sorted(one["DMLC_ROLE"] for one in servers) == ["scheduler", "server", "server"]
    assert all((one["DMLC_NUM_SERVER"], one["DMLC_NUM_WORKER"]) == ("2", "2") for one in servers)
    # What has these believes that it is a rank.
    assert not [name for one in servers for name in one if name.startswith(("OMPI_", "PMIX_", "PMI_"))]


def test_stores_are_measured_without_it(tmp_path):
    result, printed = run(["--rounds", "1", "--warmup", "0"], tmp_path)
    assert result.rows[0].competitors() == OWN
    assert "ps-lite does not take part: No module named 'mxnet'" in printed
