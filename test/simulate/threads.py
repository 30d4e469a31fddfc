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


class _Carrier:
    """A real thread, which runs one fibre after the other. It goes on only while it holds the baton."""

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.fibre: Fibre | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            assert self.fibre is not None
            self.fibre.run()


class Fibre:
    """One simulated thread."""

    def __init__(self, threads: Threads, process: Any, target: Callable[[], object], carrier: _Carrier):
        self.process, self.carrier = process, carrier
        self.is_over = False
        self.ready: Callable[[], object] = lambda: True
        self.deadline = 0.0
        self._threads, self._target = threads, target

    def run(self) -> None:
        try:
            if not self.process.is_killed:
                self._target()
        except Killed:
            pass
        except BaseException as error:
            self._threads.error = error
        self._threads.leave(self)

    def can_go_on(self, now_s: float) -> bool:
        process = self.process
        if process.is_killed:
            return True
        return process.stopped_until <= now_s and (self.deadline <= now_s or bool(self.ready()))


class Threads:
    """Of one story. A process has `is_killed` and `stopped_until`.

    A fibre that waits lets the events of the story happen itself, until another one can go on, and hands the baton to
    that one: most changes of the real thread take one switch, and none if the fibre can go on itself.
    """

    _idle: ClassVar[list[_Carrier]] = []  # of stories that are over

    def __init__(self, story: Story):
        self._story = story
        self._fibres: list[Fibre] = []
        self._baton = threading.Lock()  # of the thread that tells the story
        self._baton.acquire()
        self._end_s = 0.0
        self._is_over: Callable[[], bool] = lambda: True
        self.error: BaseException | None = None
        self._has_only_time_passed = False  # in the last event, which was the end of a wait
        self.running: Fibre | None = None

    def start(self, process: Any, target: Callable[[], object]) -> Fibre:
        carrier = self._idle.pop() if self._idle else _Carrier()
        fibre = carrier.fibre = Fibre(self, process, target, carrier)
        self._fibres.append(fibre)
        return fibre

    def run_until(self, end_s: float, is_over: Callable[[], bool]) -> None:
        """Let events happen, and all fibres that can go on after each, until that time or until `is_over`."""
        self._end_s, self._is_over = end_s, is_over
        self._hand_on()
        if self.error is not None:
            raise self.error

    def wait(self, ready: Callable[[], object] | None, deadline: float = _NEVER) -> None:
        """By a fibre: until that holds or the time has come."""
        fibre = self.running
        assert fibre is not None
        if fibre.process.is_killed:
            raise Killed
        fibre.ready, fibre.deadline = ready or (lambda: False), deadline
        if deadline < _NEVER:
            self._story.at(deadline, self._pass_time)
        self._hand_on(fibre)
        if fibre.process.is_killed:
            raise Killed

    def leave(self, fibre: Fibre) -> None:
        """By a fibre, at its end: its carrier is free."""
        fibre.is_over = True
        self._fibres.remove(fibre)
        self._idle.append(fibre.carrier)
        self._give_baton(self._next())

    def end(self) -> None:
        """Unwind all that still wait."""
        for fibre in self._fibres:
            fibre.process.is_killed = True
        self._end_s, self._is_over = 0.0, lambda: True
        self._hand_on()

    def _pass_time(self) -> None:
        self._has_only_time_passed = True

    def _hand_on(self, own: Fibre | None = None) -> None:
        """Returns when this fibre can go on, or, for None, when the story is over."""
        following = self._next()
        if following is not own:
            self._give_baton(following)
            (own.carrier.baton if own is not None else self._baton).acquire()
        self.running = own

    def _give_baton(self, following: Fibre | None) -> None:
        self.running = following
        (following.carrier.baton if following is not None else self._baton).release()

    def _next(self) -> Fibre | None:
        """Lets events happen until a fibre can go on. Returns this one, or None when the story is over."""
        self.running = None
        story, fibres = self._story, self._fibres
        self._has_only_time_passed = False
        while True:
            now = story.now
            if self._has_only_time_passed:
                ready = [one for one in fibres if one.deadline <= now and one.can_go_on(now)]
            else:
                ready = [one for one in fibres if one.can_go_on(now)]
            if ready:
                return ready[0] if len(ready) == 1 else story.random.choice(ready)
            if self.error is not None or self._is_over():
                return None
            self._has_only_time_passed = False
            try:
                if not story.step(self._end_s):
                    return None
            except BaseException as error:  # raised where the story is told
                self.error = error
                return None


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
