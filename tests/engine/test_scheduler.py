"""What the scheduler promises, on a fake device whose tokens depend on every slot of a request's context."""

import random

import pytest

from tests.support.drive import Ask, drive, make_engine
from tokenmill.core import FinishReason, SamplingParams
from tokenmill.engine.fake import FakeExecutor, expected
from tokenmill.engine.messages import AbortRequest, AddRequest
from tokenmill.engine.pace import SMALLEST_CHUNK, Pace
from tokenmill.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from tokenmill.sampling.seeds import choice_seed

VOCAB = 1000
PAGE = 16


def ask(prompt, max_tokens=8, seed=1, **fields) -> Ask:
    own = {
        name: fields.pop(name)
        for name in ("eos", "at_step", "abort_at_step", "priority", "namespace")
        if name in fields
    }
    return Ask(list(prompt), SamplingParams(seed=seed, max_tokens=max_tokens, **fields), **own)


def right(a: Ask, index: int = 0) -> list[int]:
    return expected(a.prompt, a.params.max_tokens, seed=choice_seed(a.params.seed, index), vocab_size=VOCAB)


def run(asks, num_pages=64, check=True, **settings):
    device = FakeExecutor(num_pages=num_pages, vocab_size=VOCAB)
    got = drive(device, asks, num_pages=num_pages, check_each_step=check, **settings)
    for i, a in enumerate(asks):
        for k in range(a.params.n):
            reply = got[i, k]
            if reply.finish_reason == FinishReason.LENGTH and len(reply.tokens) == a.params.max_tokens:
                assert reply.tokens == right(a, k)
            else:
                assert reply.tokens == right(a, k)[: len(reply.tokens)]
    return got


BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


def prompts(count, length, seed=0, alphabet=VOCAB):
    rng = random.Random(seed)
    return [[rng.randrange(alphabet) for _ in range(length)] for _ in range(count)]


# ---- one rule for prefill, chunks and decode


@BOTH
@pytest.mark.parametrize("budget", [1, 7, 16, 64, 512])
def test_a_prompt_in_chunks_gives_the_same_tokens(budget, overlap):
    got = run([ask(prompts(1, 100)[0])], budget=budget, overlap=overlap)
    assert len(got[0].tokens) == 8
    assert got.num_steps == -(-100 // budget) + 7


@BOTH
def test_a_long_prompt_does_not_stop_the_others(overlap):
    """Everyone running gets a token a step; the chunk of the long prompt gets the rest of the budget."""
    engine = make_engine(FakeExecutor(num_pages=200), num_pages=200, budget=32, overlap=overlap)
    add(engine, "short", [1, 2, 3], max_tokens=40)
    collect(engine, steps=3)
    add(engine, "long", list(range(640)), max_tokens=2)
    counts = collect(engine, steps=20)
    assert counts["short"] >= 19
    everything(engine)


def add(engine, name, prompt, max_tokens=8, **fields):
    own = {key: fields.pop(key) for key in ("priority", "namespace", "arrival_time") if key in fields}
    params = SamplingParams(max_tokens=max_tokens, **fields)
    engine.add(AddRequest(request_id=name, prompt_token_ids=prompt, params=params, **own))


def collect(engine, steps):
    counts = {}
    for _ in range(steps):
        for delta in engine.step():
            counts[delta.request_id] = counts.get(delta.request_id, 0) + len(delta.token_ids)
    return counts


def everything(engine):
    deltas = []
    for _ in range(100_000):
        if not engine.has_work:
            return deltas
        deltas += engine.step()
    raise AssertionError("no end")


def test_prompts_are_cut_to_what_fits_into_a_step_while_others_are_answered():
    """The fake device takes 0.2 ms a token: 0.05 s are 250 of them, less the step's own 2 ms."""
    device = FakeExecutor(num_pages=400)
    settings = dict(num_pages=400, budget=512, overlap=False, step_seconds=0.05, clock=device.clock)
    engine = make_engine(device, **settings)
    scheduler = engine.scheduler
    add(engine, "first", prompts(1, 1024)[0], max_tokens=40)
    assert next(chunks(engine)) == 512  # nobody waits
    everything_until(engine, lambda: scheduler.running[0].num_output_tokens)
    add(engine, "second", prompts(1, 1024, seed=1)[0], max_tokens=2)
    taken = [next(chunks(engine)) for _ in range(3)]
    assert all(200 <= count <= 250 for count in taken)
    assert scheduler.running[0].num_output_tokens == 4
    everything(engine)


def test_the_smallest_chunk_is_one_that_the_device_computes_well():
    pace = Pace(step_seconds=0.1)
    assert pace.limit(512) == 512  # nothing is known yet
    pace.observe(64, 64, 10.0)  # answers: says nothing of prompts
    assert pace.limit(512) == 512
    pace.observe(512, 9, 5.0)
    assert pace.limit(512) == SMALLEST_CHUNK and pace.limit(5) == 5
    for _ in range(40):
        pace.observe(512, 9, 0.256)
    assert 190 <= pace.limit(512) <= 200


def chunks(engine):
    """Tokens of each step's plan, as the device saw them."""
    while True:
        before = engine.runner.executor.num_tokens
        engine.step()
        yield engine.runner.executor.num_tokens - before


def everything_until(engine, condition):
    while not condition():
        engine.step()


# ---- prefixes (BC-034)


@BOTH
@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 100])
def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token(length, overlap):
    prompt = prompts(1, length)[0]
    asks = [ask(prompt), ask(prompt, at_step=12), ask(prompt, at_step=24, max_tokens=1), ask(prompt, at_step=24)]
    got = run(asks, overlap=overlap)
    assert got[0].num_cached_tokens == 0
    assert [got[i].num_cached_tokens for i in (1, 2, 3)] == [length - 1] * 3


