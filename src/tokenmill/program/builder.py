"""Two builders for one model text: RecordingBuilder yields a Program, EagerBuilder runs each op at once.

A model calls the methods of Builder and reads like a torch forward. The eager builder is handed the backend that runs
its ops, so print() and pdb show real arrays inside a model file.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import numpy as np

from .ops import OPS
from .program import KVLayer, Op, Program, StepInputs, Value
from .weight import Weight


class OpRunner(Protocol):
    """What the eager builder needs of a backend: run one op on arrays, with the step's inputs at hand."""

    def run_op(self, op: Op, inputs: tuple[np.ndarray, ...], step: StepInputs) -> tuple[np.ndarray, ...]: ...


class Heads(NamedTuple):
    """How q, k and v divide. num_heads is a multiple of num_kv_heads: that many query heads share a key/value head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Rope(NamedTuple):
    """Rotary embedding of heads of head_dim features; see the op. Made by models/rope.py."""

    head_dim: int
    inv_freq: tuple[float, ...]
    scale: float = 1.0


class Builder(ABC):
    """The vocabulary of models. Every method takes and gives Values of float32 (rows, dim)."""

    @abstractmethod
    def _emit(
        self, name: str, inputs: tuple[Value, ...], weights: tuple[Weight, ...] = (), **attrs: Any
    ) -> tuple[Value, ...]: ...

    def embed(self, table: Weight, scale: float = 1.0) -> Value:
        """Rows of `table` (vocab, dim) at the step's token_ids, times `scale`."""
        return self._emit("embed", (), (table,), scale=float(scale))[0]

    def rms_norm(self, x: Value, weight: Weight, eps: float) -> Value:
        """RMS norm over runs of len(weight) features: the whole row, or each head where weight is (head_dim,)."""
        return self._emit("rms_norm", (x,), (weight,), eps=float(eps), group=weight.shape[0])[0]

    def linear(self, x: Value, weight: Weight, residual: Value | None = None) -> Value:
        """x @ weight.T (+ its bias) (+ residual)."""
        return self._emit("linear", (x,) if residual is None else (x, residual), (weight,))[0]

    def linear_split(self, x: Value, weights: tuple[Weight, ...]) -> tuple[Value, ...]:
        """Several linears of one input, computed together: q, k, v or gate, up."""
        return self._emit("linear", (x,), tuple(weights))

    def add(self, x: Value, y: Value) -> Value:
        return self._emit("add", (x, y))[0]

    def rope(self, q: Value, k: Value, rope: Rope) -> tuple[Value, ...]:
        """Rotate q and k by the step's positions; gives (q, k)."""
        return self._emit("rope", (q, k), **rope._asdict())

    def attention(
        self, q: Value, k: Value, v: Value, heads: Heads, *, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Value:
        """Causal attention through the paged cache. Each call is the next layer of the cache."""
        self.kv_layers.append(KVLayer(heads.num_kv_heads, heads.head_dim, window))
        attrs = dict(scale=float(scale), window=window, softcap=float(softcap), **heads._asdict())
        attrs["layer"] = len(self.kv_layers) - 1
        return self._emit("attention", (q, k, v), (), **attrs)[0]

    def act_mul(self, gate: Value, up: Value, act: str) -> Value:
        """act(gate) * up."""
        return self._emit("act_mul", (gate, up), act=act)[0]

    def select_rows(self, x: Value) -> Value:
        """The rows of x that give logits."""
        return self._emit("select_rows", (x,))[0]

    def __init__(self) -> None:
        self.kv_layers: list[KVLayer] = []
        self._num_values = 0
        self._layer = ""  # of the last weight used

    def _make_op(self, name: str, inputs: tuple[Value, ...], weights: tuple[Weight, ...], attrs: dict) -> Op:
        shapes = OPS[name].shape_rule(inputs, weights, attrs)
        outputs = tuple(Value(self._num_values + i, rows, dim) for i, (rows, dim) in enumerate(shapes))
        self._num_values += len(outputs)
        return Op(name, inputs, outputs, weights, attrs, self._where(weights))

    def _where(self, weights: tuple[Weight, ...]) -> str:
        """Layer, file and line of the model text that asked for the op: "layer 3, llama.py:21"."""
        if weights:
            parts = weights[0].name.split(".")
            self._layer = f"layer {parts[1]}, " if parts[0] == "layers" else ""
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        return f"{self._layer}{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


class RecordingBuilder(Builder):
    """Appends each op to a Program. Call finish(logits) once the model text has run."""

    def __init__(self) -> None:
        super().__init__()
        self.program = Program()

    def _emit(self, name, inputs, weights=(), **attrs):
        op = self._make_op(name, inputs, weights, attrs)
        self.program.ops.append(op)
        self.program.values.extend(op.outputs)
        return op.outputs

    def finish(self, logits: Value) -> Program:
        self.program.kv_layers = self.kv_layers
        self.program.logits = logits
        self.program.vocab_size = logits.dim
        return self.program


class EagerBuilder(Builder):
    """Runs each op at once on `runner`; Values carry their arrays."""

    def __init__(self, runner: OpRunner, step: StepInputs):
        super().__init__()
        self.runner = runner
        self.step = step

    def _emit(self, name, inputs, weights=(), **attrs):
        op = self._make_op(name, inputs, weights, attrs)
        arrays = self.runner.run_op(op, tuple(v.array for v in inputs), self.step)
        return tuple(Value(v.id, v.rows, v.dim, array) for v, array in zip(op.outputs, arrays))
