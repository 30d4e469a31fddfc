"""ringtrain for JAX: operations over the ranks inside jit.

import ringtrain.jax as hvd

hvd.init()
params = hvd.broadcast_parameters(params, root_rank=0)
optimizer = hvd.distribute(optax.adam(1e-3))

ffi              what of the core XLA calls
primitives       the operations as primitives, under grad and under vmap
transfers        messages between two ranks, the same
waits            which threads wait in programs
lowering         ... inside a compiled program: their order, loops and conditions, the end of the job
trees            pytrees as lists with names, and the same parameters on every rank
ops              the operations on pytrees
messages         messages of pytrees between two ranks
optimizer        optimizers and gradients over all ranks
failures         exceptions out of compiled programs
elastic          states that outlive ranks
distributed      JAX's own sharding over the ranks
"""

# ruff: noqa: F403

import os
import typing

import ringtrain._core as _core

# jaxlib looks once, when it is loaded, for the library that carries XLA's own collectives.
os.environ.setdefault("MPITRAMPOLINE_LIB", _core.__file__)

from ringtrain.jax import distributed as distributed, elastic as elastic, ffi, lowering, primitives, transfers
from ringtrain.jax.diloco import DiLoCo as DiLoCo
from ringtrain.jax.exceptions import error_of as error_of, errors as errors
from ringtrain.jax.messages import recv as recv, send as send, sendrecv as sendrecv
from ringtrain.jax.ops import (
    allgather as allgather,
    allreduce as allreduce,
    alltoall as alltoall,
    barrier as barrier,
    barrier_on as barrier_on,
    broadcast as broadcast,
    gather as gather,
    grouped_allreduce as grouped_allreduce,
    reduce as reduce,
    reducescatter as reducescatter,
    scan as scan,
    scatter as scatter,
)
from ringtrain.jax.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    distribute as distribute,
    grad as grad,
    value_and_grad as value_and_grad,
)
from ringtrain.jax.trees import (
    broadcast_parameters as broadcast_parameters,
    check_replicas as check_replicas,
)
from ringtrain.ops.faces import face as _face
from ringtrain.ops.names import *
from ringtrain.ops.objects import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_object_fn as broadcast_object_fn,
)
from ringtrain.timeline.recording import start_timeline as start_timeline, stop_timeline as stop_timeline
from ringtrain.training.speed_sampler import SpeedSampler as SpeedSampler

for _part in (ffi, primitives, transfers, lowering):
    _part.register()

if not typing.TYPE_CHECKING:  # what checks types knows the names from the imports
    __all__, __dir__, __getattr__ = _face(globals(), "distributed", "elastic")