@BOTH
@pytest.mark.parametrize("budget", [64, 200, 512])
def test_requests_that_arrive_together_compute_a_shared_prefix_once(budget, overlap):
    shared, own = prompts(1, 300)[0], prompts(8, 20, seed=1)
    device = FakeExecutor(num_pages=400, vocab_size=VOCAB)
    asks = [ask(shared + rest) for rest in own]
    got = drive(device, asks, num_pages=400, budget=budget, overlap=overlap, max_num_seqs=16)
    assert [got[i].tokens for i in range(8)] == [right(a) for a in asks]
    answers = 8 * 8
    again = device.num_tokens - answers - (300 + 8 * 20)
    assert again <= 8 * (4 * PAGE + PAGE)  # a few pages each at most, never the prefix


def test_no_one_waits_for_a_prefix_of_another_namespace_or_a_short_one():
    engine = make_engine(FakeExecutor(num_pages=200), num_pages=200, budget=512, overlap=False)
    prompt = prompts(1, 160)[0]
    add(engine, "a", prompt, namespace="a")
    add(engine, "b", prompt, namespace="b")
    add(engine, "c", prompt[:48] + [1] * 100, namespace="a")
    engine.step()
    assert len(engine.scheduler.running) == 3
    everything(engine)


def test_those_behind_a_request_that_waits_for_a_prefix_go_first():
    engine = make_engine(FakeExecutor(num_pages=200), num_pages=200, budget=512, overlap=False)
    prompt = prompts(1, 160)[0]
    add(engine, "a", prompt)
    add(engine, "b", [*prompt, 1, 2, 3])
    add(engine, "c", prompts(1, 100, seed=1)[0])
    engine.step()
    assert {r.request_id for r in engine.scheduler.running} == {"a", "c"}
    engine.step()
    assert {r.request_id for r in engine.scheduler.running} == {"a", "b", "c"}
    assert next(r for r in engine.scheduler.running if r.request_id == "b").num_cached_tokens == 160
    everything(engine)


@BOTH
def test_a_match_ends_at_any_token(overlap):
    prompt = prompts(1, 60)[0]
    for shared in range(1, 60):
        other = prompt[:shared] + [VOCAB - 1] * 5
        got = run([ask(prompt), ask(other, at_step=12)], overlap=overlap)
        assert got[1].num_cached_tokens == shared


def test_the_next_turn_finds_prompt_and_reply():
    first = ask(prompts(1, 50)[0], max_tokens=30)
    reply = right(first)
    got = run([first, ask(first.prompt + reply + [1, 2, 3], at_step=40)])
    assert got[1].num_cached_tokens == 79  # the last token of the reply was never computed


