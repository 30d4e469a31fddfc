"""`TorchState`: a state of models, optimizers, schedulers, samplers and Python objects."""

from __future__ import annotations

from typing import Any

from ringtrain.elastic.states import ObjectState
from ringtrain.job import session
from ringtrain.torch.elastic.handlers import (
    LRSchedulerStateHandler as LRSchedulerStateHandler,
    ModelStateHandler as ModelStateHandler,
    OptimizerStateHandler as OptimizerStateHandler,
    SamplerStateHandler as SamplerStateHandler,
    StateDictHandler,
    StateHandler as StateHandler,
    get_handler_registry as get_handler_registry,
    handler_for,
    set_handler_registry as set_handler_registry,
)
from ringtrain.torch.state import broadcast_object


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
