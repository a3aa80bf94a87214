"""Seeds: how one request's seed gives each of its choices its own random numbers."""

from __future__ import annotations

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): a bijection of unsigned 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def choice_seed(seed: int, index: int) -> int:
    """The sampler's key for choice `index` of a request with `seed`: unsigned 64-bit, another for each of both.

    Negative seeds (from -2^63) are taken as two's complement.
    """
    return splitmix64((seed + (index + 1) * GOLDEN) & MASK64)