def test_two_identical_requests_at_once_end_up_on_the_same_pages():
    prompt = prompts(1, 64)[0]
    engine = make_engine(FakeExecutor(num_pages=64), num_pages=64, budget=256, overlap=False)
    for name in "ab":
        add(engine, name, prompt, max_tokens=30, seed=1)
    collect(engine, steps=2)
    a, b = engine.scheduler.running
    assert list(a.lease.pages[:4]) == list(b.lease.pages[:4])
    everything(engine)


def test_namespaces_share_nothing():
    prompt = prompts(1, 64)[0]
    got = run(
        [ask(prompt, namespace="a"), ask(prompt, namespace="b", at_step=12), ask(prompt, namespace="a", at_step=24)]
    )
    assert [got[i].num_cached_tokens for i in range(3)] == [0, 0, 63]


def test_without_prefix_caching_nothing_is_found_or_kept():
    prompt = prompts(1, 64)[0]
    got = run([ask(prompt), ask(prompt, at_step=12)], caching=False)
    assert got[1].num_cached_tokens == 0 and got.stats.pages_cached == 0 and got.stats.prefix_cache_queries == 0


# ---- n choices share the prompt


@BOTH
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_choices_compute_the_prompt_once(length, caching, overlap):
    got = run([ask(prompts(1, length)[0], n=4, max_tokens=20)], caching=caching, overlap=overlap, budget=40)
    assert len({tuple(got[0, k].tokens) for k in range(4)}) == 4
    assert got[0, 0].num_cached_tokens == 0
    assert [got[0, k].num_cached_tokens for k in (1, 2, 3)] == [length - 1] * 3
    assert got.stats.prompt_tokens == length and got.stats.generation_tokens == 80
    if not caching:
        assert got.stats.pages_cached == 0


@BOTH
def test_siblings_go_on_when_the_first_choice_is_aborted_before_its_prompt_is_computed(overlap):
    engine = make_engine(FakeExecutor(num_pages=64, vocab_size=VOCAB), num_pages=64, budget=8, overlap=overlap)
    add(engine, "a", prompts(1, 60)[0], n=3, seed=5, max_tokens=6)
    collect(engine, steps=2)
    engine.abort(AbortRequest("a", 0))
    last = {d.index: d for d in everything(engine) if d.finish_reason}
    assert last[0].finish_reason == FinishReason.ABORT
    assert {last[1].finish_reason, last[2].finish_reason} == {FinishReason.LENGTH}


# ---- memory (BC-036, BC-037)


def test_a_prompt_that_can_never_fit_is_refused_at_once_with_both_numbers():
    engine = make_engine(FakeExecutor(num_pages=8), num_pages=8, max_model_len=1000)
    with pytest.raises(ContextLengthExceeded, match=r"129 tokens.*128"):
        add(engine, "a", [1] * 129)
    with pytest.raises(ContextLengthExceeded):
        add(engine, "a", [1] * 128)
    assert not engine.has_work
    add(engine, "a", [1] * 127, max_tokens=5)
    deltas = everything(engine)
    assert sum(len(d.token_ids) for d in deltas) == 1 and deltas[-1].finish_reason == FinishReason.LENGTH


@BOTH
@pytest.mark.parametrize("max_tokens", [17, 100, 10**9, None])
def test_generation_ends_at_the_edge_of_the_context(max_tokens, overlap):
    device = FakeExecutor(num_pages=8)
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    got = drive(device, [Ask([1] * 112, params)], num_pages=8, overlap=overlap)
    assert len(got[0].tokens) == 16 and got[0].finish_reason == FinishReason.LENGTH


@BOTH
def test_small_requests_are_served_beside_those_that_need_every_page(overlap):
    """8 pages; two requests that grow into all of them, eight choices of such a one, and a small one behind."""
    asks = [ask(prompts(1, 7 * PAGE, seed=i)[0], max_tokens=PAGE, seed=i) for i in range(2)]
    asks += [ask(prompts(1, 6 * PAGE)[0], n=8, max_tokens=2 * PAGE), ask([1, 2, 3, 4, 5])]
    got = run(asks, num_pages=8, overlap=overlap)
    assert all(r.finish_reason == FinishReason.LENGTH for r in got.replies.values())


