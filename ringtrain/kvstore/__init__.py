"""Key-value stores: push gradients, pull weights. Mirrors `mxnet.kvstore`.

from ringtrain import kvstore

kv = kvstore.create("dist_sync")
kv.init(3, weights)
kv.push(3, gradient)
kv.pull(3, out=weights)

store        what users call: create, KVStore and its checks, stores of your own
backend      what carries out the calls of a KVStore: in one process, and in many workers by allreduce
served       the backend of many workers, with servers
entries      the types, the keys that have values, and what fits them
row_sparse   some rows of a value
places       copies and sums of arrays anywhere
gradient_compression
             gradients in fewer bits
updaters     what updates values, on this worker or on servers
update_rules the formulas of built-in optimizers
state_files  what a store keeps, in files
trainer      a training of PyTorch's parameters, and shares of the data
servers/     workers, servers and their scheduler
"""

import inspect
import typing

from ringtrain.kvstore.row_sparse import RowSparse as RowSparse
from ringtrain.kvstore.servers.server import run_server as run_server, serve_if_told as _serve_if_told
from ringtrain.kvstore.store import KVStore as KVStore, KVStoreBase as KVStoreBase, Pushes as Pushes, create as create
from ringtrain.kvstore.trainer import (
    Trainer as Trainer,
    part as part,
    split_and_load as split_and_load,
    split_data as split_data,
)

if not typing.TYPE_CHECKING:  # what checks types knows them from the imports
    # Every name above, but none of the modules that importing them has left here.
    __all__ = sorted(name for name, it in globals().items() if not name.startswith("_") and not inspect.ismodule(it))

    def __dir__() -> list[str]:
        """Lists the public names, which completion shows."""
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


_serve_if_told()  # does not return in a server or the scheduler
