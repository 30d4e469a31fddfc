"""When the ranks of a job that has failed are told to end: one rule for all launchers.

A rank that fails ends the job. The other ranks learn it from their operations, which raise an error that names the
failed rank, and may write a checkpoint. Those that still run AFTER_FAILURE_S later get SIGTERM, and SIGKILL when their
grace is over.
"""

from __future__ import annotations

# From the first failure to SIGTERM.
AFTER_FAILURE_S = 10.0
# From SIGTERM to SIGKILL at most, after a failure; also where the user names no time.
MAX_GRACE_S = 10.0


class EndRule:
    """Decides when a failed job ends. Uses no clock: the time is an argument. `grace_s`: what the user allows."""

    def __init__(self, grace_s: float):
        self.grace_s = min(grace_s, MAX_GRACE_S)
        self._at = float("inf")

    @property
    def has_failed(self) -> bool:
        return self._at < float("inf")

    def fail(self, now: float) -> None:
        """Notes the failure of a rank. Later ones change nothing."""
        self._at = min(self._at, now + AFTER_FAILURE_S)

    def is_due(self, now: float) -> bool:
        """Whether the ranks that still run get SIGTERM."""
        return now >= self._at
