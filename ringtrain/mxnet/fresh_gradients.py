"""Which gradients of a step are new, on this rank and on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringtrain import ops
from ringtrain.engine.process_sets import ProcessSet


class FreshGradients:
    """Has all ranks update the same parameters: those for which some rank has had a backward pass in this step.

    MXNet remembers for each parameter whether a backward pass has computed its gradient since the last update, on this
    rank. The ranks that have one are counted beside the gradients, and only a rank that lacks one waits for the counts.
    Such a rank contributes zeros, and not the average of the last step, which is still in its gradient.

    Args:
        process_set: the ranks that average.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._counts = np.zeros(0, np.int32)
        self._handle: Any = None
        self._hold_averages = False  # of the last step

    def forget(self) -> None:
        """Forgets what is under way: a rank was lost."""
        self._handle = None

    def submit(self, parameters: Sequence[Any], name: str) -> list[Any]:
        """Begins to count, and makes the gradients zeros that this rank lacks. All ranks call it together.

        Args:
            parameters: those that are trained.
            name: the same on all ranks and in all steps.

        Returns:
            The parameters whose gradients this rank lacks.
        """
        if self._handle is not None:
            self._handle.wait()
        is_fresh = [_weight_of(one)._fresh_grad for one in parameters]
        self._counts = np.array(is_fresh, np.int32)
        self._handle = ops.allreduce_async_(self._counts, op=ops.Sum, name=name, process_set=self._process_set)
        lacking = [one for one, fresh in zip(parameters, is_fresh, strict=True) if not fresh]
        # Before the first update there are zeros, or what the script itself has set.
        if self._hold_averages:
            for one in lacking:
                one.zero_grad()
        return lacking

    def take(self, parameters: Sequence[Any], lacking: Sequence[Any]) -> list[Any]:
        """Has MXNet update what other ranks update. Returns the parameters that are updated for their sake."""
        if not lacking:
            return []
        self._handle.wait()
        lacks = set(map(id, lacking))
        counts = zip(parameters, self._counts.tolist(), strict=True)
        of_others = [one for one, count in counts if count and id(one) in lacks]
        for one in of_others:
            _weight_of(one)._fresh_grad = True
        return of_others

    def end_step(self, parameters: Sequence[Any]) -> None:
        """Called when a step has ended, also without an update, as after an overflow or an error."""
        self._hold_averages = True
        for one in parameters:
            _weight_of(one)._fresh_grad = False


def _weight_of(parameter: Any) -> Any:
    return parameter.list_data()[0]