@BOTH
@pytest.mark.parametrize("caching, shared, classes", [(True, 0, 1), (True, 150, 3), (False, 0, 3)])
def test_no_storm_under_pressure(classes, shared, caching, overlap):
    """Pages for about three of thirty requests: all finish, in bounded preemptions and steps, in order of arrival."""
    common = prompts(1, shared)[0]
    asks = [
        ask(common + p, max_tokens=300, seed=i, priority=i % classes) for i, p in enumerate(prompts(30, 200 - shared))
    ]
    got = run(asks, num_pages=3 * 32, max_num_seqs=30, budget=256, caching=caching, overlap=overlap, check=False)
    assert all(r.finish_reason == FinishReason.LENGTH for r in got.replies.values())
    serial = 30 * (300 + 1)
    assert got.num_steps <= serial / 2
    assert got.stats.num_preemptions <= 3 * len(asks)


@BOTH
def test_a_preempted_request_keeps_its_tokens_and_its_count_of_cached_ones(overlap):
    asks = [ask(p, max_tokens=100, seed=i) for i, p in enumerate(prompts(4, 60))]
    got = run(asks, num_pages=20, overlap=overlap)
    assert got.stats.num_preemptions > 0
    assert [got[i].num_cached_tokens for i in range(4)] == [0] * 4
    assert got.stats.generation_tokens == 400 and got.stats.prompt_tokens == 240


@BOTH
def test_a_higher_class_takes_the_seats_of_a_lower_one(overlap):
    engine = make_engine(FakeExecutor(num_pages=64), num_pages=64, max_num_seqs=2, overlap=overlap)
    for i in range(2):
        add(engine, f"low{i}", [i] * 20, max_tokens=200, priority=5)
    collect(engine, steps=5)
    add(engine, "high", [7] * 20, max_tokens=5, priority=0)
    assert collect(engine, steps=9)["high"] == 5
    assert all(d.finish_reason in (None, FinishReason.LENGTH) for d in everything(engine))


def test_requests_start_in_order_of_class_then_arrival():
    engine = make_engine(FakeExecutor(num_pages=64), num_pages=64, max_num_seqs=1, overlap=False)
    for name, priority, arrival in [("c", 1, 1.0), ("b", 0, 3.0), ("d", 1, 2.0), ("a", 0, 2.0)]:
        add(engine, name, [1, 2], priority=priority, arrival_time=arrival)
    order = [d.request_id for d in everything(engine) if d.finish_reason]
    assert order == ["a", "b", "c", "d"]


# ---- endings


@BOTH
def test_end_tokens_stop_tokens_and_lengths(overlap):
    free = ask([1, 2, 3], max_tokens=20)
    tokens = right(free)
    got = run(
        [
            ask([1, 2, 3], max_tokens=20, eos=[tokens[5]]),
            ask([1, 2, 3], max_tokens=20, stop_token_ids=[tokens[7], tokens[9]]),
            ask([1, 2, 3], max_tokens=20, eos=[tokens[5]], ignore_eos=True),
            ask([1, 2, 3], max_tokens=20, eos=[tokens[5]], stop_token_ids=[tokens[5]]),
        ],
        overlap=overlap,
    )
    ends = [(len(got[i].tokens), got[i].finish_reason, got[i].stop_reason) for i in range(4)]
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert ends == [(6, stop, None), (8, stop, tokens[7]), (20, length, None), (6, stop, None)]


@BOTH
def test_min_tokens_forbids_the_end_until_reached(overlap):
    tokens = right(ask([1, 2, 3], max_tokens=20))
    device = FakeExecutor(num_pages=8, vocab_size=VOCAB)
    params = SamplingParams(seed=1, max_tokens=20, min_tokens=12)
    got = drive(device, [Ask([1, 2, 3], params, eos=tokens)], num_pages=8, overlap=overlap)
    assert 12 <= len(got[0].tokens) <= 20 and not set(got[0].tokens[:12]) & set(tokens)


@BOTH
def test_one_request_without_finite_logits_ends_alone(overlap):
    device = FakeExecutor(num_pages=64, vocab_size=VOCAB, broken_tokens=[999])
    asks = [ask([1, 2, 3]), ask([4, 5, 999]), ask([6, 7, 8])]
    got = drive(device, asks, num_pages=64, overlap=overlap)
    assert got[1].finish_reason == FinishReason.ERROR and "not finite" in got[1].error and got[1].tokens == []
    assert got[0].tokens == right(asks[0]) and got[2].tokens == right(asks[2])


