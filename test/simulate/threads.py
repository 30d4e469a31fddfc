"""Threads of simulated processes, run one at a time in virtual time: the seed decides which one goes on.

The parts of `threading`, `queue` and `time` that the product uses are here for `replaced()`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from simulate.story import Story

_NEVER = float("inf")


class Killed(BaseException):
    """Unwinds a thread of a process that was killed."""


class Fibre:
    """One simulated thread: a real one that runs only while it is resumed."""

    def __init__(self, threads: Threads, process: Any, target: Callable[[], object]):
        self.process, self.target = process, target
        self.is_over = False
        self.ready: Callable[[], object] = lambda: True
        self.deadline = 0.0
        self.may_run = threading.Lock()
        self.may_run.acquire()
        self._threads = threads

    def run(self) -> None:
        self.may_run.acquire()
        try:
            if not self.process.is_killed:
                self.target()
        except Killed:
            pass
        finally:
            self.is_over = True


class Threads:
    """Of one story. A process has `is_killed` and `stopped_until`."""

    _idle: ClassVar[list[_Worker]] = []  # of stories that are over

    def __init__(self, story: Story):
        self._story = story
        self._fibres: list[Fibre] = []
        self._is_back = threading.Lock()
        self._is_back.acquire()
        self.running: Fibre | None = None

    def start(self, process: Any, target: Callable[[], object]) -> Fibre:
        fibre = Fibre(self, process, target)
        self._fibres.append(fibre)
        worker = self._idle.pop() if self._idle else _Worker()
        worker.run(fibre, self._is_back, self._idle)
        return fibre

    def wait(self, ready: Callable[[], object] | None, deadline: float = _NEVER) -> None:
        """By a fibre: until that holds or the time has come."""
        fibre = self.running
        assert fibre is not None
        if fibre.process.is_killed:
            raise Killed
        fibre.ready, fibre.deadline = ready or (lambda: False), deadline
        if deadline < _NEVER:
            self._story.at(deadline, lambda: None)
        self._is_back.release()
        fibre.may_run.acquire()
        if fibre.process.is_killed:
            raise Killed

    def turn(self) -> None:
        """Run all that can go on, in the order that the seed draws."""
        while ready := [one for one in self._fibres if self._can_go_on(one)]:
            self._resume(ready[0] if len(ready) == 1 else self._story.random.choice(ready))

    def end(self) -> None:
        """Unwind all that still wait."""
        for fibre in self._fibres:
            fibre.process.is_killed = True
        for fibre in list(self._fibres):
            while not fibre.is_over:
                self._resume(fibre)

    def _can_go_on(self, fibre: Fibre) -> bool:
        if fibre.is_over:
            return False
        if fibre.process.is_killed:
            return True
        if fibre.process.stopped_until > self._story.now:
            return False
        return fibre.deadline <= self._story.now or bool(fibre.ready())

    def _resume(self, fibre: Fibre) -> None:
        self.running = fibre
        fibre.may_run.release()
        self._is_back.acquire()
        self.running = None
        if fibre.is_over:
            self._fibres.remove(fibre)


class _Worker:
    """A real thread, which runs one fibre after the other."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Fibre, Any, list[_Worker]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def run(self, fibre: Fibre, is_back: Any, idle: list[_Worker]) -> None:
        self._work.put((fibre, is_back, idle))

    def _run(self) -> None:
        while True:
            fibre, is_back, idle = self._work.get()
            fibre.run()
            idle.append(self)
            is_back.release()


def modules(threads: Threads, story: Story) -> dict[str, SimpleNamespace]:
    """In the place of `threading`, `queue` and `time`."""

    def end_of(timeout_s: float | None) -> float:
        return _NEVER if timeout_s is None else story.now + timeout_s

    class Thread:
        def __init__(self, target: Callable[[], object], name: str = "", daemon: bool = False):
            self._target = target
            self._fibre: Fibre | None = None

        def start(self) -> None:
            assert threads.running is not None
            self._fibre = threads.start(threads.running.process, self._target)

        def is_alive(self) -> bool:
            return self._fibre is not None and not self._fibre.is_over

        def join(self, timeout: float | None = None) -> None:
            threads.wait(lambda: not self.is_alive(), end_of(timeout))

    class Lock:
        def __init__(self) -> None:
            self._is_held = False

        def __enter__(self) -> None:
            if self._is_held:
                threads.wait(lambda: not self._is_held)
            self._is_held = True

        def __exit__(self, *_: object) -> None:
            self._is_held = False

    class Condition(Lock):
        def wait_for(self, ready: Callable[[], object], timeout: float | None = None) -> None:
            if not ready():
                self._is_held = False
                threads.wait(ready, end_of(timeout))
                self.__enter__()

        def notify_all(self) -> None:
            pass

    class Event:
        def __init__(self) -> None:
            self._is_set = False

        def set(self) -> None:
            self._is_set = True

        def wait(self, timeout: float | None = None) -> bool:
            threads.wait(lambda: self._is_set, end_of(timeout))
            return self._is_set

    class SimpleQueue:
        def __init__(self) -> None:
            self._items: list[Any] = []

        def put(self, item: Any) -> None:
            self._items.append(item)

        def get(self, timeout: float | None = None) -> Any:
            if not self._items:
                threads.wait(lambda: self._items, end_of(timeout))
            if not self._items:
                raise queue.Empty
            return self._items.pop(0)

        def __class_getitem__(cls, _: object) -> type:
            return cls

    def sleep(seconds: float) -> None:
        threads.wait(None, story.now + seconds)

    def current_thread() -> object:
        return threads.running

    return {
        "threading": SimpleNamespace(
            Thread=Thread, Lock=Lock, Condition=Condition, Event=Event, current_thread=current_thread
        ),
        "queue": SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty),
        "time": SimpleNamespace(monotonic=story.monotonic, time=story.monotonic, sleep=sleep),
    }
