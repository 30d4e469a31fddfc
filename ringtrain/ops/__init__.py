"""Every operation over several ranks, once, for any array.

The names, arguments and results are those of Horovod 0.28. Common to all:

- `tensor`: a dense array of any shape, or a number; `tensors`: a list of them, which are carried out together or not
  at all. dtypes: bool, (u)int8, (u)int16, (u)int32, (u)int64, float16, bfloat16, float32, float64, complex64 and
  complex128; sums of 16-bit floats are made in float32. Complex numbers travel as pairs of real ones, along a last
  dimension of 2 that errors show. An array that is not contiguous is copied on its way. A result is an array of the
  same library and on the same device; of a number it is one of NumPy's of shape ().
- `name`: ranks are matched by it, in any order of submission. Operations without a name are matched by their order
  within their process set, so one thread submits them; several threads give names.
- `process_set`: the ranks that take part; all of them call the operation.
- `..._async` returns a Handle at once, to be given to `synchronize`; the arrays must not be changed until then. `..._`
  writes the result over the input.
- Raised by the call: NotInitializedError; ValueError for a name that is in flight, a process set without this rank, and
  bad arguments; TypeError for an unsupported object or dtype. Raised when waiting: MismatchError if the ranks disagree,
  PeerLostError, RemoteError, StalledError, ShutDownError.
"""

from ringtrain.engine.handles import (
    poll as poll,
    synchronize as synchronize,
)
from ringtrain.ops.exchanges import (
    allgather as allgather,
    allgather_async as allgather_async,
    alltoall as alltoall,
    alltoall_async as alltoall_async,
    barrier as barrier,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    grouped_allgather as grouped_allgather,
    grouped_allgather_async as grouped_allgather_async,
    grouped_alltoall as grouped_alltoall,
    grouped_alltoall_async as grouped_alltoall_async,
    grouped_broadcast as grouped_broadcast,
    grouped_broadcast_ as grouped_broadcast_,
    grouped_broadcast_async as grouped_broadcast_async,
    grouped_broadcast_async_ as grouped_broadcast_async_,
    join as join,
)
from ringtrain.ops.messages import (
    recv as recv,
    recv_async as recv_async,
    send as send,
    send_async as send_async,
)
from ringtrain.ops.reductions import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_reducescatter as grouped_reducescatter,
    grouped_reducescatter_async as grouped_reducescatter_async,
    reducescatter as reducescatter,
    reducescatter_async as reducescatter_async,
)
