"""A newcomer pastes scripts and commands from README, the pages and the end of `make demo`: they work as pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.examples import ExampleRanks, example_ranks
from harness.frameworks import is_installed
from harness.ringrun_job import needs_mpi
from harness.socket_ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
pytestmark = needs_mpi


def paste(lines: str, folder: Path) -> str:
    """Runs lines in a shell whose PATH begins with this environment, and returns what they print."""
    # More ranks than cores may run here: a pool of threads in each would only be in the way.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    if os.geteuid() == 0:  # as the `activate` that `make` writes does
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def blocks_of(page: str, language: str) -> list[str]:
    """Those in tabs are indented."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


# --- whole scripts, most with the line that the page starts them by --------------------------------------------------

# The number of the block on its page, the package that it needs, and a pattern of what it prints.
SCRIPTS = {
    ("README.md", 0): ("torch", r"epoch 4: loss 0\.0"),
    ("docs/index.md", 0): ("torch", r"epoch 4: loss 0\.0"),
    ("docs/index.md", 1): ("optax", r"epoch 49: loss 0\.0"),
    ("docs/index.md", 2): ("numpy", r"epoch 4: loss 0\.0"),
    ("docs/index.md", 3): ("mxnet", r"epoch 4: loss 0\.0"),
    ("docs/pytorch.md", 0): ("torch", ""),
    ("docs/slow-links.md", 0): ("torch", r"loss 0\.0"),
    ("docs/arrays.md", 0): ("numpy", ""),
    ("docs/arrays.md", 1): ("numpy", ""),
    ("docs/jax.md", 0): ("optax", ""),
    ("docs/timeline.md", 0): ("tensorboard", ""),
}
# The import of PyTorch takes longer than these, which begin by the first line of README.md: they share two ranks.
IN_RANKS_THAT_STAY = [("docs/index.md", 0), ("docs/pytorch.md", 0), ("docs/slow-links.md", 0)]
ranks_that_stay = example_ranks("torch")


def lines_with_train_py(page: str) -> list[str]:
    """Return the lines that start train.py on this host, each once; if there are none, what README says."""
    lines = re.findall(r"(?:ringrun|mpirun) -np \d python train\.py\b(?! -)", "\n".join(blocks_of(page, "sh")))
    return list(dict.fromkeys(lines)) or ["ringrun -np 2 python train.py"]


def scripts() -> Iterator[Any]:
    for (page, number), (package, printed) in SCRIPTS.items():
        if (page, number) in IN_RANKS_THAT_STAY:
            continue
        is_quick = (page, package) == ("docs/index.md", "numpy")
        marks = [pytest.mark.fast] if is_quick else [pytest.mark.slow]
        yield pytest.param(page, number, package, printed, marks=marks, id=f"{page} {number}")


@pytest.mark.parametrize(("page", "number", "package", "printed"), list(scripts()))
def test_a_script_of_a_page_runs(page: str, number: int, package: str, printed: str, tmp_path: Path) -> None:
    if not is_installed(package):
        pytest.skip(f"{package} is not installed in this environment")
    (tmp_path / "train.py").write_text(blocks_of(page, "python")[number])
    for line in lines_with_train_py(page):
        if not line.startswith("mpirun") or is_installed("mpi4py"):
            assert re.search(printed, paste(line, tmp_path)), line


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), IN_RANKS_THAT_STAY)
def test_a_script_of_a_page_runs_in_ranks_that_stay(
    ranks_that_stay: ExampleRanks, page: str, number: int, tmp_path: Path
) -> None:
    package, printed = SCRIPTS[page, number]
    if not is_installed(package):
        pytest.skip(f"{package} is not installed in this environment")
    assert lines_with_train_py(page) == ["ringrun -np 2 python train.py"]
    (tmp_path / "train.py").write_text(blocks_of(page, "python")[number])
    assert re.search(printed, ranks_that_stay.run(2, str(tmp_path / "train.py")))


@pytest.mark.slow
def test_the_script_that_resumes_goes_on_where_it_ended(tmp_path: Path) -> None:
    """On another number of ranks, all of which end with the same parameters."""
    if not is_installed("torch"):
        pytest.skip("torch is not installed in this environment")
    script = blocks_of("docs/pytorch.md", "python")[1] + "hvd.check_replicas(model.state_dict())\n"
    for epochs, ranks, done in ((2, 1, [0, 1]), (5, 2, [2, 3, 4])):
        (tmp_path / "train.py").write_text(script.replace("range(first_epoch, 5)", f"range(first_epoch, {epochs})"))
        printed = paste(f"ringrun -np {ranks} python train.py", tmp_path)
        assert [int(epoch) for epoch in re.findall(r"epoch (\d) is done", printed)] == done


