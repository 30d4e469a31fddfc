"""Libraries that import Horovod by themselves work with ringtrain under its name: PyTorch-Ignite, Lightning 1.9."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Imported by the ranks alone, since each takes seconds.
for module in ("torch", "sklearn", "ignite", "pytorch_lightning"):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200

# ignite's own words for what each collective must give, on two ranks
COLLECTIVES = """
import ignite.distributed as idist, torch

def check(local_rank):
    rank, size = idist.get_rank(), idist.get_world_size()
    assert (local_rank, size, idist.backend(), idist.get_nproc_per_node()) == (rank, 2, "horovod", 2)
    assert (idist.get_nnodes(), idist.get_node_rank(), idist.device().type) == (1, 0, "cpu")
    mine = torch.tensor([1.0 + rank, 4.0])
    wanted = {"SUM": [3, 8], "AVERAGE": [1.5, 4], "MIN": [1, 4], "MAX": [2, 4], "PRODUCT": [2, 16]}
    for op, numbers in wanted.items():
        assert idist.all_reduce(mine.clone(), op).tolist() == numbers, op
    assert idist.all_reduce(torch.tensor([7 + rank, -3]), "AVERAGE").tolist() == [7, -3]
    assert idist.all_reduce(rank + 1) == 3 and idist.all_gather(rank) == [0, 1]
    assert idist.all_gather("x" * rank) == ["", "x"] and idist.all_gather({"of": rank}) == [{"of": 0}, {"of": 1}]
    assert idist.all_gather(torch.full((2, 2), rank)).tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert idist.broadcast(torch.tensor([rank]), src=1).item() == 1
    assert idist.broadcast(f"from {rank}", src=1) == "from 1" and idist.broadcast(1.5 + rank, src=0) == 1.5
    group = idist.new_group([1])
    assert idist.all_gather(torch.tensor([rank]), group=group).tolist() == [rank]
    idist.barrier()
    print("all right")

if __name__ == "__main__":
    with idist.Parallel(backend="horovod", nproc_per_node=2) as parallel:
        parallel.run(check)
    print("back", idist.backend())
"""


def on_two_ranks(*command, cwd=ROOT):
    ringrun = [sys.executable, "-m", "ringtrain.run", "--no-prefix-output", "-np", "2", "--horovod", sys.executable]
    done = subprocess.run([*ringrun, *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_ignite_starts_ranks_itself_whose_collectives_are_right(tmp_path):
    (tmp_path / "check.py").write_text(COLLECTIVES)
    command = [sys.executable, "-m", "ringtrain.horovod", "check.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] all right", "[1] all right", "back None"]


EPOCH = r"^epoch  \d: loss [\d.]+, test accuracy ([\d.]+), [\d,]+ images/s$"


@pytest.mark.slow
def test_ignite_trains():
    printed = on_two_ranks("examples/torch_ignite_digits.py", "--epochs", 3, "--batch-size", 128)
    accuracies = re.findall(EPOCH, printed, re.MULTILINE)
    assert len(accuracies) == 3 and float(accuracies[-1]) >= 0.8


@pytest.mark.slow
def test_lightning_trains():
    printed = on_two_ranks("examples/torch_lightning_digits.py", "--epochs", 4)
    assert len(re.findall(EPOCH, printed, re.MULTILINE)) == 4
    (accuracy,) = re.findall(r"^test accuracy ([\d.]+) on 2 ranks$", printed, re.MULTILINE)
    assert float(accuracy) >= 0.9


# Lightning's strategy for Horovod beside training: clipping, checkpoints, test, predict, gathered results.
LIGHTNING = """
import numpy, torch
numpy.Inf = numpy.inf  # Lightning 1.9 is older than NumPy 2
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, batch):
        return self.layer(batch[0])

    def training_step(self, batch, index):
        return ((self(batch) - batch[1]) ** 2).mean()

    def validation_step(self, batch, index):
        self.log("loss", self.trainer.strategy.reduce(self.training_step(batch, index)))
        gathered = self.all_gather(torch.tensor([float(self.global_rank)]))
        assert gathered.flatten().tolist() == [0, 1], gathered

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]

x = torch.linspace(0, 1, 64)[:, None]
data = TensorDataset(x, 3 * x + 1)
best = ModelCheckpoint(dirpath="checkpoints", monitor="loss")
trainer = Trainer(
    strategy="horovod", accelerator="cpu", max_epochs=8, logger=False, callbacks=[best], gradient_clip_val=5.0,
    accumulate_grad_batches=2, enable_progress_bar=False,
)
torch.manual_seed(trainer.global_rank)  # the strategy gives all ranks the weights of rank 0
line = Line()
trainer.fit(line, DataLoader(data, 4, shuffle=True), DataLoader(data, 32))
(result,) = trainer.test(line, DataLoader(data, 32), verbose=False)
everyone = trainer.strategy.all_gather(torch.cat([p.detach().flatten() for p in line.parameters()])).reshape(2, -1)
assert everyone[0].tolist() == everyone[1].tolist(), everyone
predicted = torch.cat(trainer.predict(line, DataLoader(data, 32)))
assert len(predicted) == 32, len(predicted)
print(f"loss {result['loss']:.4f} weight {line.layer.weight.item():.2f}")
"""


@pytest.mark.slow
def test_lightning_has_its_checkpoints_and_metrics(tmp_path):
    (tmp_path / "line.py").write_text(LIGHTNING)
    lines = re.findall(r"^loss ([\d.]+) weight ([\d.]+)$", on_two_ranks("line.py", cwd=tmp_path), re.MULTILINE)
    assert len(lines) == 2 and lines[0] == lines[1]
    assert float(lines[0][0]) < 0.2
    assert [file.suffix for file in (tmp_path / "checkpoints").iterdir()] == [".ckpt"]
