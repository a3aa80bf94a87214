"""The specification in numpy: what each op of program/ops.py means, and an Executor made of it.

Slow, short and clear; every other backend is tested against it. Ops compute in `dtype` (float32; float64 where a test
wants the exact answer), weights are dequantised once, and keys and values live in pages of `kv_dtype` (float16, as in
the native cache). It knows nothing of requests: a step's arrays say all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from ..program import Op, Program, StepInputs, Weight
from .interface import SamplingInputs, SamplingOutputs

_erf = np.frompyfunc(math.erf, 1, 1)


class ReferenceBackend:
    """Runs one op at a time on plain arrays; an EagerBuilder can be handed one. Holds the KV pages of every layer."""

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        kv_dtype: np.typing.DTypeLike = np.float16,
        dtype: np.typing.DTypeLike = np.float32,
    ):
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = np.dtype(dtype)
        self.kv_dtype = np.dtype(kv_dtype)
        self._kv: dict[int, np.ndarray] = {}  # layer -> (2, num_pages, page_size, num_kv_heads, head_dim)
        self._dequantized: dict[int, tuple[Weight, np.ndarray]] = {}  # by id of the weight's bytes

    def run_op(self, op: Op, inputs: tuple[np.ndarray, ...], step: StepInputs) -> tuple[np.ndarray, ...]:
        """The op's outputs, each `dtype` (rows, dim). `attention` also writes this step's keys and values."""
        return getattr(self, op.name)(op, inputs, step)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for pages in self._kv.values():
                pages[:, destination] = pages[:, source]

    def array(self, weight: Weight) -> np.ndarray:
        """The weight's numbers, dequantised once, `dtype` (weight.shape)."""
        key = id(weight.data)
        if key not in self._dequantized:
            from ..quant.formats import numbers

            self._dequantized[key] = (weight, numbers(weight).astype(self.dtype, copy=False))
        return self._dequantized[key][1]

    # ---- one method an op, named as in the table

    def embed(self, op, inputs, step):
        return (self.array(op.weights[0])[step.token_ids] * self.dtype.type(op.attrs["scale"]),)

    def rms_norm(self, op, inputs, step):
        (x,) = inputs
        groups = x.reshape(len(x), x.shape[1] // op.attrs["group"], op.attrs["group"])  # (rows, dim / group, group)
        mean_square = np.mean(groups * groups, axis=-1, keepdims=True)
        normed = groups / np.sqrt(mean_square + self.dtype.type(op.attrs["eps"]))
        return ((normed * self.array(op.weights[0])).reshape(x.shape),)

    def linear(self, op, inputs, step):
        x, outputs = inputs[0], []
        for weight in op.weights:
            y = x @ self.array(weight).T  # (rows, out_features)
            if weight.bias is not None:
                y += self.array(weight.bias)
            outputs.append(y)
        if len(inputs) == 2:
            outputs[0] += inputs[1]
        return tuple(outputs)

    def add(self, op, inputs, step):
        return (inputs[0] + inputs[1],)

    def rope(self, op, inputs, step):
        """Pair i of a head is a point in the plane; a position turns it by position * inv_freq[i]."""
        inv_freq = np.asarray(op.attrs["inv_freq"], self.dtype)
        half = len(inv_freq)
        angle = step.positions.astype(self.dtype)[:, None, None] * inv_freq  # (T, 1, half)
        scale = self.dtype.type(op.attrs["scale"])
        cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
        outputs = []
        for x in inputs:
            heads = x.reshape(len(x), -1, op.attrs["head_dim"]).copy()
            first, second = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
            heads[..., :half] = first * cos - second * sin
            heads[..., half : 2 * half] = second * cos + first * sin
            outputs.append(heads.reshape(x.shape))
        return tuple(outputs)

    def attention(self, op, inputs, step):
        a = op.attrs
        q, k, v = (x.reshape(len(x), -1, a["head_dim"]) for x in inputs)  # (T, heads, head_dim)
        keys, values = self._pages(a["layer"], a["num_kv_heads"], a["head_dim"])
        with np.errstate(over="ignore"):
            keys[step.slot_mapping] = k
            values[step.slot_mapping] = v

        out = np.empty_like(q)
        for r in range(len(step.kv_len)):
            rows = slice(step.q_start[r], step.q_start[r + 1])
            slots = self._slots(step.page_table[r], step.kv_len[r])
            out[rows] = self._attend(q[rows], keys[slots], values[slots], step.positions[rows], a)
        return (out.reshape(len(out), -1),)

    def _attend(self, q, k, v, positions, attrs):
        """One request: q (rows, heads, head_dim) at `positions`; k, v (kv_len, kv_heads, head_dim) as cached."""
        rows, heads, head_dim = q.shape
        k, v = k.astype(self.dtype), v.astype(self.dtype)
        q = q.reshape(rows, k.shape[1], -1, head_dim)  # query heads in groups that share a key/value head
        scores = np.einsum("rgqd,sgd->gqrs", q, k, optimize=True) * self.dtype.type(attrs["scale"])
        if attrs["softcap"] > 0:
            cap = self.dtype.type(attrs["softcap"])
            scores = cap * np.tanh(scores / cap)
        distance = positions[:, None] - np.arange(len(k))  # (rows, kv_len); negative: in the future
        seen = distance >= 0
        if attrs["window"] > 0:
            seen &= distance < attrs["window"]
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("gqrs,sgd->rgqd", weights, v, optimize=True).reshape(rows, heads, head_dim)

    def act_mul(self, op, inputs, step):
        gate, up = inputs
        one, half = self.dtype.type(1), self.dtype.type(0.5)
        if op.attrs["act"] == "silu":
            with np.errstate(over="ignore"):
                activated = gate / (one + np.exp(-gate))
        elif op.attrs["act"] == "gelu_tanh":
            inner = self.dtype.type(math.sqrt(2 / math.pi)) * (gate + self.dtype.type(0.044715) * gate**3)
            activated = half * gate * (one + np.tanh(inner))
        else:
            activated = half * gate * (one + _erf(gate * self.dtype.type(math.sqrt(0.5))).astype(self.dtype))
        return (activated * up,)

    def select_rows(self, op, inputs, step):
        return (inputs[0][step.logit_rows],)

    # ---- the pages

    def _pages(self, layer: int, num_kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a layer by slot: views (num_pages * page_size, num_kv_heads, head_dim)."""
        if layer not in self._kv:
            shape = (2, self.num_pages, self.page_size, num_kv_heads, head_dim)
            self._kv[layer] = np.zeros(shape, self.kv_dtype)
        keys, values = self._kv[layer].reshape(2, -1, num_kv_heads, head_dim)
        return keys, values

    def _slots(self, page_ids: np.ndarray, kv_len: int) -> np.ndarray:
        """Slots of positions 0 .. kv_len - 1 of a request."""
        positions = np.arange(kv_len)
        return page_ids[positions // self.page_size] * self.page_size + positions % self.page_size


class ReferenceExecutor:
    """backends.interface.Executor on the reference ops.

    keep_values holds every op's output until the next step, for value(); otherwise each is dropped after its last use.
    """

    def __init__(
        self,
        program: Program,
        *,
        num_pages: int,
        page_size: int = 16,
        kv_dtype: np.typing.DTypeLike = np.float16,
        dtype: np.typing.DTypeLike = np.float32,
        keep_values: bool = False,
        **ignored: object,
    ):
        self.program = program
        self.backend = ReferenceBackend(num_pages, page_size, kv_dtype=kv_dtype, dtype=dtype)
        self.keep_values = keep_values
        self._values: dict[int, np.ndarray] = {}
        self._last_use = {v.id: index for index, op in enumerate(program.ops) for v in (*op.outputs, *op.inputs)}

    def forward(self, step: StepInputs) -> np.ndarray:
        assert self.program.logits is not None
        values = self._values
        values.clear()
        for index, op in enumerate(self.program.ops):
            outputs = self.backend.run_op(op, tuple(values[v.id] for v in op.inputs), step)
            values.update(zip((v.id for v in op.outputs), outputs))
            if not self.keep_values:
                for v in op.inputs:
                    if self._last_use[v.id] == index:
                        values.pop(v.id, None)
        return values[self.program.logits.id].astype(np.float32)

    def execute(self, step: StepInputs, sampling: SamplingInputs, out: SamplingOutputs) -> None:
        from .reference_sampler import sample

        logits = self.forward(step)
        if len(logits):
            sample(logits, sampling, out)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.backend.copy_pages(pairs)

    def value(self, value_id: int) -> np.ndarray:
        """What op output `value_id` was in the last step, float32 (rows, dim)."""
        if value_id not in self._values:
            raise ConfigError("value() needs an executor made with keep_values=True")
        return self._values[value_id]

    @property
    def decisions(self) -> list[tuple[str, str]]:
        kinds = Counter(op.name for op in self.program.ops)
        listed = ", ".join(f"{count} {name}" for name, count in kinds.items())
        return [("backend", f"reference (numpy {self.backend.dtype}), KV in {self.backend.kv_dtype}"), ("ops", listed)]
