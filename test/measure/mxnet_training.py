"""A model of MXNet's zoo in training: the same weights in the beginning, and the same batch in each step, for all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import mxnet
import numpy as np
from mxnet import autograd, gluon

import ringtrain.mxnet as hvd
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.rounds import ALONE

PS_LITE = "gluon.Trainer, dist_sync on ps-lite"
OF_STORE = f"gluon.Trainer, {ringtrain_competitor.NAME}'s store"
_CLASSES = 1000
_SGD = {"learning_rate": 1e-3, "momentum": 0.9}
_TOLERANCE = 1e-3  # of a step's change of the weights, relative

Step = Callable[[], None]


def kinds(has_servers: bool) -> list[str]:
    """The ways in which a step is taken."""
    return [ringtrain_competitor.NAME, ALONE, OF_STORE, *([PS_LITE] if has_servers else [])]


class Task:
    """A model, and the batch of this rank."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        random = np.random.default_rng(1 + hvd.rank())
        size = arguments.image_size
        self._name, self._batch = name, arguments.batch_size
        self._images = mxnet.nd.array(random.standard_normal((self._batch, 3, size, size)))
        self._labels = mxnet.nd.array(random.integers(0, _CLASSES, self._batch))
        self._nets: dict[str, Any] = {}
        parameters = [one.data() for one in self._build().collect_params().values() if one.grad_req != "null"]
        sizes = [one.size * np.dtype(one.dtype).itemsize for one in parameters]
        self.key = {"model": name, "tensors": len(sizes), "bytes": sum(sizes), "inputs": list(self._images.shape)}

    def _build(self) -> Any:
        mxnet.random.seed(0)
        net = gluon.model_zoo.vision.get_model(self._name, classes=_CLASSES)
        net.initialize(mxnet.init.Xavier())
        net.hybridize(static_alloc=True, static_shape=True)
        net(self._images).wait_to_read()
        return net

    def train(self, kind: str) -> Step:
        """A copy of the model: what is returned trains it for one step, and waits for that."""
        net = self._nets[kind] = self._build()
        parameters = net.collect_params()
        hvd.broadcast_parameters(parameters, prefix=f"{kind}.")
        loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
        divisor = self._batch
        if kind == ringtrain_competitor.NAME:
            trainer = hvd.DistributedTrainer(parameters, "sgd", _SGD)
        elif kind == ALONE:
            trainer = gluon.Trainer(parameters, "sgd", _SGD, kvstore=None)
        else:
            store = "dist_sync" if kind == PS_LITE else "ringtrain"
            trainer = gluon.Trainer(parameters, "sgd", _SGD, kvstore=store)
            divisor *= hvd.size()

        def step() -> None:
            with autograd.record():
                loss = loss_of(net(self._images), self._labels)
            loss.backward()
            trainer.step(divisor)
            mxnet.nd.waitall()

        return step

    def check(self, runs: Mapping[str, Step]) -> None:
        """Take a step of each. Raises RuntimeError if one of those that communicate computes something else."""
        weights: dict[str, Any] = {}
        for kind, run in runs.items():
            before = self._weights(kind)
            run()
            weights[kind] = self._weights(kind) - before
        right = weights[ringtrain_competitor.NAME]
        of_all = hvd.allgather_object(float(np.square(right).sum()))
        for kind, change in weights.items():
            distance = float(np.square(change - right).sum())
            if kind != ALONE and not distance <= _TOLERANCE**2 * of_all[0]:
                raise RuntimeError(f"{kind} computes a wrong result")

    def _weights(self, kind: str) -> Any:
        parameters = self._nets[kind].collect_params().values()
        return np.concatenate([one.data().asnumpy().ravel() for one in parameters if one.grad_req != "null"])
