"""How fast a step can be at most on a machine: what its program must read and compute, over the measured ceilings.

    seconds = max(bytes / read bandwidth,  integer operations / int8 ceiling + float operations / FMA ceiling)

Counted: weights once a step in their file's bytes (of an embedding only the rows looked up), keys and values once for
each request, the operations of matrices and of attention. Quantised matrices count as integers, all else as floats.
Not counted: activations, norms, rope, softmax, sampling; they are what a real engine pays on top. So a limit is never
reached, and a share of it says how much of the machine is used. `tokenmill plan` predicts with it, `tokenmill bench`
holds each figure against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..program import Op, Program
from .machine import Ceilings

FLOAT_FORMATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Step:
    """`streams` requests that each compute `tokens` new tokens, after which each has `context` tokens in the cache.

    Each gives one row of logits.
    """

    streams: int
    tokens: int
    context: int

    def rows(self, kind: str) -> int:
        """Rows of a Value: kind "T" or "L"."""
        return self.streams * (self.tokens if kind == "T" else 1)

    def attended(self, window: int = 0) -> int:
        """Sum over the step's tokens of the positions each attends to; window 0: all up to its own."""
        first, last = self.context - self.tokens + 1, self.context  # positions that the first and last token see
        if not window or last <= window:
            return self.streams * (first + last) * self.tokens // 2
        below = max(0, window - first)  # tokens that see less than a whole window
        return self.streams * (below * (first + window - 1) // 2 + (self.tokens - below) * window)

    def cached(self, window: int = 0) -> int:
        """Positions whose keys and values the step must read, over all requests."""
        reach = min(self.context, window + self.tokens - 1) if window else self.context
        return self.streams * reach


@dataclass(frozen=True, slots=True)
class Work:
    """What must be read from memory and computed."""

    bytes: int = 0
    int_ops: int = 0
    float_ops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.int_ops + other.int_ops, self.float_ops + other.float_ops)

    @property
    def ops(self) -> int:
        return self.int_ops + self.float_ops

    def seconds(self, ceilings: Ceilings) -> float:
        arithmetic = self.int_ops / ceilings.int8_ops + self.float_ops / ceilings.float_ops
        return max(self.bytes / ceilings.read_bytes, arithmetic)


def op_work(op: Op, step: Step, kv_number_bytes: int = 2) -> Work:
    """Of one op; nothing for those that only touch activations. kv_number_bytes: of one cached number."""
    if op.name == "linear":
        rows = step.rows(op.inputs[0].rows)
        total = Work()
        for weight in op.weights:
            ops = 2 * rows * weight.shape[0] * weight.shape[1]
            is_float = weight.format in FLOAT_FORMATS
            total += Work(weight.nbytes if rows else 0, 0 if is_float else ops, ops if is_float else 0)
        return total
    if op.name == "attention":
        window, head_dim = op.attrs["window"], op.attrs["head_dim"]
        return Work(
            2 * kv_number_bytes * op.attrs["num_kv_heads"] * head_dim * step.cached(window),
            float_ops=4 * op.attrs["num_heads"] * head_dim * step.attended(window),
        )
    if op.name == "embed":
        table = op.weights[0]
        return Work(step.rows("T") * (table.nbytes // table.shape[0]))
    return Work()


def step_work(program: Program, step: Step, kv_number_bytes: int = 2) -> Work:
    return _sum(op_work(op, step, kv_number_bytes) for op in program.ops)


def _sum(works: Iterable[Work]) -> Work:
    total = Work()
    for work in works:
        total += work
    return total


def prefill_limit(program: Program, ceilings: Ceilings, tokens: int, kv_number_bytes: int = 2) -> float:
    """Prompt tokens a second of one prompt."""
    return tokens / step_work(program, Step(1, tokens, tokens), kv_number_bytes).seconds(ceilings)


def decode_limit(
    program: Program, ceilings: Ceilings, context: int, streams: int = 1, kv_number_bytes: int = 2
) -> float:
    """Output tokens a second of all streams together, each with `context` tokens in the cache."""
    return streams / step_work(program, Step(streams, 1, context), kv_number_bytes).seconds(ceilings)
