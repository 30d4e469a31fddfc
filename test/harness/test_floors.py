"""Includes and imports point down, no file has grown too long, and no sentence has to be read twice."""

from pathlib import Path

import pytest

from harness import floors, wording

_ROOT = Path(__file__).resolve().parents[2]
_SUFFIXES = {"csrc": {".h", ".cc"}, "ringtrain": {".py", ".pyi"}}


def _sources():
    for folder, suffixes in _SUFFIXES.items():
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in suffixes:
                yield path.relative_to(_ROOT).as_posix()


def _modules_of(file):
    """Of the `__init__.py` of a package the names of its modules and folders, but of those left with no source."""
    if file.name != "__init__.py":
        return set()
    modules = [path for path in file.parent.glob("*.py") if floors.can_be_imported(path.read_text())]
    folders = [path for path in file.parent.iterdir() if path.is_dir() and next(path.rglob("*.py"), None)]
    return {path.stem for path in [*modules, *folders]}


def test_every_file_looks_only_down():
    files = list(_sources())
    assert {file.split("/")[0] for file in files} == set(_SUFFIXES)
    violations = [
        violation
        for file in files
        for violation in floors.check(file, (_ROOT / file).read_text(), _modules_of(_ROOT / file))
    ]
    assert not violations, "\n".join(map(str, violations))


ALLOWED = {
    "csrc/collectives/adasum.cc": '#include "collectives/adasum.h"\n#include "base/dtype.h"\n#include <vector>\n',
    "csrc/collectives/gpu/a.cc": '#include "collectives/gpu/a.h"\n#include "collectives/network/peers.h"\n',
    "csrc/collectives/choose.cc": '#include "collectives/choose.h"\n#include "collectives/shm/shm_group.h"\n',
    "csrc/python/module.cc": '#include <nanobind/nanobind.h>\n#include "runtime/engine.h"\n#include "kvstore/push.h"\n',
    "ringtrain/__init__.py": "from ringtrain.ops import allreduce\nfrom ringtrain import face\n",
    "ringtrain/ops.py": "from ringtrain import arrays, _core\nimport ringtrain.engine\nimport numpy\n",
    "ringtrain/torch/__init__.py": "import torch\nfrom ringtrain import ops\nfrom . import functions\n",
    "ringtrain/arrays/torch.py": "def view(array):\n    import torch\n",
    "ringtrain/arrays/numpy.py": "from ..errors import Error\n",
    "ringtrain/runner/command.py": "from ringtrain import options\nfrom ringtrain.runner.job import Job\n",
    "ringtrain/doctor.py": "from ringtrain import runner\nimportlib.util.find_spec('torch')\n",
    "ringtrain/bench/peers/gloo.py": "import torch\nfrom ringtrain.bench.ranks import Job\n",
    "ringtrain/bench/torch_training.py": "import torch\nimport ringtrain as hvd\nfrom ringtrain import rank\n",
    "ringtrain/horovod/common/__init__.py": "import horovod\nfrom ringtrain import elastic, job\n",
    "ringtrain/torch/distributed/__init__.py": "from ringtrain.torch.distributed import meeting, patches\n",
    "ringtrain/torch/distributed/patches/__init__.py": "from ringtrain.torch.distributed.patches import gloo\n",
    "ringtrain/torch/distributed/patches/gloo.py": "from ringtrain.torch.distributed import meeting\n",
    "ringtrain/options/table.py": "\n" * floors.MAX_LINES,
}

