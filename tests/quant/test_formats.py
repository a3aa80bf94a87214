"""Every block format decodes to the same float32 bits as the gguf package's own dequantisers."""

import gguf
import numpy as np
import pytest

from tokenmill.errors import UnsupportedModel
from tokenmill.quant import formats
from tokenmill.quant.formats import BLOCKS, dequantize

HALF_FIELDS = {  # byte offsets of f16 scales in a block: random bytes there must be finite numbers
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    f = BLOCKS[name]
    if name == "F32":
        return rng.standard_normal(count).astype(np.float32).view(np.uint8)
    if name in ("F16", "BF16"):
        bits = rng.integers(0, 1 << 16, count, dtype=np.uint16)
        nan = (bits & 0x7C00 == 0x7C00) if name == "F16" else (bits & 0x7F80 == 0x7F80)
        return np.where(nan, bits & 0x807F, bits).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (count, f.bytes_per_block), dtype=np.uint8)
    for at in HALF_FIELDS[name]:
        blocks[:, at : at + 2] = (rng.standard_normal(count) * 0.1).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.ravel()


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
