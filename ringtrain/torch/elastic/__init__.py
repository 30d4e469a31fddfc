"""`hvd.elastic` of a PyTorch script: what `ringtrain.elastic` has, for models, optimizers and samplers.

state      TorchState, and how each kind of object in it is saved, restored and made the same on all ranks
sampler    a sampler that shares out what is left of an epoch
"""

import typing

from ringtrain.elastic.running import generation as generation, run as run, run_fn as run_fn
from ringtrain.elastic.states import ArrayState as ArrayState, ObjectState as ObjectState, State as State
from ringtrain.errors import (
    HorovodInternalError as HorovodInternalError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
)
from ringtrain.ops.faces import face as _face
from ringtrain.torch.elastic.sampler import ElasticSampler as ElasticSampler
from ringtrain.torch.elastic.state import (
    LRSchedulerStateHandler as LRSchedulerStateHandler,
    ModelStateHandler as ModelStateHandler,
    OptimizerStateHandler as OptimizerStateHandler,
    SamplerStateHandler as SamplerStateHandler,
    StateDictHandler as StateDictHandler,
    StateHandler as StateHandler,
    TorchState as TorchState,
    get_handler_registry as get_handler_registry,
    set_handler_registry as set_handler_registry,
)

if not typing.TYPE_CHECKING:  # what checks types knows the names from the imports
    __all__, __dir__, __getattr__ = _face(globals())