FORBIDDEN = [
    ("csrc/base/a.h", '\n#include "kernels/reduce.h"\n', 2, 'includes "kernels/reduce.h", which is a higher floor'),
    ("csrc/runtime/a.cc", '# include "kvstore/push.h"\n', 1, "higher floor"),
    ("csrc/base/a.h", '#include "dtype.h"\n', 1, "write its folder"),
    ("csrc/base/a.h", '#include "utils/dtype.h"\n', 1, "no floor"),
    ("csrc/utils/a.h", "", 1, 'the folder "utils" is on no floor'),
    ("csrc/a.h", "", 1, "on no floor"),
    ("csrc/collectives/group.h", '#include "collectives/shm/a.h"\n', 1, "no lower floor of collectives/"),
    ("csrc/collectives/shm/a.h", '#include "collectives/network/a.h"\n', 1, "no lower floor of collectives/"),
    ("csrc/collectives/network/a.h", '#include "collectives/choose.h"\n', 1, "no lower floor of collectives/"),
    ("csrc/runtime/a.cc", "#include <nanobind/nanobind.h>\n", 1, "in python/ only"),
    ("csrc/network/a.cc", "#include <mpi.h>\n", 1, "nowhere"),
    ("csrc/gpu/a.cc", "#include <cuda_runtime.h>\n", 1, "nowhere"),
    ("csrc/base/a.h", "\n" * (floors.MAX_LINES + 1), 1, "901 lines, more than 900"),
    ("ringtrain/utils.py", "", 1, '"utils" is on no floor'),
    (
        "ringtrain/arrays/adapter.py",
        "from ringtrain import ops\n",
        1,
        "arrays imports ringtrain.ops, which is a higher",
    ),
    ("ringtrain/arrays/adapter.py", "def f():\n    from ringtrain.ops import allreduce\n", 2, "higher floor"),
    ("ringtrain/arrays/numpy.py", "from .. import job\n", 1, "arrays imports ringtrain.job"),
    ("ringtrain/errors.py", "from .arrays import view\n", 1, "errors imports ringtrain.arrays"),
    ("ringtrain/record/logger.py", "from ringtrain import arrays\n", 1, "arrays, which is beside it on the same floor"),
    ("ringtrain/ops.py", "import ringtrain as hvd\n", 1, "ops imports ringtrain, which is a higher floor"),
    ("ringtrain/ops.py", "from ringtrain import rank\n", 1, "ops imports ringtrain.rank"),
    ("ringtrain/torch/ops.py", "from ringtrain import rank\n", 1, "torch imports ringtrain.rank"),
    ("ringtrain/ops.py", "import importlib\nimportlib.import_module('ringtrain.training')\n", 2, "higher floor"),
    ("ringtrain/runner/job.py", "from ringtrain import ops\n", 1, "runner imports ringtrain.ops"),
    ("ringtrain/runner/job.py", "from ringtrain.bench import table\n", 1, "higher floor"),
    ("ringtrain/__init__.py", "import torch\n", 1, "torch is imported outside torch/ and arrays/torch.py"),
    ("ringtrain/ops.py", "def f():\n    from torch.nn import Module\n", 2, "torch.nn is imported outside"),
    ("ringtrain/arrays/torch.py", "import cupy\n", 1, "cupy is imported outside"),
    ("ringtrain/torch/ops.py", "from ringtrain import horovod\n", 1, "torch imports ringtrain.horovod"),
    (
        "ringtrain/torch/distributed/work.py",
        "from ringtrain.torch.distributed import backward, patches\n",
        1,
        "work imports ringtrain.torch.distributed.patches, which is no lower floor of ringtrain.torch.distributed",
    ),
    ("ringtrain/torch/distributed/work.py", "from .patches.gloo import replace_gloo\n", 1, "no lower floor"),
    ("ringtrain/torch/distributed/patches/gloo.py", "import ringtrain.torch.distributed\n", 1, "no lower floor"),
    ("ringtrain/bench/a.py", "m = __import__('jax')\n", 1, "jax is imported outside"),
]


@pytest.mark.parametrize("file", ALLOWED)
def test_the_checker_allows(file):
    assert floors.check(file, ALLOWED[file]) == []


@pytest.mark.parametrize("file, text, line, message", FORBIDDEN)
def test_the_checker_finds(file, text, line, message):
    (violation,) = floors.check(file, text)
    assert str(violation).startswith(f"{file}:{line}: ")
    assert message in violation.message


