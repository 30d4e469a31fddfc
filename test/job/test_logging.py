"""Messages of Python other than errors go through the logger "ringtrain"."""

import os
import socket
import subprocess
import sys

import pytest

SENTENCE = "HOROVOD_CYCLE_TIME=5 has no effect: there are no cycles, an operation begins when all ranks have it"
JOIN = "import logging, ringtrain as hvd\n{}\nhvd.init({})\nhvd.shutdown()\n"


def said(setup="", options="", **environ):
    done = subprocess.run(
        [sys.executable, "-c", JOIN.format(setup, options)],
        env={**os.environ, "HOROVOD_CYCLE_TIME": "5", **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.fast
def test_a_script_without_logging_reads_it_on_standard_error():
    assert said() == [f"ringtrain: {SENTENCE}"]


def test_a_script_routes_and_forms_it():
    form = "logging.basicConfig(format='%(levelname)s of %(name)s: %(message)s')"
    assert said(form) == [f"WARNING of ringtrain: {SENTENCE}"]


def test_a_handler_of_its_own_takes_it_all():
    assert said("logging.getLogger('ringtrain').addHandler(logging.NullHandler())") == []


@pytest.mark.parametrize("variable", ["RINGTRAIN_LOG_LEVEL", "HOROVOD_LOG_LEVEL"])
def test_a_level_keeps_it_back(variable):
    assert said(**{variable: "ERROR"}) == []
    assert said(**{variable: "debug"}) == [f"ringtrain: {SENTENCE}"]


def test_a_level_that_the_script_has_set_stays():
    level = "logging.getLogger('ringtrain').setLevel('ERROR')"
    assert said(level, "log_level='info'") == []


LATE = """
import sys, time, numpy as np, ringtrain as hvd
hvd.init(stall_warning_time_s=0.2, log_level=sys.argv[1])
time.sleep(hvd.rank())
hvd.allreduce(np.ones(1), name="late")
"""


@pytest.mark.parametrize("level, is_told", [("warning", True), ("error", False)])
def test_the_core_knows_the_level_too(level, is_told):
    words = ["-m", "ringtrain.run", "-np", "2", sys.executable, "-c", LATE, level]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ('"late"' in done.stderr) == is_told


def test_a_line_is_one_write_where_python_does_not_buffer():
    # print() writes the end of its line by itself there, and the lines of other threads may come between
    script = "from ringtrain.record.logger import logger; logger.warning('one')"
    ends, written = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ends, written:
        subprocess.run([sys.executable, "-u", "-c", script], stderr=written, check=True, timeout=60)
        written.close()
        assert [ends.recv(1000), ends.recv(1000)] == [b"ringtrain: one\n", b""]
