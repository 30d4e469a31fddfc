"""The log of an elastic job, in words: each event is printed at once, and again at the end."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Sequence

from ringtrain.failure.ranks_in_words import ranges_of
from ringtrain.job.rendezvous.generations import Waiting

# The last lines of a job of days have so many at most.
_MOST_DEPARTURES = 20


def processes(numbers: Sequence[int]) -> str:
    """`processes 0, 2-5`, or `process 1`."""
    return f"process{'es' if len(numbers) > 1 else ''} {ranges_of(numbers)}"


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def end_of(code: int) -> str:
    """How a process ended whose exit code this is, as a shell gives it."""
    if code - 128 in signal.valid_signals():
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def waiting_in_words(waiting: Waiting, absent: str, in_words: Callable[[Sequence[str]], str]) -> str:
    """Reports the processes that are waited for, and where.

    Args:
        absent: processes that run and have not called init() yet, in words; or nothing.
        in_words: names processes.
    """
    seconds = f"{waiting.seconds:.0f} s"
    late = in_words(waiting.late)
    if waiting.what == "processes":
        more = "1 more process" if waiting.needed == 1 else f"{waiting.needed} more processes"
        reason = f"{absent}: no call of init() yet" if absent else "no other process is starting"
        return f"generation {waiting.generation + 1} has waited {seconds} for {more} ({reason})"
    if waiting.what == "replacements":
        return f"the hosts of {late} have not been named for {seconds}; the ranks go on until others replace them"
    where = {
        "init": f"generation {waiting.generation} has waited {seconds} for {late} in init()",
        "train": f"generation {waiting.generation} has waited {seconds} for {late}, between init() and the training",
        "next": f"generation {waiting.generation + 1} has waited {seconds} for {late} to leave the one before",
    }[waiting.what]
    silent = in_words(waiting.silent)
    return where + (f"; no answer from {silent}: stopped?" if silent else "")


class JobLog:
    """`say` gets each sentence as it comes."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._generation = 0
        self._size = 0
        self._departures: deque[str] = deque(maxlen=_MOST_DEPARTURES)
        self._count = 0
        self._reason = ""

    def formed(self, generation: int, size: int) -> None:
        """Nothing is said of the first one: nobody has waited for it to say that all goes well."""
        self._generation, self._size = generation, size
        if generation > 1:
            self._say(f"generation {generation}: {ranks(size)}")

    def left(self, who: str, how: str, generation: int) -> None:
        """Processes are gone before they were done, such as `process 3 on h1`, which `was ended by SIGKILL`.

        `generation` is the last one that they were in, or 0.
        """
        sentence = f"{who} {how}" + (f" in generation {generation}" if generation else "")
        self._departures.append(sentence)
        self._count += 1
        self._say(sentence)

    def noted(self, sentence: str) -> None:
        """Of something that is of no interest any more at the end."""
        self._say(sentence)

    def state_lost(self, generation: int, commits: int) -> None:
        """The training begins anew, or from a file that has so many commits."""
        sentence = f"generation {generation} has no rank that had the state: training "
        if commits > 0:
            sentence += f"goes on from a file, at commit {commits}"
        else:
            sentence += "begins at step 0 (to prevent that, use state.save_to() or --on-state-lost fail)"
        self._departures.append(sentence)
        self._count += 1
        self._say(sentence)

    def failed(self, reason: str) -> None:
        """The job cannot go on; the first reason is the one that counts."""
        self._reason = self._reason or reason

    def last_lines(self, seconds_lost: float) -> list[str]:
        """None for a job in which nothing has happened."""
        lines = list(self._departures)
        if self._count > len(lines):
            lines.insert(0, f"{self._count - len(lines)} more such lines came before these:")
        if self._generation > 1:
            lines.append(
                f"there were {self._generation} generations, the last one of {ranks(self._size)}; "
                f"{seconds_lost:.2f} s were lost between them"
            )
        return [*lines, *([self._reason] if self._reason else [])]
