"""The parameters of an optimizer under the names that all ranks know them by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ringtrain.training.optimizer import check_names, check_number_of_groups, split_evenly

NamedParameters = Iterable[tuple[str, torch.Tensor]]
Groups = int | Sequence[Sequence[torch.Tensor]] | None


class ParameterNames:
    """Names of parameters, found by the tensor itself.

    Args:
        named_parameters: such as model.named_parameters(); None names each parameter by its places in the optimizer.
        param_groups: of the optimizer.

    Raises:
        ValueError: no pairs of name and parameter, a name twice, or a parameter of the optimizer without a name.
    """

    def __init__(self, named_parameters: NamedParameters | None, param_groups: Sequence[dict[str, Any]]) -> None:
        self.is_by_place = named_parameters is None
        pairs = list(named_parameters) if named_parameters is not None else []
        _check_pairs(pairs)
        self._name_of = {parameter: name for name, parameter in pairs}
        unnamed = [place for place, parameter in _by_place(param_groups) if parameter not in self._name_of]
        if unnamed and not self.is_by_place:
            raise ValueError(
                f"named_parameters does not name all parameters of the optimizer: those at {', '.join(unnamed)} "
                "(parameter group.place) are missing"
            )

    def of(self, param_groups: Sequence[dict[str, Any]]) -> dict[torch.Tensor, str]:
        """The name of every parameter that the optimizer has now, in its order; later ones are named by their place."""
        return {parameter: self._name_of.get(parameter, place) for place, parameter in _by_place(param_groups)}


def _by_place(param_groups: Sequence[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{group}.{place}", parameter)
        for group, options in enumerate(param_groups)
        for place, parameter in enumerate(options["params"])
    ]


def _check_pairs(pairs: list[Any]) -> None:
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError("named_parameters must be pairs of a name and a parameter, such as model.named_parameters()")
    check_names([name for name, _ in pairs])


def check_groups(groups: Groups) -> None:
    """Raises ValueError for a negative number or a parameter in two groups, TypeError for anything else."""
    if groups is None:
        return
    if isinstance(groups, int):
        check_number_of_groups(groups)
        return
    if not all(isinstance(group, (list, tuple)) and all(map(torch.is_tensor, group)) for group in groups):
        raise TypeError("groups must be a number of groups, or lists of the parameters that form one")
    members = [id(parameter) for group in groups for parameter in group]
    if len(set(members)) < len(members):
        raise ValueError("groups: each parameter must be in one group only")


def groups_of(groups: Groups, names: dict[torch.Tensor, str]) -> list[list[str]]:
    """The names of the members of each group, of the parameters in `names`."""
    if groups is None:
        return []
    if isinstance(groups, int):
        return split_evenly(list(names.values()), groups) if groups else []
    return [[names[parameter] for parameter in group if parameter in names] for group in groups]
