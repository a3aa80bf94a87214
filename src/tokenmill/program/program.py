"""Program: the recorded form of a model. A list of coarse ops over values; nothing in it belongs to one step.

It knows shapes, weights and cost formulas. It does not know any backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .weight import Weight


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A float32 activation of shape (rows, dim). `rows` is "T" (the step's tokens) or "L" (its logit rows)."""

    id: int
    rows: str
    dim: int
    array: np.ndarray | None = None  # only in the eager builder


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    name: str  # a key of ops.OPS
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    attrs: dict[str, Any]
    where: str  # "layer 3, llama.py:21": for error messages and profiles


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What one attention layer keeps per token. window 0: the whole context."""

    num_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(slots=True)
class StepInputs:
    """A step's inputs, int32. T tokens of R requests, of which L rows give logits.

    token_ids (T,)      positions (T,)     slot_mapping (T,): page * page_size + offset, where the token's K and V go
    q_start (R+1,)      row range of each request in T
    kv_len (R,)         tokens in the cache for that request once this step has written its own
    page_table (R, P)   page ids, as many as kv_len needs; the rest is ignored
    logit_rows (L,)     rows of T whose logits are wanted, ascending
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    q_start: np.ndarray
    kv_len: np.ndarray
    page_table: np.ndarray
    logit_rows: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The counts that a step's cost depends on."""

    num_tokens: int
    num_logit_rows: int
    context_tokens: int  # sum over the step's tokens of the positions each attends to, without a window


@dataclass(slots=True)
class Program:
    """Ops in execution order. `logits` is the (L, vocab) value that the sampler reads."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    kv_layers: list[KVLayer] = field(default_factory=list)
    logits: Value | None = None
    vocab_size: int = 0

    @property
    def weights(self) -> list[Weight]:
        """Every distinct weight, biases included, in order of first use; tied weights once."""
        seen: dict[str, Weight] = {}
        for op in self.ops:
            for weight in op.weights:
                seen.setdefault(weight.name, weight)
                if weight.bias is not None:
                    seen.setdefault(weight.bias.name, weight.bias)
        return list(seen.values())

    @property
    def weight_bytes(self) -> int:
        return sum(w.nbytes for w in self.weights)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of f16 keys and values per token over all layers."""
        return sum(2 * 2 * layer.num_kv_heads * layer.head_dim for layer in self.kv_layers)

    def flops(self, shape: StepShape) -> int:
        from .ops import OPS

        return sum(OPS[op.name].flops(op, shape) for op in self.ops)

    def bytes(self, shape: StepShape) -> int:
        from .ops import OPS

        return sum(OPS[op.name].bytes(op, shape) for op in self.ops)

    def __str__(self) -> str:
        lines = []
        for op in self.ops:
            outputs = ", ".join(f"%{v.id}" for v in op.outputs)
            arguments = ", ".join([*(f"%{v.id}" for v in op.inputs), *(f"{w.name}:{w.format}" for w in op.weights)])
            lines.append(f"{outputs} = {op.name}({arguments})  # {op.where}")
        return "\n".join(lines)
