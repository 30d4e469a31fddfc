"""Tensors of PyTorch without a GPU, on the fake driver, for a PyTorch that was built for CPUs.

    @pytest.mark.ranks(2, env=GPU)  # and the module imports exact_torch_gpu, which calls `pretend`

A `GpuTensor` says that it is on a CUDA device and is in the memory of the fake. Computations with it are put
into the current stream of the stand-in for CuPy and done by PyTorch on the CPU when its turn has come; memory goes back
to the stream from which it came. So addresses, streams, and what goes through the host are as on a GPU.

There is no backward(): autograd asks a build for CPUs for the streams of CUDA and ends the process. `backward` calls
the hooks of parameters in its place. Nothing here shows what PyTorch's own CUDA does: its allocator, the streams of
autograd's threads, GradScaler, fused optimizers, CUDA graphs, indices in brackets. test/gpu/real/ is for these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.backward import backward_pass
from harness.gpu_arrays import cupy
from ringtrain.arrays.dlpack import _Tensor as DLTensor

Result = TypeVar("Result")
_held: list[tuple[Any, Any]] = []  # memory that other streams still use, and where they end to do so


class _Memory:
    """Of one tensor and its views, on the current device."""

    def __init__(self, size: int) -> None:
        _held[:] = [entry for entry in _held if not entry[1].done]
        self.place = cupy.cuda.memory.alloc(size)
        self.size = size
        self._streams: set[Any] = set()

    def used_in(self, stream: Any) -> None:
        self._streams.add(stream)

    def __del__(self) -> None:
        for stream in getattr(self, "_streams", ()):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(stream)
            _held.append((self.place, event))


class GpuTensor(torch.Tensor):
    """Its layout is a tensor on the meta device, which knows all about views."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, layout: torch.Tensor, memory: _Memory) -> GpuTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            layout.shape,
            strides=layout.stride(),
            storage_offset=layout.storage_offset(),
            dtype=layout.dtype,
            device=f"cuda:{memory.place.device_id}",
        )

    def __init__(self, layout: torch.Tensor, memory: _Memory) -> None:
        self._layout, self._memory = layout, memory
        self._hooks: list[Any] = []

    def data_ptr(self) -> int:
        return int(self._memory.place.ptr) + self._layout.storage_offset() * self.dtype.itemsize if self.numel() else 0

    # The methods below would ask for CUDA before they come to `__torch_dispatch__`.

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=memory_format)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.detach().clone()

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def copy_(self, source: torch.Tensor) -> torch.Tensor:
        torch.autograd.graph.increment_version(self)
        return _on_gpu(torch.ops.aten.copy_.default, (self, source), {})

    def record_stream(self, stream: Any) -> None:
        self._memory.used_in(stream.of_double)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        self._hooks.append(hook)
        return SimpleNamespace(remove=lambda: self._hooks.remove(hook))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        goes_to_host = torch.device(kwargs.pop("device", None) or "cuda").type == "cpu"
        changes_host = func is torch.ops.aten.copy_.default and not isinstance(args[0], GpuTensor)
        if goes_to_host or changes_host or func is torch.ops.aten._local_scalar_dense.default:
            return _on_host(func, args, kwargs)
        return _on_gpu(func, args, kwargs)


def _on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that return a number or a tensor of the CPU wait for the current stream."""
    cupy.cuda.get_current_stream().synchronize()
    return func(*tree_map_only(GpuTensor, _host_copy, args), **kwargs)


def _host_copy(tensor: GpuTensor) -> torch.Tensor:
    return _Place(tensor).tensor().clone()


def _on_gpu(func: Any, args: Any, kwargs: Any) -> Any:
    results = [returned.alias_info for returned in func._schema.returns]
    changes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
    layouts = func(*tree_map_only(torch.Tensor, _layout_of, args), **tree_map_only(torch.Tensor, _layout_of, kwargs))
    if changes:
        _launch(func, args, kwargs, None)
        return args[0] if results else None
    if any(alias is not None for alias in results):
        return tree_map_only(torch.Tensor, lambda layout: GpuTensor(layout, args[0]._memory), layouts)
    made = tree_map_only(torch.Tensor, _new, layouts)
    _launch(func, args, kwargs, made)
    return made


def _new(layout: torch.Tensor) -> GpuTensor:
    return GpuTensor(layout, _Memory(layout.untyped_storage().nbytes()))


def _layout_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._layout if isinstance(tensor, GpuTensor) else tensor.to("meta")


class _Place:
    """A tensor as a kernel gets it: only where it is. Its memory may be given to others in the same stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        is_on_gpu = isinstance(tensor, GpuTensor)
        self._layout = tensor._layout if is_on_gpu else tensor.clone()
        self._address, self._size = (tensor._memory.place.ptr, tensor._memory.size) if is_on_gpu else (0, 0)

    def tensor(self) -> torch.Tensor:
        is_on_gpu = self._layout.is_meta
        return _host_view(self._address, self._size, self._layout) if is_on_gpu else self._layout


