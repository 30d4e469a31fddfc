"""ringtrain for MXNet 1.x: `import ringtrain.mxnet as hvd`, where a script has `import horovod.mxnet as hvd`.

hvd.init()
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

library     the MXNet that is there
engine      operations that MXNet's engine begins
operations  these, with Horovod's arguments
trainer     averages of a step's gradients, for Module and for Gluon
parameters  the same parameters, optimizer state and objects on all ranks
stores      for MXNet's Trainer, Module and mx.kv
"""

# ruff: noqa: F403

import typing

import ringtrain.kvstore as _kvstore  # noqa: F401  a server stays in here, and loads optimizers that import this package

# isort: split
from ringtrain.mxnet import library as library  # before anything that imports MXNet

# isort: split
from ringtrain.errors import StepOrderError as StepOrderError
from ringtrain.mxnet.operations import (
    allgather as allgather,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    alltoall as alltoall,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_reducescatter as grouped_reducescatter,
    reducescatter as reducescatter,
    synchronize as synchronize,
)
from ringtrain.mxnet.parameters import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
)
from ringtrain.mxnet.stores import replace_kvstore as replace_kvstore
from ringtrain.mxnet.trainer import (
    DistributedOptimizer as DistributedOptimizer,
    DistributedTrainer as DistributedTrainer,
)
from ringtrain.ops import (
    barrier as barrier,
)
from ringtrain.ops.faces import face as _face
from ringtrain.ops.names import *
from ringtrain.timeline.recording import start_timeline as start_timeline, stop_timeline as stop_timeline
from ringtrain.training.replicas import check_replicas as check_replicas
from ringtrain.training.speed_sampler import SpeedSampler as SpeedSampler

if not typing.TYPE_CHECKING:  # what checks types knows the names from the imports
    __all__, __dir__, __getattr__ = _face(globals())
