"""The functions of whole models and objects under the name of Horovod's module, `horovod.torch.functions`."""

from ringtrain.torch.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
