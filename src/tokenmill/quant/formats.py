"""The block formats weights are stored in, and how to turn each back into float32.

A format is a run of equal blocks: `block_size` weights in `bytes_per_block` bytes, rows a whole number of blocks. The
bit layouts are ggml's (ggml-common.h, ggml-quants.c); dequantize() gives the same float32 bits as ggml's own
dequantisers, so the order of each multiplication and addition below is part of the format.

    Q4_0  d:f16 | q:16 bytes              w = d * (q - 8)          low nibbles are weights 0..15, high ones 16..31
    Q4_1  d:f16 m:f16 | q                 w = d * q + m
    Q4_K  d:f16 dmin:f16 | 6-bit scales and mins of 8 runs of 32 | q    w = d * sc * q - dmin * mn

It does not know files, tensors' names or kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import UnsupportedModel
from ..program.weight import Weight

CHUNK = 1 << 20  # weights decoded at a time: bounds the temporaries, not the result


@dataclass(frozen=True, slots=True)
class BlockFormat:
    name: str
    block_size: int  # weights in a block
    bytes_per_block: int
    ggml_type: int  # its number in a GGUF tensor's header

    def nbytes(self, num_weights: int) -> int:
        """Bytes that `num_weights` weights take; they must be a whole number of blocks."""
        return num_weights // self.block_size * self.bytes_per_block


BLOCKS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("F32", 1, 4, 0),
        BlockFormat("F16", 1, 2, 1),
        BlockFormat("BF16", 1, 2, 30),
        BlockFormat("Q4_0", 32, 18, 2),
        BlockFormat("Q4_1", 32, 20, 3),
        BlockFormat("Q5_0", 32, 22, 6),
        BlockFormat("Q5_1", 32, 24, 7),
        BlockFormat("Q8_0", 32, 34, 8),
        BlockFormat("Q2_K", 256, 84, 10),
        BlockFormat("Q3_K", 256, 110, 11),
        BlockFormat("Q4_K", 256, 144, 12),
        BlockFormat("Q5_K", 256, 176, 13),
        BlockFormat("Q6_K", 256, 210, 14),
        BlockFormat("IQ4_NL", 32, 18, 20),
        BlockFormat("IQ4_XS", 256, 136, 23),
    )
}

# Names of the types that exist but are not decoded here, for messages.
UNSUPPORTED_TYPES: dict[int, str] = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
    33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def block_format(name: str) -> BlockFormat:
    if name not in BLOCKS:
        raise UnsupportedModel(f"weights in format {name} are not supported; these are: {', '.join(BLOCKS)}")
    return BLOCKS[name]


def numbers(weight: Weight) -> np.ndarray:
    """A weight's numbers, float32 (weight.shape), rows in the weight's own order. Raises as dequantize()."""
    stored = dequantize(weight.format, weight.data, weight.shape)
    return stored if weight.order is None else stored[weight.order]


def dequantize(format: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float32 array of `shape` from `data` (uint8, 1-D, as stored).

    Raises UnsupportedModel for an unknown format and ValueError where shape and data disagree.
    """
    f = block_format(format)
    size = int(np.prod(shape, dtype=object))
    if size % f.block_size or data.size != f.nbytes(size):
        raise ValueError(f"{data.size} bytes of {format} are not the {shape} weights asked for")
    blocks = data.reshape(-1, f.bytes_per_block)
    out = np.empty((len(blocks), f.block_size), np.float32)
    step = max(1, CHUNK // f.block_size)
    decode = _DECODERS[format]
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be inf or nan: that is the answer
        for start in range(0, len(blocks), step):
            out[start : start + step] = decode(np.ascontiguousarray(blocks[start : start + step]))
    return out.reshape(shape)


def _f16(blocks: np.ndarray, start: int) -> np.ndarray:
    """The half at byte `start` of each block, float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _bits(packed: np.ndarray, shifts: range, mask: int) -> np.ndarray:
    """(n, len(shifts), bytes) of small integers: every byte shifted by each of `shifts`, then masked."""
    return (packed[:, None, :] >> np.array(shifts, np.uint8)[None, :, None]) & np.uint8(mask)


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """4-bit values, (n, 2 * bytes): in each run of `run` bytes all low nibbles come first, then all high ones."""
    return _planes(packed, run, range(0, 8, 4), 15)


def _planes(packed: np.ndarray, run: int, shifts: range, mask: int) -> np.ndarray:
    """As _nibbles, for any width: run after run, and within a run one plane per shift."""
    n = len(packed)
    return _bits(packed.reshape(-1, run), shifts, mask).reshape(n, -1)


def _q4_0(b):
    return _f16(b, 0) * (_nibbles(b[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(b):
    return _f16(b, 0) * _nibbles(b[:, 4:], 16).astype(np.float32) + _f16(b, 2)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """32 weights a block: bit 4 of weight i is bit i of `high` (n, 4 bytes), the rest are nibbles of `low`."""
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return (_nibbles(low, 16) | fifth << np.uint8(4)).astype(np.float32)


def _q5_0(b):
    return _f16(b, 0) * (_five_bits(b[:, 2:6], b[:, 6:]) - 16)


def _q5_1(b):
    return _f16(b, 0) * _five_bits(b[:, 4:8], b[:, 8:]) + _f16(b, 2)


def _q8_0(b):
    return b[:, 2:].view(np.int8).astype(np.float32) * _f16(b, 0)


def _q2_k(b):
    scales = b[:, :16]
    scale = (_f16(b, 80) * (scales & 15).astype(np.float32))[:, :, None]
    minimum = (_f16(b, 82) * (scales >> 4).astype(np.float32))[:, :, None]
    q = _planes(b[:, 16:80], 32, range(0, 8, 2), 3).reshape(-1, 16, 16).astype(np.float32)
    return (scale * q - minimum).reshape(-1, 256)


def _q3_k(b):
    low = _planes(b[:, 32:96], 32, range(0, 8, 2), 3)
    high = _planes(b[:, :32], 32, range(8), 1)
    q = low.astype(np.float32) - 4 * (1 - high.astype(np.float32))  # the offset is taken where the bit is clear
    scales = _planes(b[:, 96:104], 8, range(0, 8, 4), 15) | _planes(b[:, 104:108], 4, range(0, 8, 2), 3) << np.uint8(4)
    scale = _f16(b, 108) * (scales.astype(np.float32) - 32)
    return (scale[:, :, None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 six-bit scales and mins of Q4_K and Q5_K from their 12 bytes, float32 (n, 8) each."""
    d, m, dm = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([d & 63, dm & 15 | (d >> 2) & 48], axis=1)
    minimum = np.concatenate([m & 63, dm >> 4 | (m >> 2) & 48], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _scaled_k(b: np.ndarray, q: np.ndarray) -> np.ndarray:
    scale, minimum = _k_scales(b[:, 4:16])
    scale = (_f16(b, 0) * scale)[:, :, None]
    minimum = (_f16(b, 2) * minimum)[:, :, None]
    return (scale * q.reshape(-1, 8, 32).astype(np.float32) - minimum).reshape(-1, 256)


def _q4_k(b):
    return _scaled_k(b, _nibbles(b[:, 16:], 32))


def _q5_k(b):
    fifth = _planes(b[:, 16:48], 32, range(8), 1)
    return _scaled_k(b, _nibbles(b[:, 48:], 32) | fifth << np.uint8(4))


def _q6_k(b):
    q = _nibbles(b[:, :128], 64) | _planes(b[:, 128:192], 32, range(0, 8, 2), 3) << np.uint8(4)
    scale = _f16(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * (q.astype(np.float32) - 32).reshape(-1, 16, 16)).reshape(-1, 256)


def _iq4_nl(b):
    return _f16(b, 0) * IQ4_VALUES[_nibbles(b[:, 2:], 16)]


def _iq4_xs(b):
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = _bits(np.ascontiguousarray(b[:, 2:4]), range(0, 8, 2), 3).transpose(0, 2, 1).reshape(-1, 8)
    scale = _f16(b, 0) * ((low | high << np.uint8(4)).astype(np.float32) - 32)
    return (scale[:, :, None] * IQ4_VALUES[_nibbles(b[:, 8:], 16)].reshape(-1, 8, 32)).reshape(-1, 256)


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda b: b.view(np.float32),
    "F16": lambda b: b.view(np.float16),
    "BF16": lambda b: (b.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
