"""PyTorch's own tests of a backend: `python tests_of_torch.py BACKEND RANKS [NAME...]`, which prints a line for each.

Those of `torch.testing._internal.distributed.distributed_test`, which PyTorch runs with gloo. With BACKEND ringtrain
the groups that they ask gloo for are ringtrain's. Tests that need GPUs, or other numbers of ranks, are skipped.
"""

import logging
import multiprocessing
import os
import sys
import time
import types
import unittest

OF_GLOO_ALONE = ("test_ddp_logging_data_cpu",)  # looks for "gloo" as the name of the backend in a log
AT_A_TIME = 3  # they wait most of the time: for ranks that start, for each other, and for the end of a rank to be seen


def prepare(backend, ranks):
    """Sets what the module of the tests looks for when it is imported."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=ranks,
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120",
        RINGTRAIN_AS_GLOO="1" if backend == "ringtrain" else "0",
    )
    try:
        import expecttest  # noqa: F401
    except ImportError:  # of which these tests use the base class alone
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
        sys.modules["expecttest"].ACCEPT = False


def tests_of_backend():
    """Returns the class of the tests."""
    import torch
    from torch.testing._internal.distributed import distributed_test

    import ringtrain.torch.distributed  # noqa: F401  # once, before the ranks are forked

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)

    class OfBackend(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        """Each test runs in ranks that are forked from this process, since the import of torch takes seconds."""

        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return OfBackend


class Lines(unittest.TestResult):
    """Prints how each test ends."""

    def startTest(self, test):
        super().startTest(test)
        self._began = time.monotonic()

    def _say(self, test, outcome, text=""):
        print(f"{outcome} {test._testMethodName} {time.monotonic() - self._began:.1f} s {text}", flush=True)

    def addSuccess(self, test):
        self._say(test, "passed")

    def addSkip(self, test, reason):
        self._say(test, "skipped", reason)

    def addError(self, test, err):
        super().addError(test, err)
        self._say(test, "FAILED", f"\n{err[1]}")

    addFailure = addError


def run(kind, names):
    result = Lines()
    for name in names:
        kind(name).run(result)
    sys.exit(not result.wasSuccessful())


def main():
    backend, ranks, *chosen = sys.argv[1:]
    prepare(backend, ranks)
    kind = tests_of_backend()
    known = unittest.TestLoader().getTestCaseNames(kind)
    names = chosen or [name for name in known if backend != "ringtrain" or name not in OF_GLOO_ALONE]
    context = multiprocessing.get_context("fork")
    parts = [context.Process(target=run, args=(kind, names[first::AT_A_TIME])) for first in range(AT_A_TIME)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    sys.exit(any(part.exitcode != 0 for part in parts))


if __name__ == "__main__":
    main()
