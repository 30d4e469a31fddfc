"""Functions in C that stand before those of the system's library, in all processes with the variable LD_PRELOAD."""

import shutil
import subprocess

import pytest


def library(folder, source):
    """The value of LD_PRELOAD. Skips the test where there is no compiler for C."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a compiler for C: it puts other system calls in place")
    file = folder / "calls.c"
    file.write_text(source)
    built = folder / "calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, file, "-ldl"], check=True)
    return str(built)
