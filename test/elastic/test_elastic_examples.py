"""The elastic examples do what they say when their ranks are killed."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from elastic_ranks import elastic_job

# Imported by the ranks alone, since each takes seconds.
for module in ("sklearn", "tqdm", "matplotlib"):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_digits_in_numpy_come_out_the_same(tmp_path):
    calm, picture = tmp_path / "calm.npz", tmp_path / "loss.png"
    program = [str(EXAMPLES / "elastic_numpy.py"), "--epochs", "3", "--pause", "0.005", "--save"]
    with elastic_job([*program, str(calm)], tmp_path, 2) as job:
        printed = job.process(job.formed(1).members[0]).ends()
    assert "after 1 generations" in printed
    epoch = r"^epoch  \d: test loss [\d.]+, test accuracy [\d.]+ on 2 ranks, [\d,]+ images/s$"
    assert len(re.findall(epoch, printed, re.MULTILINE)) == 3
    (tmp_path / "secret").unlink()
    plot = ["--plot", str(picture), "--beside", str(calm), "--checkpoint", str(tmp_path / "checkpoint")]
    with elastic_job([*program, str(tmp_path / "stormy.npz"), *plot], tmp_path, 3) as job:
        job.process(job.formed(1).members[0]).wait_for("epoch  1")
        job.processes[0].kill()
        text = [process.ends() for process in job.processes[1:]]
        assert "after 2 generations" in "".join(text)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with np.load(calm) as one, np.load(tmp_path / "stormy.npz") as other:
        for name in set(one.files) - {"losses"}:
            np.testing.assert_allclose(other[name], one[name], rtol=0, atol=1e-9)


def test_the_digits_in_torch_are_learned(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    with elastic_job([str(EXAMPLES / "elastic_torch_digits.py"), "--epochs", "4"], tmp_path, 2) as job:
        job.process(job.formed(1).members[0]).wait_for("epoch  1")
        job.processes[1].kill()
        text = job.processes[0].ends()
        assert float(text.split("test accuracy ")[-1].split()[0]) > 0.8 and "after 2 generations" in text
