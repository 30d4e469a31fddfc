"""Arrays on a device, and kernels on them."""

import math

import numpy as np

from cupy import _driver, _memory_view
from cupy.cuda.memory import MemoryPointer, alloc
from cupy.cuda.stream import get_current_stream


class _Flags:
    """CuPy's has no `writeable`: all arrays are."""

    def __init__(self, array):
        self.c_contiguous = array._c_contiguous
        self.f_contiguous = array._f_contiguous
        self.owndata = array.base is None


class ndarray:
    """An array on one device. Everything is done in the current stream, when its turn has come."""

    __module__ = "cupy"
    __array_priority__ = 100
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C", _base=None):
        self._shape = (shape,) if isinstance(shape, int) else tuple(int(length) for length in shape)
        self.dtype = np.dtype(dtype)
        self.size = math.prod(self._shape)
        self.data = alloc(self.size * self.dtype.itemsize) if memptr is None else memptr
        self._strides = _strides_of(self._shape, self.dtype.itemsize) if strides is None else tuple(strides)
        self.base = _base
        flags = self._layout().flags
        self._c_contiguous, self._f_contiguous = flags.c_contiguous, flags.f_contiguous

    # Places

    @property
    def shape(self):
        return self._shape

    @property
    def strides(self):
        return self._strides

    @property
    def ndim(self):
        return len(self._shape)

    @property
    def itemsize(self):
        return self.dtype.itemsize

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    @property
    def flags(self):
        return _Flags(self)

    @property
    def device(self):
        return self.data.device

    def _layout(self):
        """A NumPy array of the same layout at the same address, which the host must not touch."""
        return _memory_view.at(self.data.ptr, self._shape, self._strides, self.dtype)

    def _view_of(self, layout):
        offset = _memory_view.address_of(layout) - self.data.mem.ptr if layout.size else 0
        data = MemoryPointer(self.data.mem, offset)
        return ndarray(layout.shape, layout.dtype, data, layout.strides, _base=self if self.base is None else self.base)

    # Other libraries

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": get_current_stream().ptr or 1,
            "version": 3,
            "strides": None if self._c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
        }

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        from cupy import _capsule

        return _capsule.export(self, stream, is_versioned=max_version is not None and max_version[0] >= 1)

    def __dlpack_device__(self):
        return (2, self.data.device_id)

    def __array__(self, dtype=None):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
        return compute(ufunc, *inputs, **keywords) if method == "__call__" else NotImplemented

    def __reduce__(self):
        from cupy import array

        return array, (self.get(),)

    # To the host

    def get(self):
        if self.size == 0:
            return np.empty(self._shape, self.dtype)
        with self.device:
            source = self if self._c_contiguous else self.copy()
            values = np.empty(self._shape, self.dtype)
            stream = get_current_stream()
            _driver.enter_device()
            _driver.call("cuMemcpyDtoHAsync_v2", values.ctypes.data, source.data.ptr, self.nbytes, stream.ptr)
            stream.synchronize()
        return values

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def __bool__(self):
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    def __repr__(self):
        return repr(self.get())

    def __format__(self, specification):
        return format(self.get(), specification)

    # Other arrays of the same values

    def copy(self, order="C"):
        if self.data.device_id != _driver.current_device():
            return self._copy_to_current_device()
        return self.astype(self.dtype)

    def _copy_to_current_device(self):
        if not self._c_contiguous:
            raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
        target = ndarray(self._shape, self.dtype)
        _driver.call("cuMemcpyDtoDAsync_v2", target.data.ptr, self.data.ptr, self.nbytes, get_current_stream().ptr)
        return target

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if not copy and self.dtype == np.dtype(dtype):
            return self
        target = ndarray(self._shape, dtype)
        compute(lambda values: values.astype(target.dtype), self, out=target)
        return target

    def view(self, dtype=None):
        return self._view_of(self._layout() if dtype is None else self._layout().view(dtype))

    def reshape(self, *shape):
        source = self if self._c_contiguous else self.copy()
        return source._view_of(source._layout().reshape(*shape))

    def ravel(self):
        return self.reshape(-1)

    def transpose(self, *axes):
        return self._view_of(self._layout().transpose(*axes))

    @property
    def T(self):
        return self.transpose()

    def __len__(self):
        return len(self._layout())

    def __iter__(self):
        return (self[position] for position in range(len(self)))

    def __getitem__(self, key):
        if _has_arrays(key):
            keys = key if isinstance(key, tuple) else (key,)
            return compute(lambda values, *places: values[places], self, *keys)
        return self._view_of(self._layout()[_as_view(key)])

    def __setitem__(self, key, value):
        if _has_arrays(key):
            raise NotImplementedError("the stand-in assigns to slices only")
        compute(lambda values: values, value, out=self[key])

    def fill(self, value):
        self[...] = value

    # Arithmetic

    def sum(self, axis=None, dtype=None, out=None, keepdims=False):
        return compute(lambda values: values.sum(axis, dtype, keepdims=keepdims), self)

    def mean(self, axis=None, dtype=None, out=None, keepdims=False):
        return compute(lambda values: values.mean(axis, dtype, keepdims=keepdims), self)

    def max(self, axis=None, out=None, keepdims=False):
        return compute(lambda values: values.max(axis, keepdims=keepdims), self)

    def min(self, axis=None, out=None, keepdims=False):
        return compute(lambda values: values.min(axis, keepdims=keepdims), self)

    def argmax(self, axis=None, out=None, dtype=None, keepdims=False):
        return compute(lambda values: values.argmax(axis), self)

    def all(self, axis=None, out=None, keepdims=False):
        return compute(lambda values: values.all(axis, keepdims=keepdims), self)

    def any(self, axis=None, out=None, keepdims=False):
        return compute(lambda values: values.any(axis, keepdims=keepdims), self)

    def dot(self, other):
        return compute(np.dot, self, other)


