"""The examples in docstrings run on two ranks and show what they say."""

from __future__ import annotations

import ast
import doctest
import os
import time
from pathlib import Path

import numpy as np
import pytest

import ringtrain as hvd

ROOT = Path(hvd.__file__).parent


def examples() -> list[doctest.DocTest]:
    """Found without importing anything, since some modules need their frameworks."""
    found = []
    parser = doctest.DocTestParser()
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text()
        if ">>> " not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ">>> " in (ast.get_docstring(node) or ""):
                name = f"{file.relative_to(ROOT).with_suffix('')}:{node.name}"
                found.append(parser.get_doctest(ast.get_docstring(node), {}, name, str(file), node.lineno))
    return found


EXAMPLES = {example.name: example for example in examples()}


def test_the_functions_that_users_call_most_have_examples() -> None:
    names = {name.partition(":")[2] for name in EXAMPLES}
    assert names >= {"allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join"}
    assert names >= {"broadcast_object", "broadcast_parameters", "DistributedOptimizer", "create", "add_process_set"}
    assert len(EXAMPLES) >= 20


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_it_says(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    example.globs = {"hvd": hvd, "np": np, "os": os, "time": time}
    if name.startswith("torch/"):
        example.globs["torch"] = pytest.importorskip("torch")
    output: list[str] = []
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        doctest.DocTestRunner(verbose=False).run(example, out=output.append)
    finally:
        os.chdir(before)
    assert not output, "".join(output)
