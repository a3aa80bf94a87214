"""The real engine on a fake device with a virtual clock: thousands of requests, pages for a third of them, aborts.

The device's tokens depend on every slot of a request's context, so each answer is checked against what it must be.
"""

import random

import pytest

from tests.support.drive import make_engine
from tokenmill.core import FinishReason, SamplingParams
from tokenmill.engine.fake import FakeExecutor, StepCost, VirtualClock, expected
from tokenmill.engine.messages import AbortRequest, AddRequest
from tokenmill.sampling.seeds import choice_seed

VOCAB = 5000
FAST = StepCost(step=1e-3, token=1e-5, context=0.0)


class Load:
    """Requests at random, as a crowd would send them; a third share one of a few long prefixes."""

    def __init__(self, count: int, *, seed: int, max_prompt: int, max_tokens: int, max_n: int = 4, abort_share=0.2):
        rng = self.rng = random.Random(seed)
        prefixes = [[rng.randrange(VOCAB) for _ in range(max_prompt // 2)] for _ in range(4)]
        self.messages: dict[str, AddRequest] = {}
        self.arrivals: list[tuple[int, str]] = []
        self.aborts: dict[int, list[str]] = {}
        for i in range(count):
            length = rng.choice([rng.randint(1, 20), rng.randint(1, max_prompt // 2)])
            prompt = [rng.randrange(VOCAB) for _ in range(length)]
            if rng.random() < 0.33:
                prompt = rng.choice(prefixes)[: rng.randint(1, max_prompt // 2)] + prompt
            params = SamplingParams(
                n=rng.choice([1] * 6 + list(range(1, max_n + 1))),
                seed=rng.randrange(2**64),
                max_tokens=rng.randint(1, max_tokens),
            )
            message = AddRequest(
                request_id=f"r{i}", prompt_token_ids=prompt, params=params, priority=rng.choice([0, 0, 0, 1])
            )
            self.messages[message.request_id] = message
            when = rng.randrange(count)
            self.arrivals.append((when, message.request_id))
            if rng.random() < abort_share:
                self.aborts.setdefault(when + rng.randrange(200), []).append(message.request_id)
        self.arrivals.sort(reverse=True)


def run(load: Load, engine) -> dict[tuple[str, int], tuple[list[int], FinishReason]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], FinishReason] = {}
    step = 0
    while load.arrivals or engine.has_work:
        while load.arrivals and load.arrivals[-1][0] <= step:
            engine.add(load.messages[load.arrivals.pop()[1]])
        for request_id in load.aborts.pop(step, ()):
            index = load.rng.choice([None, None, 0])
            engine.abort(AbortRequest(request_id, index))
        for delta in engine.step():
            key = (delta.request_id, delta.index)
            assert key not in ends
            tokens.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason:
                ends[key] = delta.finish_reason
        step += 1
        if step % 97 == 0:
            engine.scheduler.tree.check([r.lease for r in engine.scheduler.running])
        assert step < 400_000
    return {key: (tokens[key], end) for key, end in ends.items()}


def all_right(load: Load, answers) -> None:
    for name, message in load.messages.items():
        for index in range(message.params.n):
            got, end = answers[name, index]
            seed = choice_seed(message.params.seed, index)
            count = message.params.max_tokens if end == FinishReason.LENGTH else len(got)
            assert got == expected(message.prompt_token_ids, count, seed=seed, vocab_size=VOCAB), (name, index)
            assert end in (FinishReason.LENGTH, FinishReason.ABORT)


@pytest.mark.parametrize(
    "overlap, caching, seed",
    [(True, True, 1), (True, False, 2), (False, True, 3)],
    ids=["overlap", "uncached", "plain"],
)
def test_a_storm_of_requests_and_aborts_ends_rightly_and_loses_no_page(overlap, caching, seed):
    load = Load(500, seed=seed, max_prompt=300, max_tokens=60)
    pages = 32 * 360 // 16 // 3  # a third of what the running ones could fill
    clock = VirtualClock()
    device = FakeExecutor(num_pages=pages, vocab_size=VOCAB, clock=clock, cost=FAST)
    engine = make_engine(
        device, num_pages=pages, max_num_seqs=32, budget=256, caching=caching, overlap=overlap, clock=clock
    )
    answers = run(load, engine)
    all_right(load, answers)
    stats = engine.stats()
    assert stats.pages_used == stats.num_running == stats.num_waiting == stats.num_gated == 0
    engine.scheduler.tree.check()
    assert stats.pages_cached + engine.pool.num_free == pages
    assert engine.pool.allocate(pages) is not None and len(engine.scheduler.tree) == 0
    assert stats.num_preemptions <= len(answers)
    assert (stats.prefix_cache_hits > 0) == caching
    assert stats.busy_seconds == pytest.approx(clock.now)


def test_five_hundred_long_requests():
    """Lengths to 2,000, n to 4, a fifth aborted, pages for a third."""
    load = Load(500, seed=7, max_prompt=1800, max_tokens=200)
    pages = 64 * 2000 // 16 // 3
    device = FakeExecutor(num_pages=pages, vocab_size=VOCAB, cost=FAST)
    engine = make_engine(device, num_pages=pages, max_num_seqs=64, budget=512)
    all_right(load, run(load, engine))
    assert engine.pool.num_available == pages


def test_nobody_waits_past_those_who_came_before():
    """Equal requests of one class: each starts once all but max_num_seqs of its elders have ended, and in order."""
    clock = VirtualClock()
    device = FakeExecutor(num_pages=60, vocab_size=VOCAB, clock=clock, cost=FAST)
    engine = make_engine(device, num_pages=60, max_num_seqs=8, budget=64, caching=False, clock=clock)
    rng = random.Random(0)
    for i in range(200):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 100))]
        engine.add(
            AddRequest(
                request_id=f"{i:03}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=30), arrival_time=i + 1
            )
        )
    started: dict[str, float] = {}
    ended = []
    while engine.has_work:
        for delta in engine.step():
            started.setdefault(delta.request_id, delta.first_scheduled_time)
            if delta.finish_reason:
                ended.append(delta.request_id)
    assert list(started) == sorted(started) or sorted(started.values()) == [started[name] for name in sorted(started)]
    place = {name: i for i, name in enumerate(ended)}
    assert max(place[f"{i:03}"] - i for i in range(200)) <= 16


def test_a_lower_class_waits_for_a_higher_one_but_not_for_ever():
    clock = VirtualClock()
    device = FakeExecutor(num_pages=100, vocab_size=VOCAB, clock=clock, cost=FAST)
    engine = make_engine(device, num_pages=100, max_num_seqs=4, budget=64, clock=clock)
    for i in range(60):
        params = SamplingParams(max_tokens=20, seed=i)
        engine.add(AddRequest(request_id=f"{i}", prompt_token_ids=[i] * 20, params=params, priority=i % 2))
    order = []
    while engine.has_work:
        order += [int(d.request_id) for d in engine.step() if d.finish_reason == FinishReason.LENGTH]
    assert len(order) == 60
    assert all(i % 2 == 0 for i in order[:28])
