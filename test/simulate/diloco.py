"""The world of DiLoCo's outer step: the real LocalSteps, Islands, codes, ArrayState and loop of elastic.run of some
ranks that are killed, stopped and slow, and of newcomers, while differences are under way.

Simulated are the operations, each of which ends on every rank at a time of its own, the forming of generations, and the
inner steps, whose gradients come from the seed. The worlds of the negotiation and of elastic jobs have the real ones.

Rules. After each step all ranks of a generation have the same outer parameters and the same outer state. A fragment is
sent at the steps that its number says and at no others; its outer parameters change `overlap` steps later and at no
other step. The rounding error of a difference is added to the next one. A commit is the outer state, the errors and the
parameters of one step; ranks commit while differences are under way, too. No commit from which any rank has returned is
lost, a death costs at most one outer step, and all ranks of a new generation begin with the same outer parameters. A
rank goes back to its own errors and begins a generation with them if it was at that step; otherwise it begins without.
The ranks of an island take the mean of theirs. In the end every rank that lives has taken all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ringtrain import ops, optim
from ringtrain.elastic import running
from ringtrain.elastic.states import ArrayState
from ringtrain.engine import compression
from ringtrain.errors import PeerLostError
from ringtrain.job import elastic_client, session
from ringtrain.ops import objects
from ringtrain.training import difference_codes, islands, local_steps
from ringtrain.training.local_steps import HasLocalSteps, LocalSteps, Settings
from simulate.story import Story, run_replaced
from simulate.threads import Threads

_END_S = 600.0
_INNER_LR = 0.25


class _Draw:
    """Draws of the seed before the story begins."""

    def __init__(self, story: Story):
        random = story.random
        self.ranks = random.randint(2, 5)
        self.every = random.randint(1, 6)
        self.sizes = [random.randint(1, 5) for _ in range(random.randint(1, 3))]
        self.fragments = random.randint(1, min(len(self.sizes), self.every))
        self.overlap = random.randrange(self.every)
        self.mixing = random.choice([None, 0.0, 0.5])
        self.code = random.choice(["none", "fp16", "int8", "int4"])
        self.islands = random.choice(["rank", "pairs"])
        self.steps = self.every * random.randint(2, 5) + random.randrange(self.every)
        self.commit_at = random.choice([None, random.randrange(self.every)])  # of the steps of a period, besides
        self.asks_for_news, self.saves = random.random() < 0.5, random.random() < 0.5
        self.most_delay_s = random.choice([0.01, 0.5, 3.0])
        self.kills = [random.uniform(0.5, 25) for _ in range(random.choice([0, 0, 1, 2, 3]))]
        self.joins = [random.uniform(0.5, 25) for _ in range(random.choice([0, 0, 1, 2]))]
        self.stops = [(random.uniform(0.5, 25), random.uniform(0.5, 8)) for _ in range(random.choice([0, 0, 1, 3]))]

    def settings(self, given: Any) -> Settings:
        code = getattr(compression.Compression, self.code)
        outer = optim.SGD(lr=0.7, momentum=0.9, nesterov=True)
        return Settings(self.every, outer, self.fragments, self.overlap, self.mixing, code, given)


_Errors = list[Any]  # of each fragment; None where nothing was left out


class _JobOver(Exception):
    """All steps have been taken, before this newcomer has taken part."""


class _Operation:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}  # by rank
        self.result: Any = None
        self.is_complete = False


class _Handle:
    """Of one rank."""

    def __init__(self, world: _World, process: _Process, operation: _Operation, target: Any = None):
        self._world, self._process, self._operation, self._target = world, process, operation, target
        self._generation = process.generation
        self.is_done = False
        self._result: Any = None

    def end(self) -> None:
        self.is_done = True

    def wait(self) -> Any:
        generation, process = self._generation, self._process
        self._world.threads.wait(lambda: self.is_done or process in generation.noticed)
        if not self.is_done:
            raise PeerLostError(generation.lost)
        result = self._operation.result.copy()
        if self._target is None:
            return result
        self._target[...] = result
        return self._target


class _Generation:
    def __init__(self, number: int, members: list[_Process]):
        self.number, self.members = number, members
        self.lost = ""
        self.noticed: set[_Process] = set()
        self.has_newcomers_waiting = False
        self.pending: dict[tuple[tuple[int, ...], str], _Operation] = {}
        self.handles: dict[int, list[_Handle]] = {}
        self.digests: dict[str, bytes] = {}  # of the outer state, by the step
        self.errors: dict[int, _Errors] = {}  # of each rank after it has taken the newest state


class _Process:
    def __init__(self, world: _World, number: int):
        self.world, self.number = world, number
        self.is_killed = self.is_over = self.waits_to_join = False
        self.stopped_until = 0.0
        self.generation: Any = None
        self.former_rank: int | None = None
        self.commits = 0
        self.unnamed = 0
        self.optimizer: Any = None
        self.has_trained = self.is_trained = False  # has begun to; has taken all steps
        self.is_committing = False
        self.saved_errors: _Errors = []
        self.before: _Before | None = None
        self.is_first_step = False  # of the generation

    @property
    def name(self) -> str:
        return f"process {self.number}"

    @property
    def rank(self) -> int:
        place: int = self.generation.members.index(self)
        return place

    def runs(self) -> bool:
        return not self.is_killed and not self.is_over


class _Optimizer(HasLocalSteps):
    """As DiLoCo of arrays, whose inner optimizer is plain SGD without a state."""

    def __init__(self, steps: LocalSteps):
        self._local_steps = steps

    def state_dict(self) -> Any:
        return {"diloco": self._local_steps.state_dict()}

    def replicated_state_dict(self) -> Any:
        return {"diloco": self._local_steps.state_dict(with_errors=False)}

    def load_state_dict(self, state: Any) -> None:
        self._local_steps.load_state_dict(state["diloco"])


class _Saved(NamedTuple):
    """A commit: the generation, the outer state, and the parameters of each rank that has saved it."""

    generation: int
    content: bytes
    weights: set[bytes]


class _Before(NamedTuple):
    """A process when a generation forms, before it takes the newest state."""

    step: int
    content: bytes
    errors: _Errors


class _World:
    def __init__(self, story: Story):
        self.story = story
        self.threads = Threads(story)
        self.draw = _Draw(story)
        self.processes: list[_Process] = []
        self.generations: list[_Generation] = []
        self.committed_steps = self.committed_outer = 0
        self.news_since_commit = 0  # generations that ended for news
        self.saved: dict[int, _Saved] = {}  # by the step of the commit
        self.most_steps = self.most_outer = 0  # that any rank of the last generation has taken

    # --- the story

    def run(self) -> None:
        draw, story = self.draw, self.story
        for _ in range(draw.ranks):
            self.start_process()
        for at in draw.kills:
            if story.add_fault(f"kill a process at {at:.3f} s"):
                story.at(at, self.kill)
        for at in draw.joins:
            if story.add_fault(f"a process joins at {at:.3f} s"):
                story.at(at, self.start_process)
        for at, seconds in draw.stops:
            if story.add_fault(f"stop a process at {at:.3f} s, for {seconds:.3f} s"):
                story.at(at, partial(self.stop, seconds))
        self.threads.run_until(_END_S, lambda: not any(one.runs() for one in self.processes))
        for process in self.processes:
            if process.runs():
                story.find(f"{process.name} waits without end")

    def start_process(self) -> None:
        process = _Process(self, len(self.processes))
        self.processes.append(process)
        if self.generations:
            self.generations[-1].has_newcomers_waiting = True
        self.threads.start(process, partial(self.run_process, process))

    def kill(self) -> None:
        living = [one for one in self.processes if one.runs()]
        if len(living) < 2:
            return
        victim = self.story.random.choice(living)
        victim.is_killed = True
        self.story.trace(victim.name, "is killed")
        self.lose(victim)

    def stop(self, seconds: float) -> None:
        living = [one for one in self.processes if one.runs()]
        if living:
            process = self.story.random.choice(living)
            process.stopped_until = self.story.now + seconds
            self.story.at(process.stopped_until, lambda: None)
            self.story.trace(process.name, f"is stopped for {seconds:.3f} s")

    def lose(self, lost: _Process) -> None:
        """The other ranks of its generation notice its end, each at a time of its own."""
        generation = lost.generation
        if generation is None or generation.lost:
            self.story.after(0.01, self.form)
            return
        generation.lost = f"{lost.name} is gone"
        for member in generation.members:
            if member is not lost:
                self.story.after(self.story.random.uniform(0, 2), partial(generation.noticed.add, member))
        self.story.after(0.01, self.form)

    # --- generations

    def join(self, process: _Process) -> None:
        if process.generation is not None:
            process.former_rank = process.rank
        process.generation, process.waits_to_join, process.unnamed = None, True, 0
        self.form()
        self.threads.wait(lambda: process.generation is not None or self.is_over())
        if process.generation is None:
            raise _JobOver

    def is_over(self) -> bool:
        """Whether the training has ended, and only newcomers are left."""
        return any(one.is_trained for one in self.processes) and not any(
            one.runs() and one.has_trained for one in self.processes
        )

    def form(self) -> None:
        """Once all that live wait for it.

        As in the real job rank 0 is the process with the newest commit; of several the one that had the lowest rank
        before, and a new one only if there is no other.
        """
        living = [one for one in self.processes if one.runs()]
        if self.is_over() or not living or not all(one.waits_to_join for one in living):
            return
        first = min(living, key=lambda one: (-one.commits, one.former_rank is None, one.former_rank or 0))
        living.remove(first)
        self.story.random.shuffle(living)
        living.insert(0, first)
        generation = _Generation(len(self.generations) + 1, living)
        self.news_since_commit += bool(self.generations) and not self.generations[-1].lost
        self.generations.append(generation)
        if not any(one.has_trained for one in living):  # nobody has a state: the training begins anew
            self.committed_steps = self.committed_outer = self.most_steps = self.most_outer = 0
        for process in living:
            process.generation, process.waits_to_join = generation, False
        self.story.trace("job", f"generation {generation.number} of {[one.number for one in living]}")

    def lists(self) -> list[list[int]]:
        """The islands, as a function that the script gives."""
        ranks = range(len(self.running().generation.members))
        return [list(ranks[first : first + 2]) for first in ranks[::2]]

    def running(self) -> _Process:
        assert self.threads.running is not None
        process: _Process = self.threads.running.process
        return process

    # --- a process, as a script of ArrayState and elastic.run

    def run_process(self, process: _Process) -> None:
        try:
            self.run_script(process)
        except _JobOver:
            process.is_over = True

    def run_script(self, process: _Process) -> None:
        draw = self.draw
        try:
            self.join(process)
            weights = [np.arange(1.0, size + 1) for size in draw.sizes]
            local_steps._numbers_taken = 0
            given = "rank" if draw.islands == "rank" else self.lists
            steps = LocalSteps({str(place): one for place, one in enumerate(weights)}, draw.settings(given))
            process.optimizer = _Optimizer(steps)
        except PeerLostError:  # outside of elastic.run: the script ends, and its launcher starts it again
            self.end(process)
            self.start_process()
            return
        state: Any = ArrayState(weights=weights, optimizer=process.optimizer)

        def save() -> None:
            ArrayState.save(state)
            process.saved_errors = _errors_of(steps)
            if process.is_committing:
                self.note_commit(process, steps, weights)

        def restore() -> None:
            ArrayState.restore(state)
            if not _are_same(process.saved_errors, _errors_of(steps)):
                self.story.find(f"{process.name} goes back to other errors than it has saved")

        state.save, state.restore = save, restore
        process.saved_errors = _errors_of(steps)

        def reset() -> None:
            while True:
                steps.end_generation()
                self.join(process)
                try:
                    local_steps._numbers_taken = 0
                    steps.begin_generation()
                    process.before = _Before(steps.inner_steps, _content_of(steps), _errors_of(steps))
                    return
                except PeerLostError:
                    continue

        running.run_fn(lambda state: self.train(process, state, steps), reset)(state)
        process.is_trained = True
        self.end(process)

    def end(self, process: _Process) -> None:
        process.is_over = True
        self.story.trace(process.name, "ends")
        if process.is_trained:
            self.story.after(0.01, self.form)
        else:
            self.lose(process)

    def train(self, process: _Process, state: Any, steps: LocalSteps) -> None:
        process.has_trained = True
        self.check_beginning(process, steps, state.weights)
        random, draw = self.story.random, self.draw
        while steps.inner_steps < self.draw.steps:
            self.threads.wait(None, self.story.now + random.uniform(0.01, 0.3))
            if draw.asks_for_news and steps.inner_steps % 2:
                state.check_host_updates()
            if draw.saves and random.random() < 0.4:
                process.optimizer.state_dict()  # for a file of this rank alone
            weights, outer_steps = state.weights, steps.outer_steps
            steps.before_step(weights)
            if process.is_first_step:
                self.check_errors_of_island(process, steps)
            self.inner_step(process, steps, weights)
            expected = _Expected(self.draw, steps, weights)
            steps.after_step(weights)
            self.check_step(process, steps, expected)
            if steps.outer_steps > outer_steps or steps.inner_steps % draw.every == draw.commit_at:
                process.is_committing = True
                try:
                    state.commit()
                finally:
                    process.is_committing = False
                self.news_since_commit = 0
                self.committed_steps = max(self.committed_steps, steps.inner_steps)
                self.committed_outer = max(self.committed_outer, steps.outer_steps)
        steps.outer_step(state.weights)
        self.check_same(process, steps, "the end")

    def inner_step(self, process: _Process, steps: LocalSteps, weights: list[Any]) -> None:
        own = steps.islands.of_rank
        for place, one in enumerate(weights):
            first = 29 * process.rank + 13 * steps.inner_steps + 5 * place
            gradient = (first + 3 * np.arange(one.size) ** 2) % 17 * (0.75 if process.rank % 2 else -0.35)
            if steps.islands.averages and len(own.ranks or []) > 1:
                gradient = ops.allreduce(gradient, op=ops.Average, name=f"gradient{place}", process_set=own)
            one -= _INNER_LR * gradient

    # --- rules

    def note_commit(self, process: _Process, steps: LocalSteps, weights: list[Any]) -> None:
        step, number = steps.inner_steps, process.generation.number
        if step not in self.saved or self.saved[step].generation != number:
            self.saved[step] = _Saved(number, _content_of(steps), set())
        self.saved[step].weights.add(_bytes_of(weights))

    def check_beginning(self, process: _Process, steps: LocalSteps, weights: list[Any]) -> None:
        if steps.inner_steps < self.committed_steps:
            self.story.find(
                f"{process.name} begins generation {process.generation.number} at step {steps.inner_steps}, but step "
                f"{self.committed_steps} was committed"
            )
        saved = self.saved.get(steps.inner_steps)
        if saved is not None and saved.content != _content_of(steps):
            self.story.find(f"{process.name} begins at step {steps.inner_steps} with another state than was committed")
        if saved is not None and _bytes_of(weights) not in saved.weights:
            self.story.find(f"{process.name} begins at step {steps.inner_steps} with parameters of another step")
        if not steps._has_outer and any(one.error is not None or one.arriving is not None for one in steps._fragments):
            self.story.find(f"{process.name} begins before the first step with errors or differences of later ones")
        self.check_errors(process, steps)
        lost = self.most_outer - steps.outer_steps
        # A generation that ends for news may drop what is under way, so the next commit is one period later.
        most = self.draw.every * (1 + self.news_since_commit) + self.draw.overlap
        if lost > 1 or self.most_steps - steps.inner_steps > most:
            self.story.find(f"{process.name} begins again {lost} outer steps back, at step {steps.inner_steps}")
        self.check_same(process, steps)

    def check_errors(self, process: _Process, steps: LocalSteps) -> None:
        """Those with which a rank begins: its own ones, if it was where the newest state is."""
        before = process.before
        expected: _Errors = [None for _ in steps._fragments]
        if before is not None and (before.step, before.content) == (steps.inner_steps, _content_of(steps)):
            expected = before.errors
        own = process.generation.errors[process.rank] = _errors_of(steps)
        process.is_first_step = True
        if not _are_same(own, expected):
            self.story.find(f"{process.name} begins at step {steps.inner_steps} with other errors than its own")

    def check_errors_of_island(self, process: _Process, steps: LocalSteps) -> None:
        process.is_first_step = False
        ranks = next(ranks for ranks in steps.islands.lists if process.rank in ranks)
        expected = []
        for fragment, errors in zip(
            steps._fragments, zip(*(process.generation.errors[rank] for rank in ranks), strict=True), strict=True
        ):
            if all(_are_same([one], [errors[0]]) for one in errors):
                expected.append(errors[0])
                continue
            total = np.zeros(fragment.outer.size)
            for one in errors:
                total += 0 if one is None else one.astype(np.float64)
            expected.append((total / len(ranks)).astype(fragment.dtype))
        if not _are_same(_errors_of(steps), expected):
            self.story.find(f"{process.name} has other errors than its island in step {steps.inner_steps + 1}")

    def check_step(self, process: _Process, steps: LocalSteps, expected: _Expected) -> None:
        self.most_steps = steps.inner_steps
        self.most_outer = steps.outer_steps
        trouble = expected.trouble(steps)
        if trouble:
            self.story.find(f"{process.name} in step {steps.inner_steps}: {trouble}")
        self.story.trace(process.name, f"has taken step {steps.inner_steps}")
        self.check_same(process, steps)

    def check_same(self, process: _Process, steps: LocalSteps, when: str = "") -> None:
        if not steps._has_outer:
            return
        content = b"".join(
            part.tobytes() for one in steps._fragments for part in (one.outer, *_arrays_of(one.outer_state))
        )
        when = when or f"step {steps.inner_steps}"
        if process.generation.digests.setdefault(when, content) != content:
            self.story.find(
                f"{process.name} has another outer state than others of generation {process.generation.number} after "
                f"{when}"
            )

    # --- operations, in the place of ringtrain.ops

    def submit(
        self,
        value: Any,
        name: str | None,
        process_set: Any,
        combine: Callable[[list[Any]], Any],
        target: Any = None,
    ) -> _Handle:
        process = self.running()
        generation = process.generation
        if process in generation.noticed:
            raise PeerLostError(generation.lost)
        if name is None:
            process.unnamed += 1
            name = f"unnamed {process.unnamed}"
        own = process_set.ranks if process_set is not None else range(len(generation.members))
        key = (tuple(own), name)
        operation = generation.pending.setdefault(key, _Operation())
        handle = _Handle(self, process, operation, target)
        operation.values[process.rank] = np.array(value)
        generation.handles.setdefault(id(operation), []).append(handle)
        if len(operation.values) == len(own):
            operation.result = combine([operation.values[rank] for rank in own])
            for one in generation.handles.pop(id(generation.pending.pop(key))):
                self.story.after(self.story.random.uniform(0.001, self.draw.most_delay_s), one.end)
        return handle

    def allgather_async(self, array: Any, name: str | None = None, process_set: Any = None) -> _Handle:
        return self.submit(array, name, process_set, np.concatenate)

    def allreduce_async(
        self,
        array: Any,
        name: str | None = None,
        op: Any = ops.Average,
        process_set: Any = None,
        priority: int = 0,
        weight: None = None,  # of no rank in these stories
    ) -> _Handle:
        def combine(values: list[Any]) -> Any:
            if op == ops.Max:
                return np.maximum.reduce(values)
            return (sum(value.astype(np.float64) for value in values) / len(values)).astype(values[0].dtype)

        return self.submit(array, name, process_set, combine)

    def broadcast_async(
        self, array: Any, root_rank: int, name: str | None = None, process_set: Any = None, target: Any = None
    ) -> _Handle:
        return self.submit(array, name, None, lambda values: values[root_rank], target)

    def functions(self) -> dict[str, Any]:
        return {
            "allgather": lambda *words, **more: self.allgather_async(*words, **more).wait(),
            "allgather_async": self.allgather_async,
            "allreduce": lambda *words, **more: self.allreduce_async(*words, **more).wait(),
            "allreduce_async": self.allreduce_async,
            "broadcast": lambda *words, **more: self.broadcast_async(*words, **more).wait(),
            "broadcast_": lambda array, root_rank, **more: self.broadcast_async(
                array, root_rank, target=array, **more
            ).wait(),
            "broadcast_async_": lambda array, root_rank, **more: self.broadcast_async(
                array, root_rank, target=array, **more
            ),
            "synchronize": lambda handle: handle.wait(),
        }


class _Expected:
    """The outer half of a step, restated: constructed between the inner half and the outer one."""

    def __init__(self, draw: _Draw, steps: LocalSteps, weights: list[Any]):
        self._draw = draw
        step = steps.inner_steps + 1
        self._outer = [one.outer.copy() for one in steps._fragments]
        self._errors: dict[int, Any] = {}
        self._is_sent, self._arrives = [], []
        for number, fragment in enumerate(steps._fragments):
            place = (number + 1) * draw.every // draw.fragments % draw.every
            self._is_sent.append(step % draw.every == place)
            self._arrives.append(step > draw.overlap and (step - draw.overlap) % draw.every == place)
            if self._is_sent[-1] and len(steps.islands.lists) > 1:
                difference = fragment.outer - fragment.read(weights)
                if fragment.error is not None:
                    difference = difference + fragment.error
                self._errors[number] = difference - _decoded(difference, draw.code)

    def trouble(self, steps: LocalSteps) -> str:
        for number, fragment in enumerate(steps._fragments):
            has_changed = bool((fragment.outer != self._outer[number]).any())
            if has_changed and not self._arrives[number]:
                return f"fragment {number} arrives, which was not due"
            is_under_way = fragment.arriving is not None
            if self._is_sent[number] and self._draw.overlap and not is_under_way:
                return f"fragment {number} was due and is not sent"
            error = self._errors.get(number)
            own = fragment.error
            if error is not None and self._draw.code != "none" and (own is None or not np.array_equal(own, error)):
                return f"the error of fragment {number} is not what the codes have left out"
            if self._arrives[number] and is_under_way and not self._is_sent[number]:
                return f"fragment {number} was to arrive and has not"
        return ""


def _decoded(difference: Any, code: str) -> Any:
    if code == "none":
        return difference
    if code == "fp16":
        return difference.astype(np.float16).astype(difference.dtype)
    bits = {"int8": 8, "int4": 4}[code]
    return difference_codes.decode(difference_codes.encode(difference, bits), difference.size, bits)


def _bytes_of(arrays: list[Any]) -> bytes:
    return b"".join(one.tobytes() for one in arrays)


def _errors_of(steps: LocalSteps) -> _Errors:
    return [None if one.error is None else one.error.copy() for one in steps._fragments]


def _are_same(errors: _Errors, others: _Errors) -> bool:
    return [one is None or one.tobytes() for one in errors] == [one is None or one.tobytes() for one in others]


def _content_of(steps: LocalSteps) -> bytes:
    """The outer state with the means that are under way, for which it waits."""
    parts: list[Any] = []
    for one in steps._fragments:
        parts += [one.outer, *_arrays_of(one.outer_state)]
        if one.arriving is not None:
            parts += [np.array(one.arriving.due), one.arriving.transfer.mean()]
    return b"".join(part.tobytes() for part in parts)


def _arrays_of(state: Any) -> list[Any]:
    return [np.asarray(value) for _, value in sorted(state.items())]


def tell(seed: int, without: Sequence[int] = (), trace: bool = False) -> Story:
    """The story of a seed, without some of its faults."""
    story = Story(seed, without, trace)
    world = _World(story)

    def members() -> list[_Process]:
        found: list[_Process] = world.running().generation.members
        return found

    def has_news() -> bool:
        return bool(world.running().generation.has_newcomers_waiting)

    def set_commits(commits: int, **_: Any) -> None:
        world.running().commits = commits

    def open_for_members(process_set: Any, ranks: list[int]) -> None:
        process_set.ranks = ranks

    def seat() -> SimpleNamespace:
        return SimpleNamespace(generation=world.running().generation.number, has_newcomers=True)

    silent = SimpleNamespace(warning=lambda *_: None, error=lambda *_: None)
    run_replaced(
        world,
        *((ops, name, function) for name, function in world.functions().items()),
        (session, "size", lambda: len(members())),
        (session, "rank", lambda: world.running().rank),
        (objects, "own_rank", lambda: world.running().rank),
        (islands, "open_for_members", open_for_members),
        (elastic_client, "is_elastic", lambda: True),
        (elastic_client, "ready", lambda: None),
        (elastic_client, "has_news", has_news),
        (elastic_client, "set_commits", set_commits),
        (elastic_client, "seat", seat),
        (running, "logger", silent),
    )
    return story
