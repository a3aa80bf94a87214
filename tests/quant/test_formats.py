"""Every block format decodes to the same float32 bits as the gguf package's own dequantisers."""

import gguf
import numpy as np
import pytest

from tests.support.blocks import random_blocks
from tokenmill.errors import UnsupportedModel
from tokenmill.quant import formats
from tokenmill.quant.formats import BLOCKS, dequantize


@pytest.mark.parametrize("name", BLOCKS)
def test_bit_exact_with_the_gguf_package(name):
    f = BLOCKS[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (f.block_size, f.bytes_per_block)
    assert gguf.GGMLQuantizationType[name] == f.ggml_type
    data = random_blocks(name, 384)
    shape = (3, 128 * f.block_size)
    mine = dequantize(name, data, shape)
    theirs = gguf.dequantize(data.reshape(3, -1), gguf.GGMLQuantizationType[name])
    assert mine.dtype == np.float32 and mine.shape == shape
    assert np.array_equal(mine.view(np.uint32), np.ascontiguousarray(theirs, np.float32).view(np.uint32))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_decodes_what_the_gguf_package_quantises(name):
    x = np.random.default_rng(1).standard_normal((7, 64)).astype(np.float32)
    data = gguf.quantize(x, gguf.GGMLQuantizationType[name]).view(np.uint8)
    mine = dequantize(name, data.ravel(), x.shape)
    assert np.array_equal(mine, gguf.dequantize(data, gguf.GGMLQuantizationType[name]))
    assert np.abs(mine - x).max() < 0.4


@pytest.mark.parametrize("name", BLOCKS)
def test_chunks_do_not_show(name, monkeypatch):
    data = random_blocks(name, 37, seed=2)
    shape = (37, BLOCKS[name].block_size)
    whole = dequantize(name, data, shape)
    monkeypatch.setattr(formats, "CHUNK", 4 * BLOCKS[name].block_size)
    assert np.array_equal(whole, dequantize(name, data, shape))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half_of_sixteen_bits(name):
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    theirs = gguf.dequantize(bits.reshape(1, -1), gguf.GGMLQuantizationType[name])[0]
    assert np.array_equal(dequantize(name, bits, (1 << 16,)), theirs, equal_nan=True)


def test_extreme_values_survive():
    assert dequantize("BF16", np.array([0x7F7F, 0xFF7F, 0x0001], np.uint16).view(np.uint8), (3,)).tolist() == [
        3.3895313892515355e38,
        -3.3895313892515355e38,
        9.183549615799121e-41,
    ]
    assert np.isinf(dequantize("F16", np.array([np.inf], np.float16).view(np.uint8), (1,)))[0]


def test_shape_and_bytes_must_agree():
    with pytest.raises(ValueError):
        dequantize("Q4_0", np.zeros(18, np.uint8), (64,))
    with pytest.raises(ValueError):
        dequantize("Q4_0", np.zeros(18, np.uint8), (16,))
    with pytest.raises(UnsupportedModel, match="IQ1_S"):
        dequantize("IQ1_S", np.zeros(50, np.uint8), (256,))
