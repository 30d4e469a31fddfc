"""torchrun starts the ranks of the backend "ringtrain" again after a failure, and they go on from their checkpoint."""

import os
import subprocess
import sys

import pytest
from harness.frameworks import need_torch_of_backend

need_torch_of_backend()

_SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import ringtrain.torch.distributed
torch.set_num_threads(1)
dist.init_process_group("ringtrain")
rank, life, path = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"], sys.argv[1]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
torch.nn.init.zeros_(model.module.bias)
first = 0
if os.path.exists(path):
    saved = torch.load(path)
    first = saved["step"]
    model.load_state_dict(saved["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
for step in range(first, 6):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 3 and life == "0":
        if rank == 1:
            os._exit(7)
        dist.barrier()
    if rank == 0:
        torch.save({"step": step + 1, "model": model.state_dict()}, path)
    dist.barrier()
print(f"rank {rank} began with step {first} in life {life}, its bias is {model.module.bias.item()}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_torchrun_has_restarted_go_on_from_their_checkpoint(tmp_path):
    script = tmp_path / "restarted.py"
    script.write_text(_SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path / "model.pt")],
        env=environment,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):  # each of the six steps takes 2 * 0.25 from the bias
        assert f"rank {rank} began with step 3 in life 1, its bias is -3.0" in done.stdout, done.stdout + done.stderr
