"""The kernels of each instruction set against formulas in NumPy and Python, bit for bit."""

import ctypes
import mmap
import platform

import ml_dtypes
import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd
from ringtrain import _core
from ringtrain.arrays.numpy import view

pytestmark = [pytest.mark.fast, pytest.mark.alike]

SIMD = ["scalar", "avx2", "avx512", "neon"]
OF_PROCESSOR = {"x86_64": {"scalar", "avx2", "avx512"}, "aarch64": {"scalar", "neon"}}
HALVES = {np.dtype("float16"): 0x7E00, np.dtype(ml_dtypes.bfloat16): 0x7FC0}  # with the one NaN of a result
# Machine code of a function that sets the register of floating point to its argument: the value, or its address.
SET_CONTROL = {"x86_64": bytes.fromhex("0fae17c3"), "aarch64": bytes.fromhex("00441bd5c0035fd6")}  # ldmxcsr; msr fpcr
FLUSHING = {"x86_64": 0x9FC0, "aarch64": 1 << 24}
USUAL = {"x86_64": 0x1F80, "aarch64": 0}


def use(simd):
    """Skips the test where this CPU has no such instructions."""
    if simd not in OF_PROCESSOR[platform.machine()]:
        with pytest.raises(ValueError, match=f"simd={simd}: not on this CPU"):
            hvd.init(simd=simd)
        pytest.skip(f"{platform.machine()} has no {simd}")
    try:
        hvd.init(simd=simd)
    except ValueError:
        pytest.skip(f"this CPU has no {simd}")
    assert _core.simd_in_use() == simd


def summed(*arrays):
    result = np.empty_like(arrays[0])
    _core.sum([view(array) for array in arrays], view(result))
    return result


def bits_of(array):
    return array.view(np.uint16)


def every_half(dtype):
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def with_one_nan(array, nan):
    """The array, each NaN in it replaced by the positive quiet one."""
    bits = bits_of(array).copy()
    bits[np.isnan(array.astype(np.float32))] = nan
    return bits


@pytest.mark.ranks(1, initialised=False)
@pytest.mark.parametrize("simd", SIMD)
def test_every_16_bit_float_keeps_its_bits_through_float32(simd):
    use(simd)
    for dtype, nan in HALVES.items():
        every = every_half(dtype)
        require_equal(bits_of(summed(every)), with_one_nan(every, nan))
    hvd.shutdown()


@pytest.mark.ranks(1, initialised=False)
@pytest.mark.parametrize("simd", SIMD)
def test_sums_of_16_bit_floats_are_rounded_once_to_nearest_even(simd):
    use(simd)
    random = np.random.default_rng(7)
    for dtype, nan in HALVES.items():
        every = every_half(dtype)
        for sources in range(2, 10):
            arrays = [every, *(random.permutation(every) for _ in range(sources - 1))]
            with np.errstate(all="ignore"):
                total = arrays[0].astype(np.float32)
                for array in arrays[1:]:
                    total = total + array.astype(np.float32)
                expected = total.astype(dtype)
            require_equal(bits_of(summed(*arrays)), with_one_nan(expected, nan))
    hvd.shutdown()


@pytest.mark.ranks(1, initialised=False)
@pytest.mark.parametrize("simd", SIMD)
def test_sums_between_two_16_bit_floats_are_rounded_to_nearest_even(simd):
    use(simd)
    for dtype, nan in HALVES.items():
        # each plus a part of its distance to the next one
        base = every_half(dtype)[: 1 << 15]
        with np.errstate(all="ignore"):
            step = np.abs(np.roll(base, -1).astype(np.float32) - base.astype(np.float32))
            for part in (0.25, 0.5, 0.75, 1.5):
                small = (step * np.float32(part)).astype(dtype)
                expected = (base.astype(np.float32) + small.astype(np.float32)).astype(dtype)
                require_equal(bits_of(summed(base, small)), with_one_nan(expected, nan))
    hvd.shutdown()