def test_readme_names_both_launchers() -> None:
    assert lines_with_train_py("README.md") == ["ringrun -np 2 python train.py", "mpirun -np 2 python train.py"]


# --- commands --------------------------------------------------------------------------------------------------------


def hints() -> list[str]:
    """The commands that `make demo` prints at its end; two spaces or more separate them from what they do."""
    (text,) = re.findall(r"^define NEXT\n(.*?)^endef", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE)
    return re.findall(r"^  ((?:ringrun|ringlaunch|python) .*?)(?: {2,}.*)$", text, re.MULTILINE)


def test_make_demo_ends_with_four_commands() -> None:
    assert len(hints()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("hint", hints())
def test_a_hint_of_make_demo_works(hint: str) -> None:
    for module in ("sklearn", "tqdm", "matplotlib"):
        pytest.importorskip(module)
    # all sizes and peers, but not the nine rounds of each that a table is made of
    assert paste(f"{hint} --rounds 2" if "ringtrain.bench" in hint else hint, ROOT)


@pytest.mark.fast
def test_hello_prints_what_the_page_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "launching.md").read_text()
    ((line, printed),) = re.findall(r"^\$ (ringrun -np 2 python -c .*)\n((?:\[\d\] .*\n)+)", text, re.MULTILINE)
    assert sorted(paste(line, tmp_path).splitlines()) == printed.splitlines()


# For the pages that are about a train.py of the reader.
STEPS = """
import numpy as np
import ringtrain as hvd
from ringtrain.optim import SGD

hvd.init()
optimizer, weights = hvd.DistributedOptimizer(SGD(lr=0.1)), [np.zeros(1000)]
for step in range(220):
    optimizer.step(weights, [np.ones(1000)])
print(f"the sum is {hvd.allreduce(np.ones(1), op=hvd.Sum)[0]}", flush=True)
"""


def block_with(page: str, word: str) -> str:
    (block,) = (block for block in blocks_of(page, "sh") if word in block)
    return block


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/faults.md", "docs/timeline.md"])
def test_a_timeline_is_recorded_and_reported(page: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    paste(block_with(page, "timeline report"), tmp_path)
    assert (tmp_path / "t.json").is_file() and (tmp_path / "t.html").is_file()


def test_ranks_that_are_started_by_hand_meet(tmp_path: Path) -> None:
    """On this host, and at a port that is free, in place of those of the page."""
    (tmp_path / "train.py").write_text(STEPS)
    block = block_with("docs/clusters.md", "RINGTRAIN_RANK=0").replace("h1:29400", f"localhost:{free_port()}")
    secret, first, second = block.splitlines()
    command = f"{secret}\n{first.partition('#')[0]} &\n{second.partition('#')[0]}\nwait"
    assert paste(command, tmp_path).count("the sum is 2.0") == 2


@pytest.mark.slow
def test_workers_and_servers_that_are_started_by_hand_meet() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    block = block_with("docs/kvstore.md", "DMLC_ROLE=scheduler").replace("9092", str(free_port()))
    assert "with 2 workers" in paste(f"{block}\nwait", ROOT)


# --- what is not run here: it installs, or needs a cluster -----------------------------------------------------------


def test_every_extra_of_an_install_line_exists() -> None:
    extras = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {
        extra
        for page in pages
        for line in re.findall(r"pip install .*", page.read_text())
        for group in re.findall(r"(?:\.|ringtrain)\[([\w,-]+)\]", line)
        for extra in group.split(",")
    }
    assert len(named) > 5 and named <= extras


def test_the_first_pages_install_what_scripts_in_the_checkout_find_too() -> None:
    """There a script imports the sources beside it, whose core only an editable install builds."""
    for page in ("README.md", "docs/index.md"):
        lines = [
            line for block in blocks_of(page, "sh") for line in re.findall(r"^pip install .*", block, re.MULTILINE)
        ]
        lines = [line for line in lines if "torch " not in line]
        assert lines and all(line.startswith("pip install --editable ") for line in lines)


def table_of_examples() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "examples.md").read_text()
    return re.findall(r"^\| `(.* (examples/\w+\.py).*)` \|", text, re.MULTILINE)


@pytest.mark.parametrize(("line", "script"), table_of_examples(), ids=lambda value: value)
def test_an_example_knows_the_flags_that_the_table_gives_it(line: str, script: str) -> None:
    """Other tests run the examples, many with less to do."""
    assert len(table_of_examples()) == len(list((ROOT / "examples").glob("*.py")))
    of_example = line.partition(script)[2]
    code = (ROOT / script).read_text()
    for flag in re.findall(r"--[\w-]+", of_example):
        assert f'"{flag}"' in code
