"""StepReport: what a step did for whom, measured. Observers (metrics, usage, cost) get one after each commit.

Made only when somebody observes, after the callers have been served: never in the loop's way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class RowReport:
    """One request's share of a step. A token recomputed after a preemption counts as prefill."""

    request_id: str
    index: int
    tenant: str
    prefill_tokens: int
    decode_tokens: int  # 1 where the row computed nothing but its newest output token
    context_tokens: int  # positions attended to, summed over the row's tokens


@dataclass(frozen=True, slots=True)
class StepReport:
    step_id: int
    started: float  # the engine's clock (time.monotonic), seconds
    finished: float
    rows: tuple[RowReport, ...]
    num_running: int
    num_waiting: int

    @property
    def seconds(self) -> float:
        return self.finished - self.started

    @property
    def prefill_tokens(self) -> int:
        return sum(row.prefill_tokens for row in self.rows)

    @property
    def decode_tokens(self) -> int:
        return sum(row.decode_tokens for row in self.rows)


Observer = Callable[[StepReport], None]


def report(plan: StepPlan, result: StepResult, *, num_running: int, num_waiting: int) -> StepReport:
    rows = []
    for row in plan.rows:
        request, count = row.request, row.num_scheduled_tokens
        decode = int(count == 1 and row.samples and row.start >= request.num_prompt_tokens)
        context = count * row.start + count * (count + 1) // 2
        rows.append(RowReport(request.request_id, request.index, request.tenant, count - decode, decode, context))
    return StepReport(plan.step_id, result.started, result.finished, tuple(rows), num_running, num_waiting)
