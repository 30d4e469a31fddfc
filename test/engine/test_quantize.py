"""Two-bit and one-bit gradients against MXNet's formulas written in NumPy, byte for byte."""

import numpy as np
import pytest
from harness.exact import require_equal
from quantization import DEQUANTIZE, QUANTIZE

from ringtrain import _core
from ringtrain.arrays.numpy import view

KINDS = ["2bit", "1bit"]
THRESHOLD = 0.5


def core_quantize(kind, threshold, grad, residual):
    codes = np.full(_core.quantized_bytes(kind, grad.size), 0xA5, np.uint8)
    _core.quantize(kind, threshold, view(grad), view(residual), view(codes))
    return codes


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_residual_are_mxnets_for_every_length(kind):
    rng = np.random.default_rng(3)
    for count in [*range(1, 1001), 1023, 1024, 1025, 1039, 2047, 2048, 2049, 100_003]:
        grad = rng.standard_normal(count).astype("f4")
        residual = rng.standard_normal(count).astype("f4")
        expected_residual = residual.copy()
        expected = QUANTIZE[kind](grad, expected_residual, THRESHOLD)
        codes = core_quantize(kind, THRESHOLD, grad, residual)
        require_equal(codes, expected)
        require_equal(residual, expected_residual)
        values = np.full(count, np.nan, "f4")
        _core.dequantize(kind, THRESHOLD, view(codes), view(values), False)
        require_equal(values, DEQUANTIZE[kind](codes, count, THRESHOLD))
        _core.dequantize(kind, THRESHOLD, view(codes), view(values), True)
        require_equal(values, 2 * DEQUANTIZE[kind](codes, count, THRESHOLD))


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_at_the_threshold_falls_on_mxnets_side(kind):
    just_below, just_above = np.nextafter(np.float32(THRESHOLD), [np.float32(0), np.float32(1)])
    grad = np.array([0.5, -0.5, just_below, -just_below, just_above, -just_above, 5, -5, 0, -0.0], "f4")
    residual, expected_residual = np.zeros_like(grad), np.zeros_like(grad)
    expected = QUANTIZE[kind](grad, expected_residual, THRESHOLD)
    require_equal(core_quantize(kind, THRESHOLD, grad, residual), expected)
    require_equal(residual, expected_residual)


def test_the_residual_of_two_bits_is_sent_later():
    grad, nothing, residual = np.array([1.75, -1.0], "f4"), np.zeros(2, "f4"), np.zeros(2, "f4")
    sent = np.zeros(2, "f4")
    for values in (grad, nothing, nothing, nothing):
        codes = core_quantize("2bit", THRESHOLD, values, residual)
        _core.dequantize("2bit", THRESHOLD, view(codes), view(sent), True)
    require_equal(sent, np.array([1.5, -1.0], "f4"))
    require_equal(residual, np.array([0.25, 0.0], "f4"))


@pytest.mark.parametrize("kind, per_word", [("2bit", 16), ("1bit", 32)])
def test_parts_on_whole_words_have_the_codes_of_the_whole(kind, per_word):
    rng = np.random.default_rng(4)
    grad = rng.standard_normal(10 * per_word + 3).astype("f4")
    whole = core_quantize(kind, THRESHOLD, grad, np.zeros_like(grad))
    border = 7 * per_word
    parts = [core_quantize(kind, THRESHOLD, part, np.zeros_like(part)) for part in (grad[:border], grad[border:])]
    require_equal(np.concatenate(parts), whole)


def test_arrays_that_cannot_be_quantized_are_refused():
    values = np.zeros(20, "f4")
    codes = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match='no quantization "3bit"'):
        _core.quantized_bytes("3bit", 1)
    for threshold in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite number above 0"):
            _core.quantize("2bit", threshold, view(values), view(values.copy()), view(codes))
    with pytest.raises(ValueError, match=r"must have 8 elements of uint8, but it is uint8\[7\]"):
        _core.quantize("2bit", 0.5, view(values), view(values.copy()), view(codes[:7]))
    with pytest.raises(ValueError, match=r"must have 20 elements of float32, but it is float64\[20\]"):
        _core.dequantize("2bit", 0.5, view(codes), view(np.zeros(20)), False)
