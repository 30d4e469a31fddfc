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
from ringtrain.ops.faces import face as _face

if not typing.TYPE_CHECKING:  # what checks types knows the names from the imports
    __all__, __dir__, __getattr__ = _face(globals())

_serve_if_told()  # does not return in a server or the scheduler
