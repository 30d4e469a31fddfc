"""Memory of a push that a server refuses, under AddressSanitizer."""

import subprocess
from pathlib import Path

import pytest
from harness.compiling import DoubleUnavailable, store_program

pytestmark = [pytest.mark.alike, pytest.mark.slow]

_SOURCE = Path(__file__).resolve().parent / "refused" / "main.cc"


def test_the_memory_of_a_refused_push_is_free_when_its_last_message_has_left():
    try:
        program = store_program(_SOURCE, "address")
    except DoubleUnavailable as error:
        pytest.skip(str(error))
    ended = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[:6000]
    assert int(ended.stdout) > 0, "no push was refused"
