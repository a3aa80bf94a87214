"""Rotary frequencies of a config: default, linear, llama3 and yarn scaling, of the whole head or a part of it.

Computed in float32 in the order Transformers does, so that angles agree to the last bit or nearly so at long positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UnsupportedModel
from ..program import Rope

if TYPE_CHECKING:
    from .hf_config import RopeParameters


def make_rope(p: RopeParameters, head_dim: int) -> Rope:
    """The Rope of a layer whose heads have `head_dim` features. Raises UnsupportedModel if they do not make pairs."""
    dim = int(head_dim * p.partial_rotary_factor)
    if not 2 <= dim <= head_dim or dim % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor {p.partial_rotary_factor} of head_dim {head_dim} turns {dim} features, not pairs"
        )
    inv_freq, scale = _KINDS[p.rope_type](p, dim)
    return Rope(head_dim, tuple(inv_freq.astype(np.float32).tolist()), scale)


def _wavelengths(p: RopeParameters, dim: int) -> np.ndarray:
    """theta ** (2i / dim) for each pair i, float32 (dim / 2,) (Su et al. 2021, section 3.2.2)."""
    return np.float32(p.rope_theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _default(p: RopeParameters, dim: int) -> tuple[np.ndarray, float]:
    return np.float32(1) / _wavelengths(p, dim), 1.0


def _linear(p: RopeParameters, dim: int) -> tuple[np.ndarray, float]:
    """Position interpolation (Chen et al. 2023): positions are divided by `factor`."""
    return _default(p, dim)[0] / np.float32(p.factor), 1.0


def _llama3(p: RopeParameters, dim: int) -> tuple[np.ndarray, float]:
    """Llama 3.1: long waves are divided by `factor`, short ones kept, those between are blended."""
    assert p.original_max_position_embeddings is not None
    inv_freq = _default(p, dim)[0]
    turns = np.float32(p.original_max_position_embeddings) * inv_freq / np.float32(2 * math.pi)
    blend = (turns - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)
    blend = np.clip(blend, 0, 1).astype(np.float32)
    return (1 - blend) * inv_freq / np.float32(p.factor) + blend * inv_freq, 1.0


def _yarn(p: RopeParameters, dim: int) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, section 3.2), and its attention temperature as a factor on q and k (section 3.4)."""

    original = p.original_max_position_embeddings
    assert original is not None

    def pair_that_turns(times: float) -> float:
        """The pair that makes so many turns within the original context."""
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(p.rope_theta))

    low, high = pair_that_turns(p.beta_fast), pair_that_turns(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    wavelengths = _wavelengths(p, dim)
    inv_freq = ramp / (np.float32(p.factor) * wavelengths) + (1 - ramp) / wavelengths

    def mscale(weight: float) -> float:
        return 1.0 if p.factor <= 1 else 0.1 * weight * math.log(p.factor) + 1.0

    if p.attention_factor is not None:
        scale = p.attention_factor
    elif p.mscale and p.mscale_all_dim:
        scale = mscale(p.mscale) / mscale(p.mscale_all_dim)
    else:
        scale = mscale(1.0)
    return inv_freq, float(scale)


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