@pytest.mark.ranks(1, initialised=False)
@pytest.mark.parametrize("simd", SIMD)
def test_sums_of_floats_at_every_length_and_alignment(simd):
    use(simd)
    random = np.random.default_rng(8)
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    numbers = np.array([0.0, -0.0, np.inf, -np.inf, 1e-42, -1e-42, 3e-7, -3e-7, 3e38, 65504.0], np.float32)
    special = np.concatenate([nans, numbers])
    for dtype, bits, nan in [
        (np.float32, np.uint32, 0x7FC00000),
        *((of, np.uint16, its) for of, its in HALVES.items()),
    ]:
        for count in [*range(70), 127, 128, 129, 1000, 1023]:
            for sources in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12):
                memory = random.standard_normal((sources, count + 3)).astype(np.float32)
                is_special = random.random(memory.shape) < 0.1
                memory[is_special] = random.choice(special, is_special.sum())
                with np.errstate(all="ignore"):
                    arrays = [row[source % 4 :][:count] for source, row in enumerate(memory.astype(dtype))]
                    total = arrays[0].astype(np.float32)
                    for array in arrays[1:]:
                        total += array
                    expected = total.astype(dtype)
                expected.view(bits)[np.isnan(expected)] = nan
                require_equal(summed(*arrays).view(bits), expected.view(bits))
    hvd.shutdown()


@pytest.mark.ranks(1, initialised=False)
@pytest.mark.parametrize("simd", SIMD)
def test_16_bit_floats_times_a_factor_are_rounded_once_to_nearest_even(simd):
    use(simd)
    for dtype, nan in HALVES.items():
        every = np.concatenate([every_half(dtype), every_half(dtype)[:37]])
        for factor in (0.5, 1 / 3, 0.125, 3.0, 1e-30, np.nan):
            with np.errstate(all="ignore"):
                expected = (every.astype(np.float32) * np.float32(factor)).astype(dtype)
            result = np.empty_like(every)
            _core.scale(_core.DTYPES[dtype.name], factor, result.ctypes.data, every.ctypes.data, every.size)
            require_equal(bits_of(result), with_one_nan(expected, nan))
    hvd.shutdown()


@pytest.mark.ranks(1, initialised=False)
@pytest.mark.parametrize("simd", SIMD)
def test_a_thread_that_flushes_denormals_sums_them_as_others_do(simd):
    use(simd)
    machine = platform.machine()
    # zeroed memory of its own, which may be executed
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(SET_CONTROL[machine])
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def set_control(value):
        word = ctypes.c_uint32(value)
        call(ctypes.addressof(word) if machine == "x86_64" else value)

    tiny = np.full(37, 3, np.int32).view(np.float32)
    half = np.full(37, 3, np.uint16).view(np.float16)
    brain = np.full(37, 3, np.uint16).view(ml_dtypes.bfloat16)
    set_control(FLUSHING[machine])
    is_flushing = not (tiny * np.float32(1)).any()
    results = [summed(tiny, tiny), summed(half, half), summed(brain, brain)]
    is_flushing_after = not (tiny * np.float32(1)).any()
    set_control(USUAL[machine])
    assert is_flushing and is_flushing_after and (tiny * np.float32(1)).all()
    require_equal(results[0].view(np.int32), np.full(37, 6, np.int32))
    require_equal(bits_of(results[1]), np.full(37, 6, np.uint16))
    require_equal(bits_of(results[2]), np.full(37, 6, np.uint16))
    hvd.shutdown()


def digest_of(data):
    """The formula of csrc/kernels/copy.cc."""
    odd, mask = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F), (1 << 64) - 1

    def spread(word):
        word = (word ^ (word >> 32)) * odd[0] & mask
        word = (word ^ (word >> 29)) * odd[1] & mask
        return word ^ (word >> 32)

    lanes = [1, 2, 3, 4]
    padded = data + bytes(32 - len(data) % 32)
    for place, word in enumerate(np.frombuffer(padded, "<u8").tolist()):
        mixed = (lanes[place % 4] + word * odd[1]) & mask
        lanes[place % 4] = (mixed << 31 | mixed >> 33) * odd[0] & mask
    result = len(data)
    for lane in lanes:
        result = (spread(result ^ lane) + lane) & mask
    return result


def test_a_digest_is_the_same_on_every_processor():
    random = np.random.default_rng(9)
    for count in [*range(1, 100), 1000, 4097]:
        array = random.integers(0, 256, count, np.uint8)
        assert _core.digest(view(array)) % (1 << 64) == digest_of(array.tobytes())
