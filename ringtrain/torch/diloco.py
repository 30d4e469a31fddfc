"""`DiLoCo`: any optimizer of torch, whose ranks train alone between two outer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringtrain.engine.compression import Compression
from ringtrain.torch.optimizer import DistributedOptimizer, register
from ringtrain.torch.wrapped import NamedParameters, ParameterNames, WrappedOptimizer, own_groups, wrap
from ringtrain.training.islands import Given
from ringtrain.training.local_steps import HasLocalSteps, LocalSteps, Settings, named_fragments

_KEY = "diloco"  # of the outer half, in a state_dict


def DiLoCo(
    optimizer: torch.optim.Optimizer,
    every: int,
    *,
    named_parameters: NamedParameters | None = None,
    outer: Any = None,
    fragments: int | Sequence[Sequence[torch.Tensor]] = 1,
    overlap: int = 0,
    mixing: float | None = None,
    compression: Any = Compression.none,
    islands: Given = "host",
) -> DiLoCoOptimizer:
    """The optimizer, whose ranks train alone between two outer steps, as with `ringtrain.DiLoCo`.

    The result is an instance of a subclass of the optimizer's class and shares all of its state, so schedulers,
    GradScaler and checkpoints work as before; it has the methods of `DiLoCoOptimizer` too. Use it in place of the
    optimizer. The outer parameters and the outer momentum are in host memory, also of a model on a GPU. Buffers of a
    model, such as running statistics, stay those of each rank.

    Args:
        optimizer: any of torch.optim, not distributed.
        named_parameters: such as model.named_parameters(), the same on all ranks; None names them by their
            places.
        fragments: a number, or lists of the parameters of each part.
        every, outer, overlap, mixing, compression, islands: as for `ringtrain.DiLoCo`, and so are the errors.

    Examples:
        >>> import ringtrain.torch as hvd
        >>> from ringtrain import optim
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> before = model.weight.detach().clone()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> optimizer = hvd.DiLoCo(optimizer, every=2, outer=optim.SGD(lr=1.0), islands="rank")
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
        ...     optimizer.step()
        >>> torch.allclose(before - model.weight, torch.full((1, 2), 1.0))  # on two ranks: the mean of 0 and 2
        True
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; for other arrays there is DiLoCo of ringtrain"
        )
    if isinstance(optimizer, (WrappedOptimizer, DiLoCoOptimizer)):
        raise ValueError(
            "this optimizer is distributed already: give DiLoCo the plain one; it averages inside the islands"
        )
    listed = list(named_parameters) if named_parameters is not None else None
    names = ParameterNames(listed, optimizer.param_groups)
    name_of = names.of(optimizer.param_groups)
    parts = named_fragments(fragments, lambda parameter: _name_in_fragment(parameter, name_of))
    settings = Settings(every, outer, parts, overlap, mixing, compression, islands)
    local_steps = LocalSteps({name: parameter for parameter, name in name_of.items()}, settings)
    if local_steps.islands.averages:
        optimizer = DistributedOptimizer(optimizer, named_parameters=listed, process_set=local_steps.islands.of_rank)
    local: Any = wrap(optimizer, DiLoCoOptimizer, _local_steps=local_steps)
    if local_steps.islands.averages:
        register(local)  # nobody keeps the distributed one
    return local  # type: ignore[no-any-return]


def _name_in_fragment(parameter: Any, name_of: Mapping[torch.Tensor, str]) -> str:
    if not torch.is_tensor(parameter):
        raise TypeError(f"fragments must be a number, or lists of the parameters of each part, not {parameter!r}")
    if parameter not in name_of:
        raise ValueError("fragments: a parameter is not one of the optimizer")
    return name_of[parameter]


class DiLoCoOptimizer(HasLocalSteps, torch.optim.Optimizer):
    """An optimizer whose ranks train alone between outer steps: mixed into the class of the wrapped optimizer."""

    # Then a GradScaler calls `step` also where gradients have overflowed, and the ranks count the same steps.
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, and carry out what is due of the outer step.

        Args:
            closure: as of the wrapped optimizer.

        Raises:
            ValueError: `add_param_group` was called after DiLoCo.
            ReplicaError: on all ranks in the first step, these have different parameters.
            RingtrainError: a transfer failed; see ringtrain.errors.
        """
        parameters = self.__parameters()
        self._local_steps.before_step(parameters)
        result = self.__inner_step(parameters, closure)
        self._local_steps.after_step(parameters)
        return result

    # Optimizer.load_state_dict would wrap it for the profiler, as the step of the wrapped class is already.
    step.hooked = True  # type: ignore[attr-defined]

    def set_weight(self, weight: float | None) -> None:
        """As `ringtrain.DiLoCo.set_weight`, before backward() of the step: StepOrderError between that and step()."""
        if self._local_steps.islands.averages:
            super().set_weight(weight)  # type: ignore[misc]
        self._local_steps.set_weight(weight)

    def outer_step(self) -> None:
        """As `ringtrain.DiLoCo.outer_step`."""
        self._local_steps.outer_step(self.__parameters())

    def state_dict(self) -> dict[str, Any]:
        """As `ringtrain.DiLoCo.state_dict`, with the state of the wrapped optimizer."""
        return {**super().state_dict(), _KEY: _to_tensors(self._local_steps.state_dict())}

    def replicated_state_dict(self) -> dict[str, Any]:
        """As `ringtrain.DiLoCo.replicated_state_dict`."""
        return {**super().state_dict(), _KEY: _to_tensors(self._local_steps.state_dict(with_errors=False))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `ringtrain.DiLoCo.load_state_dict`; load the model, too."""
        if _KEY not in state_dict:
            raise ValueError(
                "load_state_dict: this is not the state of DiLoCo; load it into the optimizer before DiLoCo wraps it"
            )
        self._local_steps.load_state_dict(_to_arrays(state_dict[_KEY]))
        super().load_state_dict({name: value for name, value in state_dict.items() if name != _KEY})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("an optimizer of DiLoCo cannot be copied: its ranks construct it together")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an optimizer of DiLoCo cannot be pickled: save its state_dict()")

    def __parameters(self) -> list[torch.Tensor]:
        parameters = [parameter for group in own_groups(self) for parameter in group["params"]]
        self._local_steps.require_count(len(parameters))
        return parameters

    def __inner_step(self, parameters: list[torch.Tensor], closure: Callable[[], Any] | None) -> Any:
        if closure is not None:
            return super().step(closure)
        attributes = vars(self)
        if attributes.get("_step_supports_amp_scaling") or "found_inf" not in attributes:
            return super().step()
        # A GradScaler has put them there, and deletes them afterwards. The wrapped optimizer does not know them.
        found, scale = attributes.pop("found_inf"), attributes.pop("grad_scale")
        try:
            if found:
                return None
            if scale is not None:
                _unscale(parameters, scale)
            return super().step()
        finally:
            attributes.update(found_inf=found, grad_scale=scale)


def _unscale(parameters: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Divides the gradients by the scale, as `GradScaler.unscale_`."""
    inverse = scale.double().reciprocal().float()
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))


def _to_tensors(state: Any) -> Any:
    """The state with tensors in the place of arrays, which torch.load takes with weights_only=True."""
    if isinstance(state, dict):
        return {name: _to_tensors(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_to_tensors(value) for value in state]
    return torch.from_numpy(state) if hasattr(state, "__array_interface__") else state


def _to_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {name: _to_arrays(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_to_arrays(value) for value in state]
    return state.detach().cpu().numpy() if torch.is_tensor(state) else state