def _host_view(address: int, size: int, layout: torch.Tensor) -> torch.Tensor:
    """Returns what the fake keeps there."""
    if size == 0:
        return torch.empty_like(layout, device="cpu")
    content = (ctypes.c_char * size).from_address(cupy._driver.host_view(address, size))
    whole = torch.frombuffer(content, dtype=torch.uint8).view(layout.dtype)
    return whole.as_strided(layout.shape, layout.stride(), layout.storage_offset())


def _launch(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    """Put a function into the current stream; `made`: where its results go, None for one that changes its tensors."""
    places = tree_map_only(torch.Tensor, _Place, (args, kwargs, made))
    is_new = made is not None

    def kernel() -> None:
        of_host, named, targets = tree_map_only(_Place, _Place.tensor, places)
        with torch.no_grad():
            results = func(*of_host, **named)
            if is_new:
                for target, result in zip(tree_leaves(targets), tree_leaves(results), strict=True):
                    target.copy_(result)

    cupy._driver.launch(cupy.cuda.get_current_stream().ptr, kernel)


def to_gpu(tensor: torch.Tensor) -> GpuTensor:
    """A copy on the current device."""
    made = _new(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
    _launch(torch.ops.aten.copy_.default, (made, tensor), {}, None)
    return made


def backward(parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
    """Give the parameters their gradients, and call the hooks as autograd would."""
    with backward_pass():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            for hook in list(parameter._hooks):
                hook(parameter)


# DLPack's exchange API, as a PyTorch for CUDA has it of its tensors.

_GPU = 2  # kDLCUDA
_CODES = {torch.bool: 6, torch.bfloat16: 4}  # DLDataTypeCode, where it is not that of all numbers of the kind
_Look = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
_FindStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


@_Look
def _look(tensor: GpuTensor, seen: Any) -> int:
    shape, strides = tensor.shape, tensor.stride()
    tensor._seen = [(ctypes.c_int64 * len(each))(*each) for each in (shape, strides)]  # type: ignore[attr-defined]
    dtype = tensor.dtype
    kind = 2 if dtype.is_floating_point else 5 if dtype.is_complex else 0 if dtype.is_signed else 1
    table = seen.contents
    table.data, table.byte_offset, table.ndim = tensor.data_ptr(), 0, len(shape)
    table.device_type, table.device_id = _GPU, tensor.get_device()
    table.dtype.code, table.dtype.bits, table.dtype.lanes = _CODES.get(dtype, kind), 8 * dtype.itemsize, 1
    table.shape, table.strides = tensor._seen  # type: ignore[attr-defined]
    return 0


@_FindStream
def _find_stream(device_type: int, device: int, stream: Any) -> int:
    assert device_type == _GPU
    stream[0] = cupy.cuda.get_current_stream(device).ptr or None
    return 0


class _ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI. Functions that ringtrain does not call are null."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("look", _Look),
        ("find_stream", _FindStream),
    )


_exchange_api = _ExchangeApi(major=1, minor=3, look=_look, find_stream=_find_stream)
_capsule_name = b"dlpack_exchange_api"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
GpuTensor.__dlpack_c_exchange_api__ = _new_capsule(  # type: ignore[attr-defined]
    ctypes.addressof(_exchange_api), _capsule_name, None
)


_to_within_cpu = torch.Tensor.to


def _to(tensor: torch.Tensor, target: Any = None, *, dtype: Any = None, device: Any = None, **how: Any) -> torch.Tensor:
    """torch.Tensor.to, which would ask for CUDA."""
    dtype, device = (target, device) if isinstance(target, torch.dtype) else (dtype, target or device)
    device = tensor.device if device is None else torch.device(device)
    dtype = dtype or tensor.dtype
    if device.type != "cuda":
        return _to_within_cpu(tensor, device, dtype, **how)
    if tensor.is_cuda:
        return _to_within_cpu(tensor, dtype, **how)
    with cupy.cuda.Device(device.index):
        return to_gpu(_to_within_cpu(tensor, dtype))


class _Future(torch.futures.Future[Result]):
    """A Future with devices, which a PyTorch for CPUs refuses: it orders the streams as that of a PyTorch for CUDA.

    That notes the current streams of the devices that tensors of its value are on, and of no other.
    """

    def __init__(self, *, devices: list[torch.device] | None = None) -> None:
        super().__init__()
        self._devices = devices or []
        self._events: list[tuple[int, Any]] = []  # of the device of this number

    def set_result(self, result: Result) -> None:
        used = {one.device.index for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.is_cuda}
        for index in used:
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.get_current_stream(index))
            self._events.append((index, event))
        super().set_result(result)

    def _follow(self) -> None:
        for index, event in self._events:
            cupy.cuda.get_current_stream(index).wait_event(event)

    def wait(self) -> Result:
        value = super().wait()
        self._follow()
        return value

    def then(self, callback: Any) -> torch.futures.Future[Any]:
        if not self._devices:
            return super().then(callback)
        after = _Future(devices=self._devices)

        def call(_: Any) -> None:
            with ExitStack() as streams:
                for device in self._devices:
                    streams.enter_context(_stream(_Stream(device)))
                self._follow()
                try:
                    after.set_result(callback(self))
                except Exception as error:
                    after.set_exception(error)

        self.add_done_callback(call)
        return after


class _Stream:
    """Another one than any other."""

    def __init__(self, device: torch.device) -> None:
        with cupy.cuda.Device(device.index):
            self.of_double = cupy.cuda.Stream(non_blocking=True)


@contextmanager
def _stream(stream: _Stream) -> Iterator[None]:
    with cupy.cuda.Device(stream.of_double.device_id), stream.of_double:
        yield


class _Event:
    def __init__(self) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)

    def record(self, stream: Any) -> None:
        self._event.record(stream.of_double)

    def query(self) -> bool:
        return bool(self._event.done)


