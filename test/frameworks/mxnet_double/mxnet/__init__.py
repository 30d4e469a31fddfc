"""A double of the part of MXNet that the benchmark calls: its store adds up by an allreduce.

Server and scheduler do nothing but write down, in the folder MXNET_DOUBLE, which variables they were given.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

if os.environ["DMLC_ROLE"] != "worker":
    folder = Path(os.environ["MXNET_DOUBLE"])
    (folder / f"{os.environ['DMLC_ROLE']}.{os.getpid()}").write_text(json.dumps(dict(os.environ)))
    sys.exit()

import ringtrain as hvd


class NDArray:
    def __init__(self, values):
        self.values = np.array(values)

    def __setitem__(self, where, values):
        self.values[where] = values

    def asnumpy(self):
        return self.values

    def wait_to_read(self):
        pass


class Store:
    def __init__(self):
        self.pushed = {}
        self.sgd = None

    def set_optimizer(self, sgd):
        self.sgd = sgd

    def init(self, key, value):
        self.pushed[key] = value

    def push(self, key, value, priority):
        self.pushed[key] = value

    def pull(self, key, out, priority):
        assert priority == -key
        # As MXNet does, it overwrites what was pushed, too.
        hvd.allreduce_(self.pushed[key].values, op=hvd.Sum, name=f"double/{key}")
        if self.sgd is None:
            out[:] = self.pushed[key].values
        else:  # a first push alone: there is no momentum yet
            out[:] = -self.sgd["learning_rate"] * self.pushed[key].values


class kv:
    @staticmethod
    def create(kind):
        assert kind == "dist_sync"
        return Store()


class optimizer:
    @staticmethod
    def create(name, **numbers):
        assert name == "sgd"
        return numbers


class nd:
    array = NDArray

    @staticmethod
    def zeros(shape):
        return NDArray(np.zeros(shape, np.float32))

    @staticmethod
    def waitall():
        pass
