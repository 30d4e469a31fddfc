"""The exact data of `exact.py` as PyTorch tensors on the rank's own GPU; on the fakes, as harness/gpu_tensors.py.

The names are those of `exact_cupy.py`, so that `gpu_checks.py` can take either.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from exact_torch import array_of, require_equal, tensor_of
from harness import gpu_double
from harness.frameworks import on_demand

import ringtrain as hvd

torch = on_demand("torch")

if gpu_double.is_used():
    import exact_cupy
    from harness import gpu_tensors

    gpu_tensors.pretend()
    use_own_gpu, keep_busy, new_stream = exact_cupy.use_own_gpu, exact_cupy.keep_busy, exact_cupy.new_stream
    synchronize, is_done, device_count = exact_cupy.synchronize, exact_cupy.is_done, exact_cupy.device_count
    wait_for = exact_cupy.wait_for
    backward, _to_gpu = gpu_tensors.backward, gpu_tensors.to_gpu
else:

    def device_count() -> int:
        return torch.cuda.device_count()

    def use_own_gpu() -> None:
        """From now on tensors of this thread are made on the GPU of this rank."""
        torch.cuda.set_device(hvd.local_rank() % device_count())

    def keep_busy(seconds: float) -> None:
        """Put a kernel into the current stream that takes so long, or longer."""
        torch.cuda._sleep(int(seconds * 2.5e9))  # cycles; no GPU counts faster

    def new_stream() -> AbstractContextManager[Any]:
        """Current within `with`."""
        return torch.cuda.stream(torch.cuda.Stream())

    def synchronize() -> None:
        """Wait on the host for the current stream."""
        torch.cuda.current_stream().synchronize()

    def is_done() -> bool:
        """Whether nothing is left to do in the current stream."""
        return torch.cuda.current_stream().query()

    def wait_for(stream: Any) -> None:
        """Makes the current stream wait for another one."""
        torch.cuda.current_stream().wait_stream(stream.stream)

    def backward(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Makes autograd give the parameters these gradients."""
        products = [(one * gradient).sum() for one, gradient in zip(parameters, gradients, strict=True)]
        torch.stack(products).sum().backward()

    def _to_gpu(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda()


def on_gpu(array: Any) -> torch.Tensor:
    """A copy on this rank's GPU."""
    use_own_gpu()
    return _to_gpu(tensor_of(np.asarray(array)))


def empty(count: int, dtype: str) -> torch.Tensor:
    """A new tensor, full of rubbish."""
    return torch.empty(count, dtype=getattr(torch, dtype), device="cuda").fill_(77)


def require_on_gpu(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless it is a tensor on this rank's GPU of the same dtype, shape and elements."""
    assert isinstance(actual, torch.Tensor) and actual.is_cuda, f"{type(actual)} instead of a tensor on a GPU"
    assert actual.get_device() == hvd.local_rank() % device_count()
    require_equal(array_of(actual.detach().cpu()), np.asarray(expected))
