"""The names that every package of a framework shares, which each takes with `from ringtrain.ops.names import *`."""

from ringtrain.engine.compression import Compression as Compression, Compressor as Compressor
from ringtrain.engine.handles import time_limit as time_limit
from ringtrain.engine.process_sets import (
    ProcessSet as ProcessSet,
    add_process_set as add_process_set,
    get_process_set_ids_and_ranks as get_process_set_ids_and_ranks,
    global_process_set as global_process_set,
    remove_process_set as remove_process_set,
)
from ringtrain.errors import (
    DeadlockError as DeadlockError,
    HorovodInternalError as HorovodInternalError,
    MismatchError as MismatchError,
    NonFiniteError as NonFiniteError,
    NotInitializedError as NotInitializedError,
    PeerLostError as PeerLostError,
    RemoteError as RemoteError,
    ReplicaError as ReplicaError,
    RingtrainError as RingtrainError,
    ShutDownError as ShutDownError,
    StalledError as StalledError,
)
from ringtrain.job.session import (
    ccl_built as ccl_built,
    cross_rank as cross_rank,
    cross_size as cross_size,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    init as init,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rank as rank,
    rocm_built as rocm_built,
    shutdown as shutdown,
    size as size,
)
from ringtrain.ops import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
    join as join,
)
from ringtrain.ops.preemption import exit_preempted as exit_preempted, preempted as preempted
from ringtrain.record.metrics import metrics as metrics
