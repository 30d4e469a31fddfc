"""PowerSGD (arXiv 1905.13727): a gradient travels as two thin factors, which are summed over the ranks.

A gradient M of n x m numbers, with the error of the step before added, is projected on the factor Q of that step: the
ranks average P = M Q. Each one makes the columns of P orthonormal, and they average Q = M^T P. The average of the
gradient is P Q^T. The error of a rank is M - P Q^T with its own Q, before the average: the mean of the errors is what
the average has lost, also where the weights of the ranks change or a rank joins. Here the factors are in rows: P is
rank x n, Q is rank x m.

All ranks have the same bits: what each one computes of the averages is computed by NumPy one element after the other,
or by the core, and not by a BLAS, which differs between CPUs. On GPUs the last product is that of the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import ringtrain._core as _core
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.compression import PowerSGD
from ringtrain.job import session

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_LOST = 1e-6  # of its length: what is left of a vector that depends on those before it is noise


class Kept:
    """The state of one gradient between steps, in float32 or float64; None before the first factors."""

    __slots__ = ("error", "factor", "steps")

    def __init__(self, steps: int = 0, factor: Any = None, error: Any = None) -> None:
        self.steps = steps  # so far, with those in which it travelled whole
        self.factor = factor  # rank x m, the same on all ranks
        self.error = error  # n x m, of this rank alone


class Factors:
    """One gradient in one step. Average or sum `first` over the ranks, then the result of `second`; then `result`.

    Args:
        kept: is changed by `result`.
        how: the settings.
        name: of the gradient.
        gradient: an array of floats, of two dimensions or more.
        counts: whether the gradient is read: not where its weight is 0.
    """

    def __init__(self, kept: Kept, how: PowerSGD, name: str, gradient: Any, counts: bool) -> None:
        self._adapter = adapter = adapter_for(gradient)
        self._kept, self._how, self._counts = kept, how, counts
        matrix = gradient.reshape(gradient.shape[0], -1)
        if adapter.dtype_name(matrix) in ("float16", "bfloat16"):
            matrix = adapter.cast(matrix, "float32")
        fits = kept.error is not None and kept.error.shape == matrix.shape
        if how.use_error_feedback and fits:
            kept.error = self._like(kept.error, matrix)
            matrix = matrix + kept.error
        self._matrix = matrix
        self._error: Any = None
        self.first: Any = self._factor(name) @ matrix.T
        self.name_of_second = how.second_name(name)

    def second(self, first: Any) -> Any:
        """Return this rank's Q for the average of P."""
        adapter = self._adapter
        adapter.assign_host(first, orthonormal(adapter.on_host(first)))
        self._basis = first
        second = first @ self._matrix
        self._own_second = second * 1  # `second` becomes the average
        return second

    def compute_error(self) -> None:
        """Compute the part of the gradient that its own factors leave out. `result` keeps it."""
        if self._how.use_error_feedback and self._counts:
            self._error = self._matrix - self._basis.T @ self._own_second

    def result(self, second: Any) -> Any:
        """Return the average of the gradient, n x m, for that of Q. Keeps nothing of the step if it is not finite."""
        if bool(self._adapter.is_finite(second)):
            if self._how.warm_start:
                self._kept.factor = second
            if self._error is not None:
                self._kept.error = self._error
        return self._product(second)

    def _factor(self, name: str) -> Any:
        kept, how, matrix = self._kept, self._how, self._matrix
        shape = (how.rank, matrix.shape[1])
        if how.warm_start and kept.factor is not None and tuple(kept.factor.shape) == shape:
            kept.factor = self._like(kept.factor, matrix)
            return kept.factor
        factor = self._adapter.empty_like(matrix.reshape(-1)[: shape[0] * shape[1]].reshape(shape))
        self._adapter.assign_host(factor, how.first_factor(name, shape[1], kept.steps).astype(np.float32))
        return factor

    def _like(self, array: Any, matrix: Any) -> Any:
        """The array in the dtype, the library and the place of the matrix: a checkpoint may have another one."""
        adapter = self._adapter
        if type(array) is not type(matrix):
            of_library = adapter.empty_like(matrix.reshape(-1)[: array.size].reshape(array.shape))
            adapter.assign_host(of_library, adapter_for(array).on_host(array))
            return of_library
        if adapter.dtype_name(array) != adapter.dtype_name(matrix):
            array = adapter.cast(array, adapter.dtype_name(matrix))
        return adapter.at_place_of(array, matrix)

    def _product(self, second: Any) -> Any:
        if self._adapter.device(self._matrix) >= 0:
            return self._basis.T @ second
        product = self._adapter.empty_like(self._matrix)
        _core.multiply_factors(*map(self._adapter.view, (self._basis, second, product)))
        return product


