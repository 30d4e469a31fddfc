"""ringtrain for PyTorch: `import ringtrain.torch as hvd`, where a script has `import horovod.torch as hvd`.

hvd.init()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

# ruff: noqa: F403

import typing

from ringtrain.engine.handles import Handle as Handle, poll as poll, synchronize as synchronize
from ringtrain.engine.process_sets import new_group as new_group
from ringtrain.errors import StepOrderError as StepOrderError
from ringtrain.ops import (
    allgather_async as allgather_async,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    alltoall_async as alltoall_async,
    barrier as barrier,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_alltoall as grouped_alltoall,
    grouped_alltoall_async as grouped_alltoall_async,
    grouped_broadcast as grouped_broadcast,
    grouped_broadcast_ as grouped_broadcast_,
    grouped_broadcast_async as grouped_broadcast_async,
    grouped_broadcast_async_ as grouped_broadcast_async_,
    grouped_reducescatter_async as grouped_reducescatter_async,
    recv as recv,
    recv_async as recv_async,
    reducescatter_async as reducescatter_async,
    send as send,
    send_async as send_async,
)
from ringtrain.ops.faces import face as _face
from ringtrain.ops.names import *
from ringtrain.timeline.recording import start_timeline as start_timeline, stop_timeline as stop_timeline
from ringtrain.torch import (
    compiled as _compiled,
    compression as compression,
    elastic as elastic,
    functions as functions,
    mpi_ops as mpi_ops,
)
from ringtrain.torch.diloco import DiLoCo as DiLoCo
from ringtrain.torch.functions import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_object_fn as broadcast_object_fn,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
)
from ringtrain.torch.memory import empty as empty
from ringtrain.torch.ops import (
    SparseHandle as SparseHandle,
    allgather as allgather,
    allreduce as allreduce,
    alltoall as alltoall,
    broadcast as broadcast,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_reducescatter as grouped_reducescatter,
    reducescatter as reducescatter,
    sparse_allreduce_async as sparse_allreduce_async,
)
from ringtrain.torch.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    Join as Join,
    clip_grad_norm_ as clip_grad_norm_,
)
from ringtrain.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from ringtrain.training.replicas import check_replicas as check_replicas
from ringtrain.training.speed_sampler import SpeedSampler as SpeedSampler

_compiled.keep_operations_out_of_graphs()

if not typing.TYPE_CHECKING:  # what checks types knows the names from the imports
    __all__, __dir__, __getattr__ = _face(globals(), "elastic")
