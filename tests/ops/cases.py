"""The table of ops under test: one case class an op. A new op starts here.

    class Scale(OpCase):
        op = "scale"                                # its name in program/ops.py
        shapes = [dict(dim=64), dict(dim=7)]        # tried in turn, as keyword arguments of record()
        perf = [dict(dim=2048)]                     # measured by python -m tests.ops.perf

        def record(self, b, given, dim):            # calls the builder once, last
            b.scale(given.value(dim), by=2.0)

        def torch(self, op, inputs, weights, step): # the same maths by torch, float64 tensors in and out
            return (inputs[0] * op.attrs["by"],)

test_ops.py runs every case in every backend against the float64 reference, test_reference.py holds the reference to
torch. Inputs reach an executor as rows of float32 embedding tables: token t of a run reads row t of each table.
"""

# ruff: noqa: RUF012 (tables are read, never changed)
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.support.blocks import random_blocks
from tokenmill.program import Builder, Heads, Op, Program, RecordingBuilder, Rope, StepInputs, Value, Weight
from tokenmill.quant.formats import BLOCKS, numbers

Tensors = tuple[torch.Tensor, ...]


@dataclass
class Given:
    """Makes a case's random inputs and weights."""

    b: Builder
    num_tokens: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    count: int = 0

    def value(self, dim: int, size: float = 1.0) -> Value:
        """An activation (T, dim) of normal numbers."""
        numbers = (self.rng.standard_normal((self.num_tokens, dim)) * size).astype(np.float32)
        return self.b.embed(self.weight(numbers.shape, "F32", numbers))

    def weight(self, shape: tuple[int, ...], format: str = "F32", numbers: np.ndarray | None = None) -> Weight:
        self.count += 1
        if numbers is not None:
            data = numbers.ravel().view(np.uint8)
        else:
            data = random_blocks(format, int(np.prod(shape)) // BLOCKS[format].block_size, self.count)
        return Weight(f"weight{self.count}", shape, format, data)

    def biased(self, weight: Weight) -> Weight:
        bias = self.weight(weight.shape[:1])
        return Weight(weight.name, weight.shape, weight.format, weight.data, bias)


class OpCase:
    op: str
    shapes: list[dict[str, Any]]
    perf: list[dict[str, Any]] = []
    # Runs of steps, {sequence: new tokens}; every step is checked. Rows that end vectors and tiles at odd places.
    steps: list[dict[int, int]] = [{0: 1}, {0: 2, 1: 3}, {0: 16}, {0: 29, 1: 1, 2: 4}]

    def record(self, b: Builder, given: Given, **shape: Any) -> None:
        raise NotImplementedError

    def torch(self, op: Op, inputs: Tensors, weights: Tensors, step: StepInputs) -> Tensors:
        raise NotImplementedError

    def program(self, shape: dict[str, Any], num_tokens: int) -> tuple[Program, Op]:
        """A program of the op, its inputs before it and a head after it, and the op."""
        b = RecordingBuilder()
        given = Given(b, num_tokens)
        self.record(b, given, **shape)
        op = b.program.ops[-1]
        assert op.name == self.op
        out = op.outputs[0]
        x = out if out.rows == "L" else b.select_rows(out)
        return b.finish(b.linear(x, given.weight((num_tokens, out.dim)))), op


class Embed(OpCase):
    op = "embed"
    shapes = [dict(dim=64, format=format) for format in sorted(BLOCKS) if BLOCKS[format].block_size <= 32]
    shapes += [dict(dim=512, format=format, scale=22.6) for format in ("F32", "Q4_K", "Q6_K", "Q8_0")]
    perf = [dict(dim=576, format="Q8_0")]

    def record(self, b, given, dim, format, scale=1.0):
        b.embed(given.weight((given.num_tokens, dim), format), scale)

    def torch(self, op, inputs, weights, step):
        return (op.attrs["scale"] * F.embedding(torch.tensor(step.token_ids), weights[0]),)


class RmsNorm(OpCase):
    op = "rms_norm"
    shapes = [
        dict(dim=64),
        dict(dim=576, eps=1e-5),
        dict(dim=100),
        dict(dim=256, group=32),
        dict(dim=640, group=64, size=1e4),
        dict(dim=64, size=1e-4),
    ]
    perf = [dict(dim=576), dict(dim=1024, group=256)]

    def record(self, b, given, dim, group=None, eps=1e-6, size=1.0):
        b.rms_norm(given.value(dim, size), given.weight((group or dim,)), eps)

    def torch(self, op, inputs, weights, step):
        x, group = inputs[0], op.attrs["group"]
        return (F.rms_norm(x.reshape(-1, group), (group,), weights[0], op.attrs["eps"]).reshape(x.shape),)


class Linear(OpCase):
    op = "linear"
    shapes = [
        *(dict(dim=256, out=(33,), format=format) for format in sorted(BLOCKS)),
        dict(dim=64, out=(1,)),
        dict(dim=96, out=(96,), residual=True),
        dict(dim=64, out=(64,), residual=True, bias=True, format="Q8_0"),
        dict(dim=96, out=(64, 32, 32), bias=True),
        dict(dim=576, out=(576, 192, 192), format="Q4_1"),
        dict(dim=1536, out=(576,), residual=True, format="Q4_1"),
        dict(dim=256, out=(40, 24), format="BF16"),
    ]
    perf = [
        dict(dim=576, out=(576, 192, 192), format="Q4_1"),
        dict(dim=576, out=(1536, 1536), format="Q4_1"),
        dict(dim=1536, out=(576,), format="Q4_1", residual=True),
        dict(dim=576, out=(49152,), format="Q8_0"),
        dict(dim=1024, out=(1024,), format="F16"),
        dict(dim=1024, out=(1024,), format="BF16"),
        dict(dim=1024, out=(1024,), format="F32"),
        dict(dim=1024, out=(1024,), format="Q4_K"),
        dict(dim=1024, out=(1024,), format="Q6_K"),
        dict(dim=1024, out=(1024,), format="Q8_0"),
    ]

    def record(self, b, given, dim, out, format="F32", residual=False, bias=False):
        weights = [given.weight((features, dim), format) for features in out]
        if bias:
            weights = [given.biased(weight) for weight in weights]
        x = given.value(dim)
        if residual:
            b.linear(x, weights[0], residual=given.value(out[0]))
        else:
            b.linear_split(x, tuple(weights))

    def torch(self, op, inputs, weights, step):
        biases = [None if w.bias is None else tensor(w.bias) for w in op.weights]
        outputs = [F.linear(inputs[0], w, bias) for w, bias in zip(weights, biases)]
        return tuple(y + inputs[1] for y in outputs) if len(inputs) == 2 else tuple(outputs)


class Add(OpCase):
    op = "add"
    shapes = [dict(dim=64), dict(dim=101)]
    perf = [dict(dim=640)]

    def record(self, b, given, dim):
        b.add(given.value(dim), given.value(dim))

    def torch(self, op, inputs, weights, step):
        return (torch.add(*inputs),)


class RotaryEmbedding(OpCase):
    op = "rope"
    shapes = [
        dict(heads=4, kv_heads=2, head_dim=32),
        dict(heads=9, kv_heads=3, head_dim=64),
        dict(heads=2, kv_heads=1, head_dim=24),
        dict(heads=2, kv_heads=2, head_dim=64, turned=16),
        dict(heads=2, kv_heads=1, head_dim=32, scale=1.3),
        dict(heads=1, kv_heads=1, head_dim=256, theta=1e6),
    ]
    steps = [{0: 1}, {0: 300, 1: 2}, {0: 5, 1: 3}]
    perf = [dict(heads=9, kv_heads=3, head_dim=64)]

    def record(self, b, given, heads, kv_heads, head_dim, turned=None, theta=1e4, scale=1.0):
        turned = turned or head_dim
        inv_freq = tuple(float(np.float32(theta ** (-i / turned))) for i in range(0, turned, 2))
        q, k = given.value(heads * head_dim), given.value(kv_heads * head_dim)
        b.rope(q, k, Rope(head_dim, inv_freq, scale))

    def torch(self, op, inputs, weights, step):
        """As complex numbers: pair i of a head times scale * exp(1j * position * inv_freq[i])."""
        half, dim = len(op.attrs["inv_freq"]), op.attrs["head_dim"]
        angle = torch.tensor(step.positions).double()[:, None] * torch.tensor(op.attrs["inv_freq"]).double()
        turn = torch.polar(torch.full_like(angle, op.attrs["scale"]), angle)[:, None]
        outputs = []
        for x in inputs:
            heads = x.reshape(len(x), -1, dim)
            pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turn
            outputs.append(torch.cat([pairs.real, pairs.imag, heads[..., 2 * half :]], -1).reshape(x.shape))
        return tuple(outputs)


class Attention(OpCase):
    op = "attention"
    shapes = [
        dict(heads=4, kv_heads=4, head_dim=32),
        dict(heads=9, kv_heads=3, head_dim=64),
        dict(heads=4, kv_heads=1, head_dim=128),
        dict(heads=2, kv_heads=1, head_dim=256, scale=0.05),
        dict(heads=4, kv_heads=2, head_dim=32, window=1),
        dict(heads=4, kv_heads=2, head_dim=32, window=16),
        dict(heads=4, kv_heads=2, head_dim=32, window=21),
        dict(heads=4, kv_heads=2, head_dim=32, softcap=5.0),
        dict(heads=4, kv_heads=2, head_dim=32, softcap=5.0, window=9),
        dict(heads=2, kv_heads=2, head_dim=16, scale=30.0),
    ]
    # A prompt; a chunk that goes on beside a new prompt; decodes; a long chunk.
    steps = [{0: 1, 1: 40}, {0: 15, 1: 7, 2: 33}, {0: 1, 1: 1, 2: 1}, {2: 70, 0: 2}]
    perf = [dict(heads=9, kv_heads=3, head_dim=64), dict(heads=4, kv_heads=1, head_dim=256, window=512)]

    def record(self, b, given, heads, kv_heads, head_dim, scale=None, window=0, softcap=0.0):
        q, k, v = given.value(heads * head_dim), given.value(kv_heads * head_dim), given.value(kv_heads * head_dim)
        scale = head_dim**-0.5 if scale is None else scale
        b.attention(q, k, v, Heads(heads, kv_heads, head_dim), scale=scale, window=window, softcap=softcap)

    def torch(self, op, inputs, weights, step):
        """Whole sequences only (every kv_len is its row count). Keys and values rounded to f16, as the cache does."""
        a, outputs = op.attrs, []
        assert not a["softcap"]
        for start, end in zip(step.q_start[:-1], step.q_start[1:]):
            q, k, v = (x[start:end].reshape(end - start, -1, a["head_dim"]).transpose(0, 1) for x in inputs)
            k, v = k.half().double(), v.half().double()
            at = torch.arange(end - start)
            distance = at[:, None] - at
            seen = (distance >= 0) & (distance < (a["window"] or len(at)))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=a["scale"], enable_gqa=True)
            outputs.append(out.transpose(0, 1).reshape(end - start, -1))
        return (torch.cat(outputs),)


