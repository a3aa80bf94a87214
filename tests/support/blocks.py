"""Random blocks of each stored format: random bits with finite scales of a weight's usual size."""

from __future__ import annotations

import numpy as np

from tokenmill.quant.formats import BLOCKS

# Byte offsets of the f16 scales in a block, and how large weights get for a scale of 1.
SCALES = {
    "Q4_0": ([0], 8), "Q4_1": ([0, 2], 8), "Q5_0": ([0], 16), "Q5_1": ([0, 2], 16), "Q8_0": ([0], 128),
    "Q2_K": ([80, 82], 32), "Q3_K": ([108], 64), "Q4_K": ([0, 2], 512), "Q5_K": ([0, 2], 1024), "Q6_K": ([208], 2048),
    "IQ4_NL": ([0], 128), "IQ4_XS": ([0], 4096),
}  # fmt: skip


def random_blocks(name: str, count: int, seed: int = 0, size: float = 0.1) -> np.ndarray:
    """uint8 (count * bytes_per_block,): weights of about `size`."""
    rng = np.random.default_rng(seed)
    if name == "F32":
        return (rng.standard_normal(count) * size).astype(np.float32).view(np.uint8)
    if name == "F16":
        return (rng.standard_normal(count) * size).astype(np.float16).view(np.uint8)
    if name == "BF16":
        values = (rng.standard_normal(count) * size).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    offsets, reach = SCALES[name]
    blocks = rng.integers(0, 256, (count, BLOCKS[name].bytes_per_block), dtype=np.uint8)
    for at in offsets:
        scale = rng.standard_normal(count) * (size / reach)
        blocks[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.ravel()