HIDDEN = {
    "imported": "from ringtrain.ops import allreduce, join",
    "renamed": "from ringtrain.torch.ops import wait_for_all as join",
    "defined": "def join(): ...",
    "a class": "class join: ...",
    "assigned": "join = 1",
}


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_a_module_may_not_hide_a_name_of_its_package(text):
    (violation,) = floors.check("ringtrain/torch/__init__.py", f"\n{text}\n", {"join", "ops"})
    assert violation.line == 2 and 'the module "join" of this package hides' in violation.message


def test_a_module_may_be_named_by_its_package():
    text = "from ringtrain.torch import join\nfrom . import ops\nfrom ringtrain.torch.join import Join\n"
    assert floors.check("ringtrain/torch/__init__.py", text, {"join", "ops"}) == []


def test_a_module_that_can_only_be_run_hides_nothing():
    refusing = 'import sys\n\nif __name__ != "__main__":\n    raise ImportError("no")\n\nprint(1)\n'
    assert not floors.can_be_imported(refusing)
    assert floors.can_be_imported(refusing.replace("!=", "=="))
    assert floors.can_be_imported("import sys\n")


def test_the_ground_plan_is_small():
    rooms = {path.parent for path in (_ROOT / "ringtrain").glob("*/*.py")}
    assert len([*rooms, *(_ROOT / "ringtrain").glob("*.py")]) <= 31


_WRITTEN = ("csrc", "docs", "examples", "release", "ringtrain", "test")
_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "Makefile", "setup.py")
_WITH_EXAMPLES = {"test/harness/wording.py", "test/harness/test_floors.py"}


def _written():
    """Yields every file with sentences, as a path from the root."""
    yield from _PAGES
    for folder in _WRITTEN:
        for path in sorted((_ROOT / folder).rglob("*")):
            file = path.relative_to(_ROOT).as_posix()
            if path.suffix in {".py", ".pyi", ".h", ".cc", ".md"} and file not in _WITH_EXAMPLES:
                yield file


def test_no_sentence_has_to_be_read_twice():
    hard = [
        f"{file}:{line}: {message}"
        for file in _written()
        for line, message in wording.check(file, (_ROOT / file).read_text())
    ]
    assert not hard, "\n".join(hard)


HARD = [
    ("docs/a.md", "A page.\n\nWhat is left waits\nfor the next step.\n", 3),
    ("docs/a.md", "| option | What it does |\n", 1),
    ("docs/a.md", "The value is 1.04858e+06.\n", 1),
    ("csrc/a.h", "#pragma once\n// Tells the others. Who waits\n// is told.\n", 2),
    ("csrc/a.cc", 'throw invalid("waited in vain");\n', 1),
    ("csrc/a.h", "// Arithmetic. Knows no rank.\n", 1),
    ("ringtrain/a.py", 'def f():\n    """Have the engine stop."""\n', 2),
    ("ringtrain/a.py", 'raise ValueError(f"{name}: whoever serves it is gone")\n', 1),
    ("ringtrain/a.py", "x = 1\n# Read by the scheduler,\n# and kept for who comes later.\n", 3),
    ("test/test_a.py", "def test_what_cannot_be_is_refused():\n    pass\n", 1),
    ("Makefile", "all:  # for whoever builds\n", 1),
]


@pytest.mark.parametrize("file, text, line", HARD)
def test_a_sentence_that_has_to_be_read_twice_is_found(file, text, line):
    ((found, _),) = wording.check(file, text)
    assert found == line


PLAIN = {
    "docs/a.md": "## What limits a job\n\n**What does it cost?** Nothing.\n\n```\nWhat it prints\n```\n`Have the`\n",
    "csrc/a.h": "// Returns what was pushed, and who pushed it.\n",
    "ringtrain/a.py": 'print("Let us see: those who wait are told")\nwhat, who = 1e6, 2  # and whose\n',
    "test/test_a.py": "def test_a_killed_rank_fails_every_pending_handle():\n    pass\n",
}


@pytest.mark.parametrize("file", PLAIN)
def test_a_plain_sentence_is_allowed(file):
    assert list(wording.check(file, PLAIN[file])) == []
