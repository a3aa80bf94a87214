"""Gates hold requests back without holding others up; StepReports say what each step did for whom."""

import pytest

from tests.support.drive import make_engine
from tokenmill.core import FinishReason, Request, SamplingParams
from tokenmill.engine.fake import FakeExecutor, StepCost, VirtualClock
from tokenmill.engine.messages import AbortRequest, AddRequest
from tokenmill.errors import InvalidRequest


class Gate:
    def __init__(self, error: Exception | None = None):
        self.open, self.error, self.cancels = False, error, 0

    def ready(self) -> bool:
        if self.error:
            raise self.error
        return self.open

    def cancel(self) -> None:
        self.cancels += 1


def gated(scheduler, *gates) -> Request:
    request = Request("gated", [1, 2, 3], SamplingParams(), max_tokens=4, gates=list(gates))
    scheduler.add(request)
    return request


def message(name, **fields) -> AddRequest:
    return AddRequest(request_id=name, prompt_token_ids=[1, 2, 3], params=SamplingParams(**fields))


@pytest.fixture
def engine():
    return make_engine(FakeExecutor(num_pages=32), num_pages=32, overlap=False)


def test_a_request_waits_for_all_its_gates_while_others_run(engine):
    first, second = Gate(), Gate()
    request = gated(engine.scheduler, first, second)
    engine.add(message("free", max_tokens=3))
    while engine.scheduler.waiting or engine.scheduler.running:
        assert all(d.request_id == "free" for d in engine.step())
    second.open = True
    assert engine.step() == [] and engine.has_work and engine.stats().num_gated == 1
    first.open = True
    plan = engine.scheduler.schedule()
    assert [row.request for row in plan.rows] == [request]
    assert first.cancels == second.cancels == 0


@pytest.mark.parametrize(
    "error, shown", [(InvalidRequest("the grammar has no end"), "the grammar has no end"), (KeyError("x"), "failed")]
)
def test_a_gate_that_fails_ends_its_request_alone(engine, error, shown):
    broken, other = Gate(error), Gate()
    request = gated(engine.scheduler, broken, other)
    assert engine.scheduler.schedule() is None
    (delta,) = engine.scheduler.take_deltas()
    assert delta.finish_reason == FinishReason.ERROR and shown in delta.error and "'x'" not in delta.error
    assert broken.cancels == other.cancels == 1 and request.gates == []
    assert not engine.has_work


def test_an_abort_cancels_each_closed_gate_once(engine):
    passed, closed = Gate(), Gate()
    passed.open = True
    request = gated(engine.scheduler, passed, closed)
    engine.scheduler.schedule()
    engine.scheduler.abort(request)
    assert (passed.cancels, closed.cancels) == (0, 1)
    assert not engine.scheduler.gated and not engine.scheduler.running


@pytest.mark.parametrize("overlap", [False, True])
def test_step_reports_count_every_computed_token_once(overlap):
    clock, reports = VirtualClock(), []

    def failing(step_report):
        raise RuntimeError("an observer's own business")

    cost = StepCost(step=1.0, token=0.25, context=0.0)
    device = FakeExecutor(num_pages=32, clock=clock, cost=cost)
    engine = make_engine(
        device, num_pages=32, budget=8, caching=False, overlap=overlap, clock=clock, observers=[failing, reports.append]
    )
    engine.add(AddRequest(request_id="a", prompt_token_ids=[5] * 20, params=SamplingParams(max_tokens=4), tenant="t"))
    while engine.has_work:
        engine.step()
    assert [(r.prefill_tokens, r.decode_tokens) for r in reports] == [(8, 0), (8, 0), (4, 0), (0, 1), (0, 1), (0, 1)]
    assert [r.rows[0].context_tokens for r in reports] == [36, 100, 74, 21, 22, 23]
    assert [r.seconds for r in reports] == [3.0, 3.0, 2.0, 1.25, 1.25, 1.25]
    assert [r.step_id for r in reports] == sorted(r.step_id for r in reports)
    assert {(row.request_id, row.index, row.tenant) for r in reports for row in r.rows} == {("a", 0, "t")}
    assert sum(r.seconds for r in reports) == engine.stats().busy_seconds == clock.now


def test_gauges_fall_to_zero_when_everyone_has_gone(engine):
    """BC-074."""
    for i in range(20):
        engine.add(message(f"{i}", max_tokens=50, n=2))
    for _ in range(3):
        engine.step()
    assert engine.stats().num_running > 0 and engine.stats().pages_used > 0
    before = engine.stats()
    for i in range(20):
        engine.abort(AbortRequest(f"{i}"))
    assert len(engine.step()) == 40
    after = engine.stats()
    assert (after.num_running, after.num_waiting, after.num_gated, after.pages_used) == (0, 0, 0, 0)
    for counter in ("num_steps", "prompt_tokens", "generation_tokens", "busy_seconds", "prefix_cache_queries"):
        assert getattr(after, counter) >= getattr(before, counter)


def test_a_lost_page_is_noticed_when_the_engine_falls_idle(engine):
    engine.pool.allocate(1)
    engine.add(message("a", max_tokens=2))
    with pytest.raises(RuntimeError, match="page accounting"):
        while engine.has_work:
            engine.step()
