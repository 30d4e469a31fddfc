"""The pytest hooks behind `@pytest.mark.ranks`.

    @pytest.mark.ranks(1, 2, 3, fast=[2], slow=[3], timeout=120, initialised=False, isolated=True,
                       env={"NAME": "value"}, hosts=(2, 1), rate="1gbit", dtypes=DTYPES, way="ring")

runs the body on 1, 2 and 3 ranks, `hvd.init()` done. A test with several of these marks runs in all of these ways.
fast, slow: the numbers of ranks with which it is marked so, or True for all. dtypes: the values of the parameter
`dtype`. way: the word for this mark in the name of the test; without one that says the ranks of each host.
timeout: seconds, 60 unless said. initialised: False where the body calls init() itself. isolated: in a job of its own,
which is not initialised either. env: added to the environment of the job; what init() reads is set before it, in a job
that others share. hosts: the ranks of each simulated host. rate: what each of these sends at most, as `tc` writes it. A
body takes parametrized values and tmp_path, no other fixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from harness import gpu_double
from harness.compiling import DoubleUnavailable
from harness.frameworks import FRAMEWORKS
from harness.hosts import HostsUnavailable
from harness.job import Job, JobError
from harness.protocol import Task
from harness.report import JobResult, conclude, fail
from harness.spec import JobSpec
from ringtrain.options.table import TABLE, environment_name
from ringtrain.runner.mpi_library import MpiNotFound

_SIZE = "ranks"
# Those that take long to import.
_LIBRARIES = ("torch", "jax")
IMPORTED_BY_COLLECTION = pytest.StashKey[list[str]]()
# One job can have these one after another.
_READ_BY_INIT = {name for option in TABLE for name in (environment_name(option.name), option.alias)}


def pytest_configure(config: pytest.Config) -> None:
    """Register the hooks once, and the marker."""
    arguments = "*sizes, fast=(), slow=(), timeout=60, initialised=True, isolated=False, env={}, hosts=(), ..."
    config.addinivalue_line("markers", f"ranks({arguments}): run under mpirun")
    if not config.pluginmanager.has_plugin("ranks"):
        config.pluginmanager.register(Ranks(), "ranks")


# Functions that take long, as `python -m measure.durations` has found.
_SLOW = Path(__file__).resolve().parents[1] / "slow.txt"


def _is_drawn(name: str) -> bool:
    """Whether a function of that list runs: a quarter of them where DRAW is set, as .ci/run sets it to the commit."""
    draw = os.environ.get("DRAW", "")
    return not draw or hashlib.sha256(f"{draw} {name}".encode()).digest()[0] % 4 == 0


class Marker(NamedTuple):
    """The arguments of `@pytest.mark.ranks`."""

    sizes: tuple[int, ...]
    fast: Sequence[int] | bool = ()
    slow: Sequence[int] | bool = ()
    timeout: float = 60
    initialised: bool = True
    isolated: bool = False
    env: Mapping[str, str] = {}
    hosts: Sequence[int] = ()
    rate: str = ""
    dtypes: Sequence[Any] = ()
    way: str = ""

    @classmethod
    def of(cls, item: pytest.Item) -> Marker | None:
        """The marker of a test, or None. Raises UsageError where it says what cannot be."""
        own = [mark for mark in item.callspec.marks if mark.name == "ranks"] if hasattr(item, "callspec") else []
        mark = own[0] if own else item.get_closest_marker("ranks")
        return None if mark is None else cls._read(mark, item)

    @classmethod
    def all_of(cls, definition: pytest.Item) -> list[tuple[pytest.Mark, Marker]]:
        """The marks of a function, the first one first."""
        return [(mark, cls._read(mark, definition)) for mark in definition.iter_markers("ranks")][::-1]

    @classmethod
    def _read(cls, mark: pytest.Mark, definition: pytest.Item) -> Marker:
        try:
            marker = cls(mark.args, **mark.kwargs)
        except TypeError as error:
            raise pytest.UsageError(f"{definition.nodeid}: @pytest.mark.ranks: {error}") from None
        if not marker.sizes or not all(isinstance(size, int) and size > 0 for size in marker.sizes):
            raise pytest.UsageError(f"{definition.nodeid}: @pytest.mark.ranks needs numbers of ranks, such as (1, 2)")
        if marker.hosts and set(marker.sizes) != {sum(marker.hosts)}:
            wanted = f"{marker.sizes} ranks cannot be the {sum(marker.hosts)} of hosts={tuple(marker.hosts)}"
            raise pytest.UsageError(f"{definition.nodeid}: @pytest.mark.ranks: {wanted}")
        return marker

    def id_of(self, size: int, *dtype: Any) -> str:
        way = self.way or "+".join(map(str, self.hosts))
        return "-".join([*([way] if way else []), f"{size}rank{'s' if size > 1 else ''}", *map(str, dtype)])

    def marks_of(self, size: int) -> list[pytest.MarkDecorator]:
        of_sizes = [(pytest.mark.fast, self.fast), (pytest.mark.slow, self.slow)]
        return [mark for mark, sizes in of_sizes if (sizes if isinstance(sizes, bool) else size in sizes)]


class Ranks:
    """Runs marked tests in jobs. At most one job is alive; it serves all tests of equal spec."""

    def __init__(self) -> None:
        self._job: Job | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each mark, number of ranks and dtype. A test may ask for the `dtype`, and for its `way`."""
        markers = Marker.all_of(metafunc.definition)
        if not markers:
            return
        if _SIZE not in metafunc.fixturenames:
            metafunc.fixturenames.append(_SIZE)
        asks_way = "way" in metafunc.fixturenames and any(marker.way for _, marker in markers)
        names = [_SIZE, *(["dtype"] if markers[0][1].dtypes else []), *(["way"] if asks_way else [])]
        values = [
            pytest.param(size, *dtype, *way, marks=[mark, *marker.marks_of(size)], id=marker.id_of(size, *dtype))
            for mark, marker in markers
            for way in [(marker.way,) if asks_way else ()]
            for size in marker.sizes
            for dtype in ([(one,) for one in marker.dtypes] or [()])
        ]
        metafunc.parametrize(names, values)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Bring tests of equal spec together, of all files, and within a job those that want the same of init().

        In a job those that call init() themselves are first. Where pytest runs several tests side by side, a process
        has all tests of a job, of an xdist_group, or of a file that needs no job. These take turns, as most jobs keep
        the cores busy and most others wait; files with slow tests are early, so that no process is left alone with one
        in the end.
        """
        config.stash[IMPORTED_BY_COLLECTION] = [name for name in FRAMEWORKS if name in sys.modules]
        measured = frozenset(_SLOW.read_text().split())
        drawn: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            name = item.nodeid.partition("[")[0]
            is_measured = name in measured and not item.get_closest_marker("fast")
            is_left_out = is_measured and not item.get_closest_marker("slow") and not _is_drawn(name)
            if is_measured:
                item.add_marker(pytest.mark.slow)
            (left_out if is_left_out else drawn).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = drawn
        slow_files = {item.path for item in items if item.get_closest_marker("slow")}
        jobs = sorted({spec for spec in map(_spec_of, items) if spec is not None})
        files = [item.path for item in items if _spec_of(item) is None]
        files = sorted(dict.fromkeys(files), key=lambda path: path not in slow_files)
        turns: dict[JobSpec | Path, tuple[float, bool]] = {
            **{job: ((number + 0.5) / len(jobs), True) for number, job in enumerate(jobs)},
            **{file: ((number + 0.5) / len(files), False) for number, file in enumerate(files)},
        }

        def place(item: pytest.Item) -> tuple[tuple[float, bool], World]:
            return turns[_spec_of(item) or item.path], _world_of(item)

        items.sort(key=place)
        for item in items:
            spec = _spec_of(item)
            group = f"ranks{jobs.index(spec)}" if spec is not None else item.path.name
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(group))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> object | None:
        """Run a marked test on its ranks instead of here."""
        marker, spec = Marker.of(pyfuncitem), _spec_of(pyfuncitem)
        if marker is None or spec is None:
            return None
        result = self._run(spec, _task_of(pyfuncitem), marker.timeout)
        for rank, of_rank in enumerate(result.ranks):
            if of_rank.output:
                pyfuncitem.add_report_section("call", f"rank {rank}", of_rank.output)
        conclude(result)
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> None:
        """Close the job that the next test will not use: a shutdown that fails is an error of the last test in it."""
        if self._job is None or (nextitem is not None and _spec_of(nextitem) == self._job.spec):
            return
        job, self._job = self._job, None
        try:
            job.close()
        except JobError as error:
            fail(str(error))

    def pytest_sessionfinish(self) -> None:
        """A job is left only where the session was interrupted."""
        self._kill()

    def _run(self, spec: JobSpec, task: Task, timeout_s: float) -> JobResult:
        with contextlib.ExitStack() as unless_in_step:
            unless_in_step.callback(self._kill)
            result = self._job_for(spec).run(task, timeout_s)
            if result.is_in_step():
                unless_in_step.pop_all()
        return result

    def _job_for(self, spec: JobSpec) -> Job:
        if self._job is None:
            try:
                gpu_double.prepare(dict(spec.environment))
                self._job = Job(spec)
            except (HostsUnavailable, DoubleUnavailable) as reason:
                pytest.skip(str(reason))
            except (JobError, MpiNotFound) as error:
                fail(str(error))
        return self._job

    def _kill(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.kill()


def _spec_of(item: pytest.Item) -> JobSpec | None:
    marker = Marker.of(item)
    if marker is None or not isinstance(item, pytest.Function):
        return None
    own_test = item.nodeid if marker.isolated else ""
    size = cast(int, item.callspec.params[_SIZE])
    environment = tuple(sorted((name, value) for name, value in marker.env.items() if name not in _READ_BY_INIT))
    # a body that imports one has a variable of that name
    names = {*vars(item.module), *item.function.__code__.co_varnames}
    library = next((name for name in _LIBRARIES if name in names), "")
    return JobSpec(size, tuple(marker.hosts), marker.rate, environment, library, own_test)


class World(NamedTuple):
    """Prepares init() for a test: nothing, where the test calls it, or to read these variables."""

    initialise: bool
    options: tuple[tuple[str, str], ...]


def _world_of(item: pytest.Item) -> World:
    marker = Marker.of(item)
    if marker is None:
        return World(False, ())
    options = tuple(sorted((name, value) for name, value in marker.env.items() if name in _READ_BY_INIT))
    return World(marker.initialised and not marker.isolated, options)


def _task_of(item: pytest.Function) -> Task:
    if item.cls is not None:
        fail("a ranks test is a plain function, not a method: the ranks look it up in the module")
    arguments = {name: item.funcargs[name] for name in inspect.signature(item.function).parameters}
    foreign = sorted(set(arguments) - set(item.callspec.params) - {"tmp_path"})
    if foreign:
        fail(f"a ranks test takes parametrized values and tmp_path, not {', '.join(foreign)}: fixtures live in pytest")
    module = item.module.__name__
    return Task(module, item.path, item.function.__name__, _pickled(arguments), *_world_of(item))


def _pickled(arguments: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(arguments)
    except Exception as error:
        fail(f"the arguments {sorted(arguments)} cannot be sent to the ranks: {error}")