def _binary(function):
    def forward(self, other):
        return compute(function, self, other)

    def backward(self, other):
        return compute(function, other, self)

    def in_place(self, other):
        return compute(function, self, other, out=self)

    return forward, backward, in_place


for _name, _function in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": np.floor_divide,
    "pow": np.power,
    "matmul": np.matmul,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}.items():
    _forward, _backward, _in_place = _binary(_function)
    setattr(ndarray, f"__{_name}__", _forward)
    setattr(ndarray, f"__r{_name}__", _backward)
    setattr(ndarray, f"__i{_name}__", _in_place)
for _name, _function in {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}.items():
    setattr(ndarray, f"__{_name}__", _binary(_function)[0])
ndarray.__neg__ = lambda self: compute(np.negative, self)
ndarray.__invert__ = lambda self: compute(np.invert, self)
ndarray.__abs__ = lambda self: compute(np.abs, self)


def compute(function, *arguments, out=None, **keywords):
    """Makes the current stream apply a function of NumPy arrays; returns the array that the result will be in.

    Which dtype and shape it will have the function itself says, asked with zeros at once.
    """
    if isinstance(out, tuple):
        (out,) = out
    for one in arguments:
        _require_usable(one)
    if out is None:
        shape, dtype = _kind_of_result(function, arguments, keywords)
        out = ndarray(shape, dtype)
    _require_usable(out)
    places = [_Place(one) if isinstance(one, ndarray) else one for one in arguments]
    target = _Place(out)

    def kernel():
        with np.errstate(all="ignore"):
            values = [one.host_array() if isinstance(one, _Place) else one for one in places]
            target.host_array()[...] = function(*values, **keywords)

    if out.size:
        _driver.launch(get_current_stream().ptr, kernel)
    return out


class _Place:
    """An array as a kernel gets it: only where it is. Its memory may be given to others in the same stream."""

    def __init__(self, array):
        self._layout = (array._shape, array._strides, array.dtype)
        self._first = array.data.ptr
        steps = [(length - 1) * stride for length, stride in zip(array._shape, array._strides, strict=True)]
        self._begin = self._first + sum(step for step in steps if step < 0)
        self._end = self._first + sum(step for step in steps if step > 0) + array.itemsize
        self._is_empty = array.size == 0

    def host_array(self):
        if self._is_empty:
            return _memory_view.at(0, *self._layout)
        begin = _driver.host_view(self._begin, self._end - self._begin)
        return _memory_view.at(begin + self._first - self._begin, *self._layout)


def _require_usable(argument):
    if isinstance(argument, np.ndarray):
        raise TypeError(f"Unsupported type {type(argument)}")
    if isinstance(argument, ndarray) and argument.data.device_id != _driver.current_device():
        raise ValueError(
            f"Array device must be same as the current device: array device = {argument.data.device_id} while current "
            f"= {_driver.current_device()}"
        )


def _kind_of_result(function, arguments, keywords):
    zeros = [
        np.broadcast_to(np.zeros((), one.dtype), one.shape) if isinstance(one, ndarray) else one for one in arguments
    ]
    with np.errstate(all="ignore"):
        result = np.asarray(function(*zeros, **keywords))
    return result.shape, result.dtype


def _has_arrays(key):
    return any(isinstance(one, (ndarray, np.ndarray, list)) for one in (key if isinstance(key, tuple) else (key,)))


def _as_view(key):
    """The key in a form that gives a view of no dimension where NumPy would give a number."""
    keys = key if isinstance(key, tuple) else (key,)
    return keys if Ellipsis in keys else (*keys, Ellipsis)


def _strides_of(shape, itemsize):
    strides = []
    for length in reversed(shape):
        strides.insert(0, itemsize)
        itemsize *= max(length, 1)
    return tuple(strides)
