"""`TorchState`: a state of models, optimizers, schedulers, samplers and Python objects."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch

from ringtrain.elastic import states
from ringtrain.elastic.states import ObjectState
from ringtrain.job import session
from ringtrain.torch.diloco import DiLoCoOptimizer
from ringtrain.torch.elastic.sampler import ElasticSampler
from ringtrain.torch.functions import broadcast_object, broadcast_optimizer_state, load_unchanged, skeleton_of
from ringtrain.training.power_sgd import replicated_state_of
from ringtrain.training.speed_sampler import SpeedSampler

# --- how each kind of object is saved, restored, and made the same on all ranks ---------------------------------------


class StateHandler(ABC):
    """One object of a state. A subclass for a kind of your own goes into the registry."""

    def __init__(self, value: Any):
        self.value = value

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of what the object has to remember."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy."""

    @abstractmethod
    def sync(self) -> None:
        """Give the object of all ranks what that of rank 0 remembers; all ranks call it together."""

    def sync_from(self, root_rank: int) -> None:
        """The same with the object of another rank. A handler that knows only rank 0 takes that one."""
        self.sync()

    def set_value(self, value: Any) -> None:
        """Put another object in the place of this one."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Handles objects with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any):
        super().__init__(value)
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        self._saved = _copied(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        self._load(copy.deepcopy(self._saved))  # may keep what it is given

    def sync(self) -> None:
        self.sync_from(0)

    def sync_from(self, root_rank: int) -> None:
        name = type(self.value).__name__
        content = replicated_state_of(self.value)
        states.share_object(content, root_rank, name, self._load, broadcast_object)

    def _load(self, content: Any) -> None:
        if isinstance(self.value, torch.optim.Optimizer):
            load_unchanged(self.value, content)
        else:
            self.value.load_state_dict(content)

    def saved_content(self) -> Any:
        """The copy, for a file."""
        return self._saved

    def load_content(self, content: Any) -> None:
        """Loads what `saved_content` has returned, also in another process."""
        self._load(content)


class ModelStateHandler(StateDictHandler):
    """A torch.nn.Module. Its parameters and buffers stay where they are."""

    def __init__(self, model: Any):
        super().__init__(model)

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync_from(self, root_rank: int) -> None:
        state = self.value.state_dict()
        tensors = {name: value.detach() for name, value in state.items() if torch.is_tensor(value)}
        states.share_arrays(tensors, root_rank, "model")
        if len(tensors) < len(state):
            others = {name: value for name, value in state.items() if name not in tensors}
            states.share_object(others, root_rank, "model", self._take_others, broadcast_object)

    def _take_others(self, others: dict[str, Any]) -> None:
        """Loads the entries that are not tensors, for `set_extra_state` of modules."""
        state = self.value.state_dict()
        state.update(others)  # with its `_metadata`: without the versions in it modules take it for an old checkpoint
        self.value.load_state_dict(state)


class OptimizerStateHandler(StateDictHandler):
    """A torch.optim.Optimizer. Where all ranks have state of the same shapes, what differs is overwritten in place."""

    def __init__(self, optimizer: Any):
        super().__init__(optimizer)

    def sync_from(self, root_rank: int) -> None:
        skeleton, tensors = skeleton_of(replicated_state_of(self.value))
        if states.is_same(skeleton, "optimizer"):
            named = {str(number): tensor for number, tensor in enumerate(tensors)}
            states.share_arrays(named, root_rank, "optimizer")
        else:
            broadcast_optimizer_state(self.value, root_rank)


class LRSchedulerStateHandler(StateDictHandler):
    """A learning rate scheduler."""

    def __init__(self, scheduler: Any):
        super().__init__(scheduler)


class SamplerStateHandler(StateDictHandler):
    """An ElasticSampler. It shares out what is left whenever the state is restored or made the same."""

    def __init__(self, sampler: Any):
        super().__init__(sampler)

    def sync_from(self, root_rank: int) -> None:
        super().sync_from(root_rank)
        self.value.reset()  # for the ranks that there are now


_Registry = list[tuple[type, type[StateHandler]]]
_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (DiLoCoOptimizer, StateDictHandler),  # the ranks have different states before
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler), StateDictHandler),
    (ElasticSampler, SamplerStateHandler),
    (SpeedSampler, StateDictHandler),
]


def get_handler_registry() -> _Registry:
    """Pairs of a class of objects and that of their handlers; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: _Registry) -> None:
    """Makes states that are made from now on look there."""
    global _registry
    _registry = registry


def handler_for(value: Any) -> StateHandler | None:
    """A new handler for the object; None for a Python object that needs none."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


def _copied(content: Any, before: Any) -> Any:
    """A deep copy, with its tensors in the memory of those in an earlier copy that fit."""
    if isinstance(content, torch.Tensor):
        is_fitting = isinstance(before, torch.Tensor) and _kind(before) == _kind(content)
        place = before if is_fitting else torch.empty_like(content, requires_grad=False)
        return place.detach().copy_(content.detach())
    if isinstance(content, dict) and all(type(key) in (str, int) for key in content):
        earlier = before if isinstance(before, dict) else {}
        copied = copy.copy(content)  # keeps the class and attributes such as the `_metadata` of a model
        for key, value in content.items():
            copied[key] = _copied(value, earlier.get(key))
        return copied
    if type(content) in (list, tuple):
        is_as_long = type(before) is type(content) and len(before) == len(content)
        olds = before if is_as_long else [None] * len(content)
        return type(content)(_copied(value, old) for value, old in zip(content, olds, strict=True))
    return copy.deepcopy(content)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device, tensor.layout


# --- the state --------------------------------------------------------------------------------------------------------


class TorchState(ObjectState):
    """The state of a training in PyTorch. Mirrors `horovod.torch.elastic.TorchState`.

    Args:
        model, optimizer: as other attributes; None where there is none.
        kwargs: more attributes. Objects with a handler (see `get_handler_registry`) are saved, restored and shared by
            that; anything else is a Python object.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any):
        values = {"model": model, "optimizer": optimizer, **kwargs}
        found = {name: handler_for(value) for name, value in values.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        rest = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(broadcast_object, session.rank, **rest)
        super().save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, DiLoCoOptimizer):
                handler.value.wait()  # raises if a rank is lost: then nothing of this commit is kept
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync_from(self, root_rank: int) -> None:
        for handler in self._handlers.values():
            handler.sync_from(root_rank)
        super().sync_from(root_rank)

    def saved_content(self) -> Any:
        handlers = self._handlers.items()
        of_handlers = {name: one.saved_content() for name, one in handlers if isinstance(one, StateDictHandler)}
        return {"objects": super().saved_content(), "handlers": of_handlers}

    def load_content(self, content: Any) -> None:
        super().load_content(content["objects"])
        for name, handler in self._handlers.items():
            if isinstance(handler, StateDictHandler):
                handler.load_content(content["handlers"][name])
