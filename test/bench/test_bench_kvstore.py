"""The benchmark of stores, and its peer. How fast anything is, no test asks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.hosts import hosts_or_skip

from ringtrain import bench
from ringtrain.bench import cli, results
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


@pytest.mark.slow
def test_stores_are_measured_beside_a_parameter_server(tmp_path):
    words = ["-np", "2", "--rounds", "1", "--warmup", "0", "--cpu", "--plot", str(tmp_path / "result.png")]
    result, printed = run(
        words, tmp_path, ROOT / "test/frameworks/mxnet_double", environment={"MXNET_DOUBLE": str(tmp_path)}
    )
    (row,) = result.rows
    assert row.competitors() == [*OWN, "ps-lite, push, pull"] and len(row.rounds) == 1
    assert row.key == {"model": "resnet50", "tensors": 161, "bytes": 102_228_128, "workers": 2}
    assert "ps-lite / this" in printed and "161 keys, 102.2 MB float32, 2 workers" in printed
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    servers = [json.loads(file.read_text()) for file in tmp_path.glob("s*.*") if file.suffix[1:].isdecimal()]
    assert sorted(one["DMLC_ROLE"] for one in servers) == ["scheduler", "server", "server"]
    assert all((one["DMLC_NUM_SERVER"], one["DMLC_NUM_WORKER"]) == ("2", "2") for one in servers)
    # A process with these variables believes that it is a rank.
    assert not [name for one in servers for name in one if name.startswith(("OMPI_", "PMIX_", "PMI_"))]


def test_updates_are_measured_beside_a_parameter_server(tmp_path):
    words = ["-np", "2", "--rounds", "1", "--warmup", "0", "--optimizer", "sgd"]
    result, printed = run(
        words, tmp_path, ROOT / "test/frameworks/mxnet_double", environment={"MXNET_DOUBLE": str(tmp_path)}
    )
    (row,) = result.rows
    assert row.competitors() == [*OWN[:3], "pushpull, dist_async", "ps-lite, push, pull"]
    assert (row.key["type"], row.key["optimizer"]) == ("dist_sync", "sgd")
    assert "102.2 MB float32, dist_sync, sgd, 2 workers" in printed


def measure_job(words, folder):
    """Run `measure kvstore-job` for one round; return its rows by what they are of, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "measure", "kvstore-job", "--rounds", "1", "--json", str(folder / "job.json"), *words],
        check=False,
        cwd=ROOT / "test",
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results.load(str(folder / "job.json")).rows
    return {" of ".join(row.key[name] for name in ("part", "of") if name in row.key): row for row in rows}, done.stdout


@pytest.mark.slow
def test_jobs_are_measured_from_outside_beside_what_they_are_to_hold(tmp_path):
    rows, _ = measure_job(["--seconds", "0.2", "--hot-workers", "1,3", "--hot-bytes", "1M"], tmp_path)
    rows["round"] = rows.pop("round of resnet50")
    assert sorted(rows) == ["cost", "hot", "round", "straggler"]
    assert rows["round"].competitors() == [f"ringtrain, {way}" for way in OWN[:3]]
    assert all(one["round_s"] > 0 for one in rows["round"].rounds[0].values.values())
    cost, straggler = (rows[part].rounds[0].values["ringtrain"] for part in ("cost", "straggler"))
    assert 0 < cost["start_s"] < 60 and cost["all_bytes"] > 2 * 102e6 and cost["server_bytes"] > 0
    assert straggler["kept"] == straggler["late"] / straggler["alone"]
    assert rows["hot"].competitors() == ["ringtrain, 1 worker", "ringtrain, 3 workers"]
    for one in rows["hot"].rounds[0].values.values():
        assert one["of_own"] == one["hot"] / one["own"] and one["hot_processor_s"] > 0 and one["own_processor_s"] > 0


@pytest.mark.slow
def test_jobs_on_simulated_hosts_are_measured_with_keys_of_some_sizes(tmp_path):
    with hosts_or_skip(1):
        pass
    words = ["--parts", "round", "--simulated-hosts", "2", "--rate", "1gbit", "--tcp", "--sizes", "4,1M"]
    rows, printed = measure_job([*words, "--option", "kv_threads=1"], tmp_path)
    assert list(rows) == ["round of resnet50", "round of 4 bytes", "round of 1048576 bytes"]
    for row in rows.values():
        assert row.competitors() == [f"ringtrain, {way}" for way in OWN[:3]]
        for one in row.rounds[0].values.values():
            assert one["round_s"] > 0 and one["processor_s"] >= one["thread_s"] > 0
    # The 51 MB that a worker pulls over the other host's link take 0.4 s.
    assert min(one["round_s"] for one in rows["round of resnet50"].rounds[0].values.values()) > 0.3
    assert "round: 1048576 bytes: dist_async, 2 servers" in printed


def test_ranks_that_become_servers_are_refused(tmp_path):
    words = ["-np", "3", "--rounds", "1", "--option", "kv_servers=1"]
    with pytest.raises(AssertionError, match="leave kv_servers out"):
        run(words, tmp_path)


@pytest.mark.slow
def test_several_numbers_of_workers_are_measured_one_after_the_other(tmp_path):
    words = ["-np", "1,2", "--rounds", "1", "--warmup", "0", "--plot", str(tmp_path / "result.png")]
    result, printed = run(words, tmp_path)
    assert [row.key["workers"] for row in result.rows] == [1, 2]
    assert all(row.competitors() == OWN for row in result.rows)
    assert "kvstore: 1, 2 ranks on 1 host" in printed and "float32, 1 worker\n" in printed
    assert "ps-lite does not take part: No module named 'mxnet'" in printed
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_a_number_of_ranks_is_a_number_and_elsewhere_one(capsys):
    for words, sentence in [
        (["kvstore", "-np", "1,x"], 'must be a number of ranks, such as 2, not "1,x"'),
        (["kvstore", "-np", "2,2"], 'not "2,2"'),
        (["step", "-np", "1,2"], "step needs one number of ranks for -np"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(words)
        assert sentence in capsys.readouterr().err
