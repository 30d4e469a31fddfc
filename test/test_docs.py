"""The pages for readers: their Python code runs on two ranks. `make docs` builds the site of them, in .ci/run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import ringtrain as hvd

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/index.md", "docs/arrays.md", "docs/pytorch.md")


def snippets_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str) -> None:
    torch = pytest.importorskip("torch", reason="the pages are about PyTorch, too")
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    for snippet in snippets_of(page):
        exec(snippet.replace("hvd.init()", "None"), names)  # the harness has done it
    if page == "docs/arrays.md":
        assert names["params"][0].tolist() == [-0.1] * 3  # a step of 0.1 down a gradient of 1, on both ranks
        return
    weights = torch.nn.utils.parameters_to_vector(names["model"].parameters()).detach().numpy()
    both = hvd.allgather(weights[None])
    assert np.array_equal(both[0], both[1])


def test_the_pages_have_code() -> None:
    assert [len(snippets_of(page)) for page in PAGES] == [1, 1, 2, 1]
