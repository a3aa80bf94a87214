"""Weight: a named tensor in the format its file keeps it in, and Weights: how a model asks for them.

A Weight is bytes plus a format name; nobody decodes it until a backend packs it or the reference dequantises it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UnsupportedModel


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor as stored. 2-D weights are (out_features, in_features), row-major, each row a whole number of blocks."""

    name: str  # canonical: "layers.3.q_proj"
    shape: tuple[int, ...]
    format: str  # a GGUF type name: F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K .. Q6_K
    data: np.ndarray  # uint8, 1-D, contiguous; usually a view of the mapped file
    bias: Weight | None = None  # F32 (out_features,), where the family has one
    order: np.ndarray | None = None  # int32 (out_features,): row i is row order[i] of data; None: as they stand
    mapped: bool = False  # data is a read-only mapping of a file: its pages can be let go and come back when read

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class LayerWeights:
    """One layer's weights. `layer["q_proj"]` is a Weight, `layer["q_proj", "k_proj"]` a tuple of them."""

    def __init__(self, weights: Weights, prefix: str):
        self._weights = weights
        self._prefix = prefix

    def __getitem__(self, names: str | tuple[str, ...]):
        if isinstance(names, str):
            return self._weights[self._prefix + names]
        return tuple(self._weights[self._prefix + name] for name in names)


class Weights(Mapping[str, Weight]):
    """All weights of a model by canonical name; remembers which were used so that a forgotten one is an error."""

    def __init__(self, tensors: dict[str, Weight]):
        self._tensors = tensors
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Weight:
        weight = self._tensors.get(name)
        if weight is None:
            raise UnsupportedModel(f"the model's file has no tensor for {name!r}")
        self.used.add(name)
        bias = self._tensors.get(name + ".bias")
        if bias is not None:
            self.used.add(bias.name)
            return replace(weight, bias=bias)
        return weight

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def layer(self, index: int) -> LayerWeights:
        return LayerWeights(self, f"layers.{index}.")

    @property
    def head(self) -> Weight:
        """The output matrix (vocab, hidden): lm_head where the file has one, else the embedding table (tied)."""
        return self["lm_head" if "lm_head" in self else "embed_tokens"]

    @property
    def unused(self) -> list[str]:
        return sorted(set(self._tensors) - self.used)
