"""The supervisor of an elastic job: no end of one process ends it, and its starter says how it went."""

from __future__ import annotations

import signal
from typing import Any

from ringtrain.runner.supervise.first_failure import Failure, last_lines_of
from ringtrain.runner.supervise.frames import Ended, Started
from ringtrain.runner.supervise.supervisor import Outcome, Supervisor


class ElasticSupervisor(Supervisor):
    """What ranks are in other jobs, processes are here: they have numbers of their own, and others take their place."""

    _generation: tuple[int, ...] = ()
    _last_lines: tuple[str, ...] = ()

    def _missing(self) -> list[int]:
        """None: the starter knows which there should be."""
        return []

    def _note_end(self, event: Ended) -> None:
        """Whatever follows from it, the starter does."""

    def _in_words(self, event: Started) -> str:
        return f"process {event.rank} has the id {event.pid} on {event.host}"

    def _note_report(self, report: dict[str, Any]) -> None:
        if "generation" in report:
            self._generation = tuple(report["generation"])
        else:
            self._last_lines += (report["last"],)

    def _outcome(self, launcher_code: int | None) -> Outcome:
        early = [number for number, _ in self._failures.ends().early]
        if self._signals:
            return Outcome(128 + self._signals[0], "", [], early, self._generation)
        code = launcher_code or 0
        lines = list(self._last_lines)
        failures = _latest_first(self._failures.failures())
        if code < 0:
            return Outcome(128 - code, f"the launcher was ended by {signal.Signals(-code).name}", [], early)
        if code != 0 and failures:
            lines = [*last_lines_of(f"process {failures[0].rank}", failures[0]), *lines]
        if code != 0 and not lines:
            lines = [f"the launcher ended with exit code {code}"]
        return Outcome(code, "\n".join(lines), failures, early, self._generation)


def _latest_first(failures: list[Failure]) -> list[Failure]:
    """What the job has survived is of less interest; what a process says of another one, of least."""
    return sorted(failures, key=lambda failure: (failure.is_consequence, -failure.time))
