"""Shared by the parts of the measurement."""

from __future__ import annotations

from typing import Protocol

from measure.gpu.library import Library
from ringtrain.bench.measurement import Session
from ringtrain.bench.results import Row


class Part(Protocol):
    """One row of the measurement. `measure` runs on all ranks; `table` makes lines of its row, on one."""

    name: str

    def why_not(self, session: Session, library: Library) -> str:
        """Why it cannot be measured here, the same on all ranks; "" if it can."""

    def measure(self, session: Session, library: Library) -> Row: ...

    def table(self, row: Row) -> list[str]: ...
