"""--check: every op of a step run again in the reference, on the executor's own inputs.

Since each op is judged on the inputs that the executor gave it, errors do not add up: the first op that differs is the
one that is wrong. It is named with its layer and the line of the model file that asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..errors import TokenmillError
from ..program import Op, Program, StepInputs
from .interface import Executor, SamplingInputs, SamplingOutputs
from .reference import ReferenceBackend

# How far an op may be from the reference, as a part of its result's size (L2 norm over the whole output).
LIMITS = {
    "embed": 1e-6,
    "rms_norm": 1e-5,
    "linear": 1e-5,
    "add": 1e-6,
    "rope": 1e-4,  # angles of some thousand radians, in float32
    "attention": 1e-4,
    "act_mul": 1e-5,
    "select_rows": 0.0,
}
QUANTISED_LINEAR = 5e-2  # activations in 8 bits a group of 32; on real models up to 0.03, a group gone wrong gives 0.2
FLOAT_FORMATS = ("F32", "F16", "BF16")
ROUNDING = 1e-6  # of the largest term in a sum, whatever is left of it


class Checkable(Executor, Protocol):
    def value(self, value_id: int) -> np.ndarray:
        """An op's output in the last step, float32 (rows, dim); needs keep_values."""
        ...


class CheckFailed(TokenmillError):
    code = "check_failed"


@dataclass(frozen=True, slots=True)
class Difference:
    """An output of one op against the reference. `error` and `limit` are parts of the result's size."""

    index: int  # of the op in the program
    op: Op
    output: int  # which of the op's outputs
    error: float
    limit: float
    worst: tuple[int, int]  # row and column that differ most
    got: float
    wanted: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # False for NaN

    def __str__(self) -> str:
        weight = f" {self.op.weights[self.output].name}" if self.op.name == "linear" else ""
        return (
            f"op {self.index} {self.op.name}{weight} ({self.op.where}) differs by {self.error:.2g} of its size, "
            f"limit {self.limit:.2g}; worst at row {self.worst[0]}, column {self.worst[1]}: "
            f"{self.got:.6g} instead of {self.wanted:.6g}"
        )


@dataclass(slots=True)
class CheckReport:
    """What was compared, up to and including the first op that differs."""

    differences: list[Difference] = field(default_factory=list)

    @property
    def failure(self) -> Difference | None:
        return next((d for d in self.differences if not d.ok), None)

    @property
    def worst(self) -> dict[str, float]:
        """The largest error of each kind of op."""
        found: dict[str, float] = {}
        for d in self.differences:
            found[d.op.name] = max(found.get(d.op.name, 0.0), d.error)
        return found

    def __str__(self) -> str:
        if self.failure is not None:
            return str(self.failure)
        kinds = ", ".join(f"{name} {error:.1e}" for name, error in self.worst.items())
        return f"{len(self.differences)} outputs agree with the reference; largest errors: {kinds}"


def check(program: Program, executor: Checkable, step: StepInputs, reference: ReferenceBackend | None = None):
    """Run `step` in the executor, then compare op by op; gives a CheckReport that ends at the first failure.

    A step that continues earlier ones needs the `reference` that checked those: it holds their keys and values.
    """
    executor.forward(step)
    return compare(program, executor, step, reference or _reference_for(step))


def compare(program: Program, executor: Checkable, step: StepInputs, reference: ReferenceBackend) -> CheckReport:
    """check() of a step that the executor has just run."""
    report = CheckReport()
    for index, op in enumerate(program.ops):
        inputs = tuple(executor.value(v.id) for v in op.inputs)
        wanted = reference.run_op(op, inputs, step)
        for output, value in enumerate(op.outputs):
            report.differences.append(_difference(index, op, output, inputs, executor.value(value.id), wanted[output]))
        if report.failure is not None:
            break
    return report


def _difference(index: int, op: Op, output: int, inputs: tuple, got: np.ndarray, wanted: np.ndarray) -> Difference:
    exact = op.name != "linear" or op.weights[output].format in FLOAT_FORMATS
    limit = LIMITS.get(op.name, 1e-5) if exact else QUANTISED_LINEAR
    if got.shape != wanted.shape or got.size == 0:
        error = 0.0 if got.shape == wanted.shape else np.inf
        return Difference(index, op, output, error, limit, (0, 0), np.nan, np.nan)
    distance = np.abs(got.astype(np.float64) - wanted)
    row, column = np.unravel_index(np.argmax(distance), distance.shape)
    product = wanted - inputs[1] if op.name == "linear" and len(inputs) == 2 else wanted  # without the residual
    size = float(np.linalg.norm(product.astype(np.float64)))
    slack = ROUNDING * float(np.linalg.norm(wanted.astype(np.float64))) if op.name in ("linear", "add") else 0.0
    missed = max(float(np.linalg.norm(distance)) - slack, 0.0)
    error = missed / size if size > 0 else (0.0 if missed == 0 else np.inf)
    if not np.isfinite(got).all() and np.isfinite(wanted).all():
        error = np.nan
    where = int(row), int(column)
    return Difference(index, op, output, float(error), limit, where, float(got[where]), float(wanted[where]))


def _reference_for(step: StepInputs) -> ReferenceBackend:
    pages = [row[: -(-length // 16)] for row, length in zip(step.page_table, step.kv_len)]
    return ReferenceBackend(int(max(p.max() for p in pages)) + 1)


class CheckedExecutor:
    """An Executor that checks every step of another one; raises CheckFailed at the first op that differs."""

    def __init__(self, program: Program, executor: Checkable, *, num_pages: int, page_size: int = 16):
        self.program = program
        self.executor = executor
        self.reference = ReferenceBackend(num_pages, page_size)
        self.report = CheckReport()  # of the last step

    def execute(self, step: StepInputs, sampling: SamplingInputs, out: SamplingOutputs) -> None:
        self.executor.execute(step, sampling, out)
        self._compare(step)

    def forward(self, step: StepInputs) -> np.ndarray:
        logits = self.executor.forward(step)
        self._compare(step)
        return logits

    def _compare(self, step: StepInputs) -> None:
        self.report = compare(self.program, self.executor, step, self.reference)
        if self.report.failure is not None:
            raise CheckFailed(str(self.report.failure))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.executor.copy_pages(pairs)
        self.reference.copy_pages(pairs)

    def value(self, value_id: int) -> np.ndarray:
        return self.executor.value(value_id)

    @property
    def decisions(self) -> list[tuple[str, str]]:
        return [*self.executor.decisions, ("check", "every op of every step is run again in the reference")]
