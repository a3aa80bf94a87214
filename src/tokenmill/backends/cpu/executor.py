"""CpuExecutor: a Program on this CPU through the native extension. Plans slots and ops once; a step is one native call.

It does not know requests, and knows no arithmetic: that is csrc/. What it decides at load is in `decisions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from ...config import KV_CACHE_BYTES, MIB, PAGE_SIZE
from ...errors import ConfigError, UnsupportedModel
from ...program import Op, Program, StepInputs, Value, Weight
from ...program.ops import ACTIVATIONS
from ..interface import SamplingInputs, SamplingOutputs
from . import _native

FLOAT_FORMATS = ("F32", "F16", "BF16")
BY_16 = ("Q2_K", "Q3_K", "Q6_K")  # their own scales are by 16 features, so the activations' must be
EMBED, RMS_NORM, LINEAR, ADD, ROPE, ATTENTION, ACT_MUL, SELECT_ROWS, QUANTISE, KV_WRITE = range(
    10
)  # OpKind in executor.h
KINDS = {
    "embed": EMBED,
    "rms_norm": RMS_NORM,
    "linear": LINEAR,
    "add": ADD,
    "rope": ROPE,
    "attention": ATTENTION,
    "act_mul": ACT_MUL,
    "select_rows": SELECT_ROWS,
}
GROUP_CODES = {None: 0, 32: 1, 16: 2}  # add_slot's `quantised`
NEEDS_QUANTISE = ("linear", "attention", "rope")  # ops whose output is whole only once every thread is done with it


class CpuExecutor:
    """backends.interface.Executor on the native kernels.

    max_tokens, max_requests and max_logit_rows bound a step; isa None takes the best this machine runs.
    keep_values gives every value a slot of its own, so that value() can read any of them after a step (--check).
    progress is called with (bytes packed, bytes in all) while weights are packed.
    """

    def __init__(
        self,
        program: Program,
        *,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        num_threads: int = 1,
        max_tokens: int = 512,
        max_requests: int = 64,
        max_logit_rows: int = 128,
        isa: str | None = None,
        kv_dtype: str = "float16",
        keep_values: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ):
        if page_size != PAGE_SIZE:
            raise ConfigError(f"page_size is {page_size}; the CPU kernels have pages of {PAGE_SIZE} positions")
        sets = _native.instruction_sets()
        if isa is not None and isa not in sets:
            raise ConfigError(f"isa is {isa!r}; this machine runs {', '.join(sets)}")
        if kv_dtype not in KV_CACHE_BYTES:
            raise ConfigError(f"kv_cache_dtype is {kv_dtype!r}; the CPU backend has {', '.join(KV_CACHE_BYTES)}")
        self.program = program
        self.max_logit_rows = max_logit_rows
        assert program.logits is not None
        self._native = _native.Executor(
            isa or "",
            num_threads,
            max_tokens,
            max_requests,
            max_logit_rows,
            num_pages,
            program.vocab_size,
            kv_dtype == "float32",
        )
        self._weights: dict[str, int] = {}
        self._vectors: dict[str, int] = {}
        self._packed: Counter[str] = Counter()
        self._load_weights(program, progress)
        for layer in program.kv_layers:
            self._native.add_kv_layer(layer.num_kv_heads, layer.head_dim, layer.window)
        self._keep_values = keep_values
        self._quantised = _activation_groups(program)
        self._slot_of = self._plan_slots(program, keep_values)
        self._op_labels: list[tuple[str, str]] = []
        for op in program.ops:
            self._add_op(op)
        self._native.ready(self._slot_of[program.logits.id])
        self._last_rows = {"T": 0, "L": 0}

    # ---- load

    def _load_weights(self, program: Program, progress: Callable[[int, int], None] | None) -> None:
        matrices: dict[str, Weight] = {}
        for op in program.ops:
            if op.name == "rms_norm":
                self._vector(op.weights[0])
            for weight in _matrices(op) if op.name != "embed" else op.weights:
                known = matrices.setdefault(weight.name, weight)
                if known.bias is None and weight.bias is not None:
                    matrices[weight.name] = weight
        total, done = sum(w.nbytes for w in matrices.values()), 0
        for name, weight in matrices.items():
            rows, cols = weight.shape
            bias = -1 if weight.bias is None else self._vector(weight.bias)
            try:
                self._weights[name] = self._native.add_weight(
                    weight.format, rows, cols, weight.data, bias, weight.order, weight.mapped
                )
            except ValueError as error:
                raise UnsupportedModel(f"{name} cannot be packed: {error}") from None
            self._packed[weight.format] += 1
            done += weight.nbytes
            if progress is not None:
                progress(done, total)

    def _vector(self, weight: Weight) -> int:
        if weight.name not in self._vectors:
            from ...quant.formats import numbers

            self._vectors[weight.name] = self._native.add_vector(np.ascontiguousarray(numbers(weight), np.float32))
        return self._vectors[weight.name]

    def _plan_slots(self, program: Program, keep_values: bool) -> dict[int, int]:
        """A slot for each value; a slot is free again after its value's last reader, if sizes agree."""
        last_use = {v.id: i for i, op in enumerate(program.ops) for v in op.inputs}
        assert program.logits is not None
        last_use[program.logits.id] = len(program.ops)
        slots: dict[int, int] = {}
        free: dict[tuple[str, int, int], list[int]] = {}

        def key(v: Value) -> tuple[str, int, int]:
            return v.rows, v.dim, GROUP_CODES[self._quantised.get(v.id)]

        for i, op in enumerate(program.ops):
            for v in op.outputs:
                pool = free.setdefault(key(v), [])
                slots[v.id] = pool.pop() if pool else self._native.add_slot(v.dim, v.rows == "L", key(v)[2])
            if not keep_values:
                for v in dict.fromkeys((*op.inputs, *op.outputs)):
                    if last_use.get(v.id, i) == i:
                        free[key(v)].append(slots[v.id])
        return slots

    def _add_op(self, op: Op) -> None:
        attrs = op.attrs
        kind = KINDS.get(op.name)
        if kind is None:
            raise UnsupportedModel(f"the CPU backend has no kernel for {op.name} ({op.where})")
        weights: list[int] = []
        ints: list[int] = []
        floats: list[float] = []
        inv_freq: list[float] = []
        if kind in (EMBED, LINEAR):
            weights = [self._weights[w.name] for w in op.weights]
        if kind == EMBED:
            floats = [attrs["scale"]]
        elif kind == RMS_NORM:
            weights, ints = [self._vectors[op.weights[0].name]], [attrs["group"]]
            floats = [attrs["eps"]]
        elif kind == ROPE:
            ints = [attrs["head_dim"]]
            floats, inv_freq = [attrs["scale"]], list(attrs["inv_freq"])
        elif kind == ATTENTION:
            ints = [attrs["layer"], attrs["num_heads"]]
            floats = [attrs["scale"], attrs["softcap"]]
        elif kind == ACT_MUL:
            ints = [ACTIVATIONS.index(attrs["act"])]
        quantised = [v for v in op.outputs if v.id in self._quantised]
        fused = bool(quantised) and op.name not in NEEDS_QUANTISE
        on_l = op.outputs[0].rows == "L"
        ins, outs = [self._slot_of[v.id] for v in op.inputs], [self._slot_of[v.id] for v in op.outputs]
        if kind == ATTENTION:
            self._emit("kv_write", op, KV_WRITE, ins[1:], ins[1:], [], ints[:1], [], [], False, on_l)
        self._emit(op.name, op, kind, ins, outs, weights, ints, floats, inv_freq, fused, on_l)
        for v in [] if fused else quantised:
            slot = [self._slot_of[v.id]]
            self._emit("quantise", op, QUANTISE, slot, slot, [], [], [], [], True, on_l)

    def _emit(self, label: str, op: Op, *native_op) -> None:
        self._native.add_op(*native_op)
        self._op_labels.append((label, op.where))

    # ---- step

    def execute(self, step: StepInputs, sampling: SamplingInputs, out: SamplingOutputs) -> None:
        """One step. Raises ValueError, before anything runs, if the arrays contradict each other or the limits."""
        self._last_rows = {"T": len(step.token_ids), "L": len(step.logit_rows)}
        self._native.execute(step, sampling, out)

    def forward(self, step: StepInputs) -> np.ndarray:
        """Run a step without sampling; a copy of the logits, float32 (L, vocab)."""
        self._last_rows = {"T": len(step.token_ids), "L": len(step.logit_rows)}
        self._native.forward(step)
        return self._native.logits(len(step.logit_rows))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._native.copy_page(source, destination)

    # ---- looking inside

    def value(self, value_id: int) -> np.ndarray:
        """A value of the last step, float32 (rows, dim). Only with keep_values: otherwise slots have been reused."""
        if not self._keep_values:
            raise ConfigError("value() needs an executor made with keep_values=True")
        value = self.program.values[value_id]
        return self._native.slot(self._slot_of[value_id], self._last_rows[value.rows], value.dim)

    @property
    def isa(self) -> str:
        return self._native.isa

    @property
    def memory(self) -> dict[str, int]:
        """Bytes allocated: packed weights, KV pages, workspace."""
        return {
            "weights": self._native.weight_bytes,
            "kv": self._native.kv_bytes,
            "workspace": self._native.workspace_bytes,
        }

    @property
    def decisions(self) -> list[tuple[str, str]]:
        formats = ", ".join(f"{count} x {name}" for name, count in self._packed.most_common())
        memory = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in self.memory.items())
        return [
            ("kernels", f"cpu/{self.isa}, {self._native.threads} threads"),
            ("matrices", formats),
            ("memory", memory),
        ]

    def profile(self, on: bool) -> None:
        """Start or stop timing each op; times are read by op_seconds()."""
        self._native.set_profile(on)

    def op_seconds(self) -> list[tuple[str, str, float]]:
        """(op, where, seconds) since last asked, summed over steps, on the first thread."""
        return [(*label, s) for label, s in zip(self._op_labels, self._native.op_seconds())]


def _activation_groups(program: Program) -> dict[int, int]:
    """Which values quantised linears read, and how many of their features share a scale: 32, or 16 where it pays.

    What goes into attention and into the head loses most when rounded to 8 bits, and those products are a small part
    of the work: groups of 16 there take a third off the divergence from float32 (docs/log.md, 2026-11-30).
    The kernels also need them for formats of BY_16.
    """
    attended = {v.id for op in program.ops if op.name == "attention" for v in op.inputs}
    assert program.logits is not None
    sensitive = attended | {program.logits.id}
    groups: dict[int, int] = {}
    for op in program.ops:
        if any(w.format not in FLOAT_FORMATS for w in _matrices(op)):
            fine = any(v.id in sensitive for v in op.outputs) or any(w.format in BY_16 for w in op.weights)
            value = op.inputs[0].id
            groups[value] = min(groups.get(value, 32), 16 if fine else 32)
    return groups


def _matrices(op: Op) -> tuple[Weight, ...]:
    return op.weights if op.name == "linear" else ()
