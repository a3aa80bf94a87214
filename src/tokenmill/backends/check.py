"""--check: every op of a step run again in the reference, on the executor's own inputs.

Since each op is judged on the inputs that the executor gave it, errors do not add up: the first op that differs is the
one that is wrong. It is named with its layer and the line of the model file that asked for it.

Kernels of quantised weights round their activations to 8 bits, each group by its largest, so an outlier costs the rest
of its group much and says nothing of the kernel. What that rounding costs on the very inputs is computed here, row by
row, and an output may be off by that and little more, in its norm and in each element.
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
ROUNDED_GROUPS = (16, 32)  # features that share a scale where activations are rounded to 8 bits
ROUNDED_NORM = 2.0  # how many times what that rounding costs a row it may be off by, in its norm,
ROUNDED_ELEMENT = 4.0  # ... and how many times what it costs the row's worst element each element may be
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
    """An output of one op against the reference. `error` and `limit` are parts of the result's size.

    Where activations are rounded to 8 bits these are of the row that is nearest to its limit, or past it.
    """

    index: int  # of the op in the program
    op: Op
    output: int  # which of the op's outputs
    error: float
    limit: float
    worst: tuple[int, int]  # row and column that differ most
    got: float
    wanted: float
    rounding: float | None = None  # how much of `error` 8-bit rounding of the op's inputs explains
    element_limit: float = np.inf  # how far apart `got` and `wanted` may be

    @property
    def ok(self) -> bool:
        return self.error <= self.limit and not abs(self.got - self.wanted) > self.element_limit  # False for NaN

    @property
    def strain(self) -> float:
        """The error as a part of its limit; of an op that must be exact, the error."""
        return self.error / self.limit if self.limit else self.error

    def __str__(self) -> str:
        weight = f" {self.op.weights[self.output].name}" if self.op.name == "linear" else ""
        worst = f"worst at row {self.worst[0]}, column {self.worst[1]}: {self.got:.6g} instead of {self.wanted:.6g}"
        allowed = f"limit {self.limit:.3g}"
        if self.rounding is not None:
            allowed += f" allows for 8-bit rounding of its input, which makes {self.rounding:.3g}"
            worst += f", {abs(self.got - self.wanted):.3g} apart, limit {self.element_limit:.3g}"
        return (
            f"op {self.index} {self.op.name}{weight} ({self.op.where}) differs by {self.error:.3g} of its size, "
            f"{allowed}; {worst}"
        )


@dataclass(slots=True)
class CheckReport:
    """What was compared, up to and including the first op that differs."""

    differences: list[Difference] = field(default_factory=list)

    @property
    def failure(self) -> Difference | None:
        return next((d for d in self.differences if not d.ok), None)

    @property
    def worst(self) -> dict[str, Difference]:
        """Of each kind of op the output that is nearest to its limit."""
        found: dict[str, Difference] = {}
        for d in self.differences:
            if d.op.name not in found or d.strain > found[d.op.name].strain:
                found[d.op.name] = d
        return found

    def __str__(self) -> str:
        if self.failure is not None:
            return str(self.failure)
        kinds = ", ".join(f"{name} {worst.error:.1e}" for name, worst in self.worst.items())
        return f"{len(self.differences)} outputs agree with the reference; nearest to their limits: {kinds}"


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
            got, rounded = executor.value(value.id), None
            if op.name == "linear" and op.weights[output].format not in FLOAT_FORMATS:
                rounded = _rounding(inputs[0], reference.array(op.weights[output]))
            report.differences.append(_difference(index, op, output, inputs, got, wanted[output], rounded))
        if report.failure is not None:
            break
    return report


def _rounding(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What 8-bit rounding of x (rows, cols) costs x @ weight.T: of each row the norm, and the largest element.

    A group is scaled so that its largest is 127; of ROUNDED_GROUPS the one that costs more.
    """
    norms, largest = [], []
    for features in ROUNDED_GROUPS:
        groups = x.astype(np.float32).reshape(len(x), -1, features)
        top = np.abs(groups).max(axis=-1, keepdims=True)
        scale = np.where(top > 0, top, 1) / np.float32(127)
        lost = ((np.rint(groups / scale) * scale - groups).reshape(x.shape) @ weight.T).astype(np.float64)
        norms.append(np.linalg.norm(lost, axis=1))
        largest.append(np.abs(lost).max(axis=1, initial=0.0))
    return np.maximum(*norms), np.maximum(*largest)


def _difference(
    index: int,
    op: Op,
    output: int,
    inputs: tuple,
    got: np.ndarray,
    wanted: np.ndarray,
    rounded: tuple[np.ndarray, np.ndarray] | None,
) -> Difference:
    limit = LIMITS.get(op.name, 1e-5)
    if got.shape != wanted.shape or got.size == 0:
        error = 0.0 if got.shape == wanted.shape else np.inf
        return Difference(index, op, output, error, limit, (0, 0), np.nan, np.nan)
    distance = np.abs(got.astype(np.float64) - wanted)
    product = wanted - inputs[1] if op.name == "linear" and len(inputs) == 2 else wanted  # without the residual
    unsound = not np.isfinite(got).all() and np.isfinite(wanted).all()

    def part(rows: slice) -> tuple[float, float]:
        """The rows' error, and the size that it is a part of."""
        size = float(np.linalg.norm(product[rows].astype(np.float64)))
        slack = ROUNDING * float(np.linalg.norm(wanted[rows].astype(np.float64)))
        missed = float(np.linalg.norm(distance[rows]))
        missed = max(missed - (slack if op.name in ("linear", "add") else 0.0), 0.0)
        return (missed / size if size > 0 else (0.0 if missed == 0 else np.inf)), size

    def difference(error: float, limit: float, where: tuple[int, int], **more: float) -> Difference:
        error = np.nan if unsound else error
        return Difference(index, op, output, error, limit, where, float(got[where]), float(wanted[where]), **more)

    if rounded is None or unsound:
        worst = np.unravel_index(np.argmax(distance), distance.shape)
        return difference(part(slice(None))[0], limit, (int(worst[0]), int(worst[1])))
    found = []
    for row, (norm, largest) in enumerate(zip(*rounded)):
        error, size = part(slice(row, row + 1))
        explained = float(norm) / size if size > 0 else 0.0
        column = int(np.argmax(distance[row]))
        slack = limit * float(np.abs(wanted[row]).max())
        found.append(
            difference(
                error,
                limit + ROUNDED_NORM * explained,
                (row, column),
                rounding=explained,
                element_limit=ROUNDED_ELEMENT * float(largest) + slack,
            )
        )
    return next((d for d in found if not d.ok), max(found, key=lambda d: d.strain))


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
