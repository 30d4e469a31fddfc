"""The pages for readers: their Python runs on two ranks, their command lines are right, and print what they say.

`make docs` builds the site of them, in .ci/run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from harness.ringrun_job import needs_mpi

import ringtrain as hvd
from ringtrain.runner import command, flags, launchers
from ringtrain.runner.launch_command import build_parser
from ringtrain.runner.launchers import Chosen, OpenMpi, Srun

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/index.md", "docs/arrays.md", "docs/pytorch.md", "docs/slow-links.md")


def snippets_of(page: str) -> list[str]:
    """Those in tabs are indented."""
    found = re.findall(r"^ *```python\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(snippet) for snippet in found]


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str) -> None:
    torch = pytest.importorskip("torch", reason="the pages are about PyTorch, too")
    hvd.init()
    torch.manual_seed(hvd.rank())
    for snippet in snippets_of(page):
        if "import jax" in snippet or "import mxnet" in snippet:
            continue  # test/frameworks/ runs those
        if "torch.save" in snippet:
            continue  # test_pasted.py runs it, in a folder of its own
        names = {}  # of its own: a reader may copy any of them
        exec(snippet, names)
        if "model" in names:
            weights = torch.nn.utils.parameters_to_vector(names["model"].parameters()).detach().numpy()
        else:
            weights = names.get("weights", np.zeros(1))
        both = hvd.allgather(weights[None])
        assert np.array_equal(both[0], both[1])
    if page == "docs/arrays.md":
        assert names["params"][0].tolist() == [-0.1] * 3  # a step of 0.1 down a gradient of 1, on both ranks
    hvd.shutdown()  # ends the process sets that the code has opened


def test_the_pages_have_code() -> None:
    assert [len(snippets_of(page)) for page in PAGES] == [1, 4, 2, 5, 2]
    more = ("docs/kvstore.md", "docs/elastic.md", "docs/launching.md")
    assert [len(snippets_of(page)) for page in more] == [4, 1, 5]


@pytest.mark.ranks(2)
def test_the_code_about_stores_runs() -> None:
    from ringtrain import kvstore

    training, _, compression, elastic = snippets_of("docs/kvstore.md")
    random = np.random.default_rng(hvd.rank())
    names = {
        "batch_size": 4,
        "weights": {"w": random.normal(size=3).astype(np.float32)},
        "batches": [(random.normal(size=(4, 3)).astype(np.float32), np.ones(4, np.float32)) for _ in range(2)],
        "compute_gradients": lambda weights, inputs, labels: {"w": inputs.T @ (inputs @ weights["w"] - labels)},
    }
    exec(training, names)
    both = hvd.allgather(names["weights"]["w"][None])
    assert np.array_equal(both[0], both[1])
    exec(compression, {"kv": kvstore.create("dist_sync")})
    names = {"hvd": hvd, "kvstore": kvstore}
    exec(elastic.replace("    ...", "    return kv.type"), names)
    assert names["train"](hvd.elastic.ArrayState(weights=np.ones(3, np.float32))) == "dist_sync_device"


@pytest.mark.ranks(2)
def test_the_code_about_elastic_jobs_runs() -> None:
    torch = pytest.importorskip("torch", reason="the page is about PyTorch")
    import ringtrain.torch

    (snippet,) = snippets_of("docs/elastic.md")
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2)

    def step_of(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "step_of": step_of, "batch_of": lambda *_: torch.randn(4, 3)}
    exec(snippet.replace("hvd.init()", "None").replace("10_000", "3"), names)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    both = ringtrain.torch.allgather(torch.from_numpy(weights[None])).numpy()
    assert np.array_equal(both[0], both[1])


@needs_mpi
def test_the_code_that_starts_a_job_from_python_runs(tmp_path: Path) -> None:
    snippet = snippets_of("docs/launching.md")[3]
    function, call = snippet.split("\n\nresults")
    (tmp_path / "training.py").write_text(function)
    script = f"from training import *\nresults{call.replace('num_proc=4', 'num_proc=2')}print(results)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[(0, 2.5), (1, 2.5)]\n", done.stderr


def test_the_pages_agree_about_clipping_and_uneven_data() -> None:
    pytorch, migrating, faq = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("pytorch", "migrating", "faq"))
    assert "hvd.clip_grad_norm_" in pytorch and "hvd.clip_grad_norm_" in migrating
    assert "skip_synchronize" not in pytorch
    for page in (pytorch, migrating, faq):
        assert "with hvd.Join(optimizer):" in page
    assert all("too small" in line for line in re.findall(r".*`hvd\.join\(\)`.*\n.*", faq + migrating))


def test_the_first_page_says_what_a_whole_step_takes() -> None:
    measured = (ROOT / "docs" / "inside" / "targets.md").read_text()
    (row,) = re.findall(r"^\| ResNet-50, 102 MB \| 490 .*$", measured, re.MULTILINE)
    own, peers = re.findall(r"([\d.]+) times", row)
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"{own} times as long with ringtrain as without communication, and {peers} times as long with" in said


def test_the_hints_of_the_demo_need_only_what_the_demo_installs() -> None:
    """PyTorch is not among it."""
    hints = re.search(r"^define NEXT\n(.*?)^endef", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE)
    assert hints is not None
    scripts = re.findall(r"examples/\w+\.py", hints[1])
    assert len(scripts) == 2
    for script in scripts:
        assert "torch" not in re.findall(r"^(?:import|from) (\w+)", (ROOT / script).read_text(), re.MULTILINE)
    install = re.findall(r"^pip install .*\.\[examples.*$", (ROOT / "docs" / "examples.md").read_text(), re.MULTILINE)
    assert install and all("--editable" in line and "torch" not in line for line in install)


SOUGHT = (
    *("gradient accumulation", "mixed precision", "macos", "tensorboard", "docker", "learning rate", "early stopping"),
    *("hangs", "infiniband", "reproducible", "troubleshooting", "no_sync", "syncbatchnorm", "distributedsampler"),
    *("omp_num_threads", "zero_grad", "torchrun", "hvd"),
)


def test_a_search_finds_what_newcomers_look_for() -> None:
    """In the words into which the site cuts its pages, by which alone a search finds them."""
    (separator,) = re.findall(r"- search: \{separator: '(.+)'\}", (ROOT / "mkdocs.yml").read_text())
    text = "".join(page.read_text().lower() for page in (ROOT / "docs").glob("*.md"))
    cut = f" {' '.join(re.split(separator, text))} "
    assert [words for words in SOUGHT if f" {words} " not in cut] == []


def test_every_module_that_a_page_imports_has_a_page_of_reference() -> None:
    hooks = (ROOT / "docs" / "site" / "hooks.py").read_text()
    listed = set(re.findall(r'^    "(ringtrain[\w.]*)": "', hooks, re.MULTILINE))
    text = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    imported = set(re.findall(r"\b(?:import|from) (ringtrain\.\w+(?:\.\w+)*)", text))
    assert len(imported) > 8
    assert imported - listed == {"ringtrain.horovod"}  # which gives the names of ringtrain.torch


def test_every_example_has_its_command_and_a_link_to_its_source() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        assert f" examples/{example.name}" in page and f"([source](../examples/{example.name}))" in page


def test_every_example_has_a_picture_of_what_it_prints() -> None:
    pictures = {path.stem: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert pictures.keys() == {example.stem for example in (ROOT / "examples").glob("*.py")}
    for name, picture in pictures.items():
        assert ElementTree.fromstring(picture).tag.endswith("}svg"), name
        assert picture.count("<text") > 1, name


CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]+(?:/|\.(?:py|h|cc|md|toml|yml))")
FOLDERS = (".github", "csrc", "docs", "examples", "release", "ringtrain", "test")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_every_file_that_a_page_for_developers_names_exists(page: str) -> None:
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    known = {f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in paths}
    named = {code for code in CODE.findall((ROOT / page).read_text()) if FILE.fullmatch(code)}
    made = {"dist/"}
    assert len(named) > 20
    assert [code for code in named - made if not any(path.endswith(f"/{code}") for path in known)] == []


def test_the_design_stays_short() -> None:
    lines = (ROOT / "docs" / "design.md").read_text().splitlines()
    assert len(lines) <= 500
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))


# --- command lines ----------------------------------------------------------------------------------------------------

FENCE = re.compile(r"^ *```(sh|console)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
VARIABLE = re.compile(r"[A-Z_]+=.*")


def command_lines_of(path: Path) -> Iterator[str]:
    for kind, text in FENCE.findall(path.read_text()):
        for line in textwrap.dedent(text).replace("\\\n", " ").splitlines():
            if kind == "sh" and not line.startswith("#"):
                yield from line.split("; ") if "'" not in line and '"' not in line else [line]
            elif line.startswith("$ "):
                yield line.removeprefix("$ ")


LINES = [
    (path.name, line.strip())
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    for line in command_lines_of(path)
    if line.strip()
]


def words_of(line: str) -> list[str]:
    """Without comments, variables and `exec`."""
    words = shlex.split(line, comments=True)
    while words and (VARIABLE.fullmatch(words[0]) or words[0] == "exec"):
        words = words[1:]
    return words


@pytest.mark.parametrize("page, line", LINES)
def test_a_command_line_can_be(page: str, line: str) -> None:
    words = words_of(line)
    if words[:3] == ["python", "-m", words[2] if len(words) > 2 else ""] and words[2].startswith("ringtrain."):
        assert importlib.util.find_spec(words[2]) is not None
    elif words[:1] == ["ringrun"] and "--config-file" not in words:
        flags.parse(words[1:])
    elif words[:1] == ["ringlaunch"]:
        build_parser().parse_args(words[1:])
    elif words[:1] == ["make"]:
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).exists()


def test_there_are_command_lines() -> None:
    assert len(LINES) > 60 and sum(words_of(line)[:1] == ["ringrun"] for _, line in LINES) > 20


DRY_RUNS = re.findall(
    r"^\$ (ringrun .*--dry-run .*)\n((?:.+\n)+?)^```",
    "".join((ROOT / "docs" / page).read_text() for page in ("launching.md", "clusters.md")),
    re.MULTILINE,
)


@needs_mpi
@pytest.mark.parametrize("line, expected", DRY_RUNS, ids=[line for line, _ in DRY_RUNS])
def test_a_dry_run_prints_what_the_page_says(
    line: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, shown = str(Path(sys.executable).parent), "/path/to/venv/bin"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("h1 slots=2 max_slots=4\nh2:2\n")
    monkeypatch.setattr(os, "environ", {"HOME": "/root", "PATH": own})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(launchers, "physical_cores", lambda: 2)
    launcher = Srun("/usr/bin/srun", "pmix") if "--launcher srun" in line else OpenMpi(f"{own}/mpirun")
    monkeypatch.setattr(command, "choose_launcher", lambda *_: Chosen(launcher, []))
    assert command.main(words_of(line)[1:]) == 0
    assert capsys.readouterr().out.replace(own, shown) == expected


def test_there_are_dry_runs() -> None:
    assert len(DRY_RUNS) == 5


def test_the_figures_of_the_first_page_show_its_numbers() -> None:
    page = (ROOT / "README.md").read_text()
    said = {
        "speed.svg": re.findall(r"^\| .* \| ([\d.]+) \|$", page, re.MULTILINE),
        "speed-step.svg": re.findall(r"([\d.]+) times as long\s+with (?:ringtrain as|Dist)", page),
    }
    for figure, numbers in said.items():
        assert numbers and f"](docs/{figure})" in page
        shown = re.findall(r">([\d.]+)</text>", (ROOT / "docs" / figure).read_text())
        assert sorted(shown) == sorted(["1", *(f"{float(number):g}" for number in numbers)])
