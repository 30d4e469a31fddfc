"""Callbacks of an operation that is done, called by the thread that finishes it."""

import ctypes
import threading
import time

import numpy as np
import pytest

import ringtrain as hvd
from ringtrain import _core
from ringtrain.arrays import numpy as numpy_adapter

_libc = ctypes.CDLL(None)
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def address_of(function):
    return ctypes.cast(function, ctypes.c_void_p).value


class Calls:
    """Counts calls of a C function, for which nobody takes the GIL: a semaphore of the C library."""

    def __init__(self):
        self._semaphore = ctypes.create_string_buffer(64)
        _libc.sem_init(self._semaphore, 0, 0)

    def count_when_done(self, handle):
        handle.on_done(address_of(_libc.sem_post), ctypes.addressof(self._semaphore))

    @property
    def number(self):
        value = ctypes.c_int()
        _libc.sem_getvalue(self._semaphore, ctypes.byref(value))
        return value.value

    def come_to(self, number):
        """Whether there are so many, now or in a moment, and stay so many."""
        deadline = time.monotonic() + 10
        while self.number < number and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(0.02)
        return self.number == number


def submit(array, name, process_set=0):
    view = numpy_adapter.view(array)
    return _core.allreduce_in_place(view, name, hvd.Sum, 1.0, 1.0, process_set, 0, False, _core.Site("here"))


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_callbacks_are_called_once_when_the_operation_is_done():
    ones, calls = np.ones(3), Calls()
    if hvd.rank() == 0:
        handle = submit(ones, "x")
        calls.count_when_done(handle)
        calls.count_when_done(handle)
        assert hvd.size() == 1 or calls.number == 0
    hvd.barrier()
    if hvd.rank() != 0:
        handle = submit(ones, "x")
    assert _core.wait(handle, 10)
    assert calls.come_to(2 if hvd.rank() == 0 else 0)
    calls.count_when_done(handle)
    assert calls.come_to(3 if hvd.rank() == 0 else 1)
    assert ones.tolist() == [hvd.size()] * 3


@pytest.mark.ranks(1)
def test_a_callback_is_called_without_the_gil():
    handle = submit(np.ones(3), "x")
    assert _core.wait(handle, 10)
    ticks = []
    ticker = threading.Thread(target=lambda: [ticks.append(time.sleep(0.01)) for _ in range(20)])
    ticker.start()
    handle.on_done(address_of(_libc.usleep), 400_000)
    assert len(ticks) == 20
    ticker.join()


@pytest.mark.ranks(2)
def test_a_callback_may_submit():
    first, second, handles = np.ones(3), np.ones(5), []
    callback = _Callback(lambda _: handles.append(submit(second, "second")))
    handle = submit(first, "first")
    handle.on_done(address_of(callback), 0)
    assert _core.wait(handle, 10)
    deadline = time.monotonic() + 10
    while not handles and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert _core.wait(handles[0], 10)
    assert second.tolist() == [2] * 5


@pytest.mark.ranks(2)
def test_a_callback_may_not_wait():
    first, second, errors = np.ones(3), np.ones(5), []
    of_second = submit(second, "second") if hvd.rank() == 0 else None

    def wait(_):
        try:
            _core.wait(of_second, 10)
        except Exception as error:
            errors.append(error)

    callback = _Callback(wait)
    if hvd.rank() == 0:
        of_first = submit(first, "first")
        of_first.on_done(address_of(callback), 0)
    hvd.barrier()
    if hvd.rank() == 1:
        of_first = submit(first, "first")
    assert _core.wait(of_first, 10)
    hvd.barrier()
    if hvd.rank() == 1:
        of_second = submit(second, "second")
    assert _core.wait(of_second, 10)
    assert ["must not wait" in str(error) for error in errors] == [True] * (1 - hvd.rank())


def _errors_of_submissions_in_callbacks(handle, process_set=0):
    """One for each call, when the operation has failed."""
    errors = []

    def resubmit(_):
        try:
            submit(np.ones(3), "again", process_set)
        except Exception as error:
            errors.append(error)

    callback = _Callback(resubmit)
    handle.on_done(address_of(callback), 0)
    with pytest.raises(hvd.RingtrainError):
        _core.wait(handle, 10)
    deadline = time.monotonic() + 10
    while not errors and time.monotonic() < deadline:
        time.sleep(1e-3)
    return errors, callback


@pytest.mark.ranks(3)
def test_callbacks_are_called_when_the_process_set_is_removed():
    of_two = hvd.add_process_set([0, 1])
    number = of_two.process_set_id
    removing = threading.Thread(target=hvd.remove_process_set, args=(of_two,))
    handle = submit(np.ones(3), "pending", number) if hvd.rank() == 0 else None
    hvd.barrier()
    removing.start()
    if hvd.rank() == 0:
        errors, _ = _errors_of_submissions_in_callbacks(handle, number)
        assert [type(error) for error in errors] == [ValueError]
    removing.join(10)
    assert not removing.is_alive()


@pytest.mark.ranks(2, initialised=False)
def test_callbacks_are_called_when_another_rank_leaves():
    hvd.init()
    handle = submit(np.ones(3), "pending") if hvd.rank() == 0 else None
    hvd.barrier()
    if handle is not None:
        errors, _ = _errors_of_submissions_in_callbacks(handle)
        assert [type(error) for error in errors] == [hvd.ShutDownError]
    hvd.shutdown()