class PowerSGDGradients:
    """The gradients of one optimizer, by name, and what is kept of them."""

    def __init__(self, how: PowerSGD) -> None:
        self._how = how
        self._kept: dict[str, Kept] = {}

    def take(self, name: str, gradient: Any, weight: float | None) -> Factors | None:
        """Begin the step of a gradient. Returns None if it travels whole. Called once for each step."""
        if not self._how.pays(gradient.shape) or adapter_for(gradient).dtype_name(gradient) not in _FLOATS:
            return None
        kept = self._kept.setdefault(name, Kept())
        kept.steps += 1
        if kept.steps <= self._how.start_step:
            return None
        return Factors(kept, self._how, name, gradient, weight != 0)

    def state_dict(self, with_errors: bool = True) -> dict[str, Any]:
        """Return what is kept, not copies: arrays of the library of the gradients.

        Without errors it is the same on all ranks.
        """
        gradients = {
            name: {"steps": kept.steps, "factor": kept.factor, **({"error": kept.error} if with_errors else {})}
            for name, kept in self._kept.items()
        }
        return {"gradients": gradients, **({"rank": session.rank()} if with_errors else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, without the errors if they are of another rank.

        If it was made without errors, those of this rank stay.

        Raises ValueError if it is something else.
        """
        try:
            is_own = "rank" not in state or state["rank"] == session.rank()
            loaded = {name: Kept(int(one["steps"]), one["factor"]) for name, one in state["gradients"].items()}
            for name, kept in loaded.items():
                if "rank" in state:
                    kept.error = state["gradients"][name]["error"] if is_own else None
                elif name in self._kept:
                    kept.error = self._kept[name].error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError('load_state_dict: "powersgd" is not the state of a PowerSGD compression') from error
        self._kept = loaded

    def forget(self) -> None:
        """Begin anew, as for a checkpoint of an optimizer without PowerSGD."""
        self._kept = {}


def orthonormal(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return an orthonormal basis of the rows, float64[rank, n], by the Gram-Schmidt process, twice for each row.

    A row that depends on those before it is replaced by a random vector, the same in every process. NaN and infinity
    make NaN. Sums are added in the same order on every CPU.
    """
    rows = vectors.astype(np.float64)
    with np.errstate(all="ignore"):
        for number in range(len(rows)):
            basis, row = rows[:number], rows[number]
            length = _length(row)
            rest = _rest(basis, row)
            if _length(rest) <= _LOST * length:
                rest = _rest(basis, np.random.default_rng([1905, 13727, number]).standard_normal(row.size))
            rows[number] = rest / _length(rest)
    return rows


def _rest(basis: npt.NDArray[np.float64], vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The vector without its projections on the basis."""
    for _ in range(2 if len(basis) else 0):
        shares = (basis * vector).sum(axis=1)
        vector = vector - (shares[:, None] * basis).sum(axis=0)
    return vector


def _length(vector: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt((vector * vector).sum()))


def replicated_state_of(holder: Any) -> dict[str, Any]:
    """Returns the state that one rank may give to all; with PowerSGD and DiLoCo each one has errors besides."""
    state: dict[str, Any] = getattr(holder, "replicated_state_dict", holder.state_dict)()
    return state