class ActMul(OpCase):
    op = "act_mul"
    shapes = [dict(dim=dim, act=act) for act in ("silu", "gelu", "gelu_tanh") for dim in (64, 101)]
    shapes += [dict(dim=64, act=act, size=100.0) for act in ("silu", "gelu", "gelu_tanh")]
    perf = [dict(dim=1536, act="silu"), dict(dim=2048, act="gelu_tanh")]

    def record(self, b, given, dim, act, size=2.0):
        b.act_mul(given.value(dim, size), given.value(dim), act)

    def torch(self, op, inputs, weights, step):
        gate, up = inputs
        if op.attrs["act"] == "silu":
            return (F.silu(gate) * up,)
        return (F.gelu(gate, approximate="tanh" if op.attrs["act"] == "gelu_tanh" else "none") * up,)


class SelectRows(OpCase):
    op = "select_rows"
    shapes = [dict(dim=64), dict(dim=101)]
    perf = [dict(dim=576)]

    def record(self, b, given, dim):
        b.select_rows(given.value(dim))

    def torch(self, op, inputs, weights, step):
        return (inputs[0][torch.tensor(step.logit_rows)],)


CASES: list[OpCase] = [case() for case in OpCase.__subclasses__()]
SHAPES = [(case, shape) for case in CASES for shape in case.shapes]


def label(case: OpCase, shape: dict[str, Any]) -> str:
    return f"{case.op} " + " ".join(f"{key}={value}" for key, value in shape.items())


def tensor(weight: Weight) -> torch.Tensor:
    """Dequantised, float64."""
    return torch.from_numpy(numbers(weight).astype(np.float64))
