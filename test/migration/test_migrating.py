"""The Python code of docs/migrating.md for PyTorch runs, on two ranks."""

import re
from pathlib import Path

import pytest
from harness.frameworks import on_demand

torch = on_demand("torch")
data = on_demand("torch.utils.data")
hvd = on_demand("ringtrain.torch")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
OF_TORCH = PAGE.read_text().partition("\n## MXNet\n")[0]
SNIPPETS = re.findall(r"^```python\n(.*?)^```", OF_TORCH, re.DOTALL | re.MULTILINE)


def names_for_a_reader(folder):
    """Returns the names that the snippets take for granted."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    torch.manual_seed(1 + hvd.rank())
    dataset = data.TensorDataset(torch.randn(16, 3), torch.randint(2, (16,)))
    return {
        "torch": torch,
        "hvd": hvd,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "dataset": dataset,
        "loader": data.DataLoader(dataset, batch_size=4),
        "loss_function": torch.nn.functional.cross_entropy,
        "checkpoint": folder / "checkpoint.pt",
    }


@pytest.mark.ranks(2)
@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_a_snippet_leaves_the_ranks_with_the_same_model(index, tmp_path):
    code = SNIPPETS[index].replace("hvd.init()\n", "")  # the harness has done it
    for _ in range(2):  # the second time there is a checkpoint
        names = names_for_a_reader(tmp_path) if index > 0 else {}  # the first one is a whole script
        exec(code, names)
        weights = hvd.allgather(torch.nn.utils.parameters_to_vector(names["model"].parameters())[None])
        assert torch.equal(weights[0], weights[1])


def test_the_page_has_snippets():
    assert len(SNIPPETS) == 4 and all("hvd.init()" in snippet for snippet in SNIPPETS)