@BOTH
def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(overlap):
    class Failing(FakeExecutor):
        def execute(self, step, sampling, out):
            if self.num_steps == 4:
                self.num_steps += 1
                raise RuntimeError("a bit fell over")
            super().execute(step, sampling, out)

    device = Failing(num_pages=64, vocab_size=VOCAB)
    asks = [ask([1, 2, 3]), ask([9, 8, 7], at_step=20)]
    got = drive(device, asks, num_pages=64, overlap=overlap)
    assert got[0].finish_reason == FinishReason.ERROR and "bit" not in got[0].error
    assert got[1].tokens == right(asks[1])


def test_a_device_that_keeps_failing_is_reported():
    class Broken(FakeExecutor):
        def execute(self, step, sampling, out):
            raise RuntimeError("gone")

    engine = make_engine(Broken(num_pages=8), num_pages=8)
    with pytest.raises(RuntimeError, match="gone"):
        for i in range(4):
            add(engine, str(i), [1])
            everything(engine)


# ---- aborts (BC-030, BC-031)


@BOTH
@pytest.mark.parametrize("when", range(0, 9))
def test_an_abort_gives_its_pages_back_within_a_step(when, overlap):
    engine = make_engine(
        FakeExecutor(num_pages=64), num_pages=64, max_num_seqs=1, budget=16, caching=False, overlap=overlap
    )
    add(engine, "a", [1] * 60, max_tokens=1000)
    add(engine, "b", [2] * 60, max_tokens=1000)
    for _ in range(when):
        engine.step()
    engine.abort(AbortRequest("a"))
    engine.abort(AbortRequest("b"))
    engine.abort(AbortRequest("nobody"))
    deltas = engine.step()
    assert sorted(d.request_id for d in deltas if d.finish_reason == FinishReason.ABORT) == ["a", "b"]
    assert not engine.has_work and engine.pool.num_free == 64
    engine.abort(AbortRequest("a"))
    add(engine, "a", [1, 2], max_tokens=2)  # the id may come again
    assert everything(engine)[-1].finish_reason == FinishReason.LENGTH


@BOTH
def test_a_matched_stop_string_ends_a_choice_as_stop(overlap):
    engine = make_engine(FakeExecutor(num_pages=64), num_pages=64, overlap=overlap)
    add(engine, "a", [1] * 20, n=2, max_tokens=30)
    collect(engine, steps=6)
    engine.abort(AbortRequest("a", 1, FinishReason.STOP))
    last = {d.index: d.finish_reason for d in everything(engine) if d.finish_reason}
    assert last == {0: FinishReason.LENGTH, 1: FinishReason.STOP}


# ---- the queue


def test_the_queue_is_bounded_and_ids_are_unique():
    engine = make_engine(FakeExecutor(num_pages=8), num_pages=8, max_num_seqs=1, max_waiting=4)
    add(engine, "a", [1], n=3)
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        add(engine, "a", [1])
    with pytest.raises(Overloaded, match="3 sequences run and wait; 1 may run"):
        add(engine, "b", [1], n=3)
    with pytest.raises(InvalidRequest, match="n is 6"):
        add(engine, "c", [1], n=6)
    assert engine.stats().num_waiting + engine.stats().num_gated == 3
    everything(engine)
    assert engine.stats().num_waiting == engine.stats().num_gated == engine.stats().num_running == 0


@BOTH
def test_a_request_that_needs_every_page_does_without_the_copy_of_a_partly_shared_one(overlap):
    """8 pages: five are matched, a sixth would be copied, and the request needs all but the copy's source."""
    prompt = prompts(1, 115)[0]
    got = run([ask(prompt[:85], max_tokens=1), ask(prompt[:83] + [1] * 32, at_step=8)], num_pages=8, overlap=overlap)
    assert got[1].num_cached_tokens == 80
    got = run([ask(prompt[:85], max_tokens=1), ask(prompt[:83] + [1] * 4, at_step=8)], num_pages=8, overlap=overlap)
    assert got[1].num_cached_tokens == 83
