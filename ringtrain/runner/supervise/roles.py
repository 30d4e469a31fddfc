"""The supervisor of a job with servers: its starter decides when the job is over, and whose end matters."""

from __future__ import annotations

import signal
from typing import Any

from ringtrain.runner.supervise.end_reasons import of_late_ranks
from ringtrain.runner.supervise.first_failure import report
from ringtrain.runner.supervise.frames import Ended, Started
from ringtrain.runner.supervise.supervisor import Outcome, Supervisor


class RoleSupervisor(Supervisor):
    """What ranks are in other jobs, a scheduler, servers and workers are here."""

    _last_lines: tuple[str, ...] = ()

    def _note_end(self, event: Ended) -> None:
        """Whatever follows from it, the starter does."""

    def _in_words(self, event: Started) -> str:
        return f"{self._settings.names.listed([event.rank])} is process {event.pid} on {event.host}"

    def _note_report(self, report: dict[str, Any]) -> None:
        self._last_lines += (report["last"],)

    def _outcome(self, launcher_code: int | None) -> Outcome:
        early = [number for number, _ in self._failures.ends().early]
        if self._signals:
            return Outcome(128 + self._signals[0], "", [], early)
        names, failures, code = self._settings.names, self._failures.failures(), launcher_code or 0
        if self._is_late:
            late = of_late_ranks(self._job, self._missing(), self._settings.start_timeout_s, names)
            return Outcome(1, f"{late}\n{report(failures, names)}" if failures else late, failures, early)
        if code < 0:
            return Outcome(128 - code, f"the launcher was ended by {signal.Signals(-code).name}", [], early)
        if code == 0:
            return Outcome(0, "", [], early)
        # of a process that got lost with its host there are no words of its own
        words = report(failures, names) if failures and not failures[0].is_consequence else "\n".join(self._last_lines)
        return Outcome(code, words or f"the launcher ended with exit code {code}", failures, early)