def pretend() -> None:
    """Makes this process's PyTorch make tensors "on CUDA", in the streams of the stand-in for CuPy."""
    of_cpu = {"empty": torch.empty, "tensor": torch.tensor}

    def made_by(function: Any) -> Any:
        def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            if device is None or torch.device(device).type != "cuda":
                return function(*args, device=device, **kwargs)
            with cupy.cuda.Device(torch.device(device).index):
                return to_gpu(function(*args, **kwargs))

        return make

    for name, function in of_cpu.items():
        setattr(torch, name, made_by(function))
    torch.Tensor.to = _to  # type: ignore[assignment, method-assign]
    torch.version.cuda = "13.0"
    from ringtrain.arrays import torch as adapter  # looks for CUDA when it is imported

    adapter.PLAIN_TYPES.add(GpuTensor)
    torch.cuda.current_stream = _current_stream  # type: ignore[assignment]
    torch.cuda.Event = _Event  # type: ignore[misc, assignment]
    torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
    torch.cuda.stream = _stream  # type: ignore[misc, assignment]
    torch.cuda.get_device_capability = lambda device: (8, 0)  # type: ignore[misc, assignment]
    torch.futures.Future = _Future  # type: ignore[misc, assignment]
    torch.cuda.device = lambda device: cupy.cuda.Device(device.index)  # type: ignore[misc, assignment]


def _current_stream(device: torch.device | int) -> Any:
    number = device if isinstance(device, int) else device.index
    stream = cupy.cuda.get_current_stream(number)
    return SimpleNamespace(cuda_stream=stream.ptr, of_double=stream)
