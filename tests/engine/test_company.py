"""The same answer, whatever the company: a tiny random model through the whole engine, alone and in every other way.

The native executor must be bit-exact. The reference runs on numpy's BLAS, whose sums depend on the number of rows: it
computes in float64 here, its tokens must be equal and its logprobs close.
"""

import numpy as np
import pytest

from tests.support.drive import Ask, drive
from tests.support.executors import FACTORIES
from tokenmill.core import SamplingParams
from tokenmill.program import Heads, RecordingBuilder, Rope, Weight

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 96, 64, 4, 2, 16, 2
PAGES = 48


def tiny_program(seed: int = 0):
    rng = np.random.default_rng(seed)

    def weight(name, *shape, scale=None):
        scale = scale or shape[-1] ** -0.5
        numbers = (rng.standard_normal(shape) * scale).astype(np.float32)
        return Weight(name, shape, "F32", numbers.view(np.uint8).ravel())

    def ones(name, dim):
        return Weight(name, (dim,), "F32", np.ones(dim, np.float32).view(np.uint8))

    b = RecordingBuilder()
    embed = weight("embed_tokens", VOCAB, DIM, scale=1.0)
    rope = Rope(HEAD_DIM, tuple(10000.0 ** (-i / (HEAD_DIM // 2)) for i in range(HEAD_DIM // 2)), 1.0)
    x = b.embed(embed)
    for i in range(LAYERS):
        q_dim, kv_dim = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        h = b.rms_norm(x, ones(f"l{i}.norm", DIM), 1e-5)
        shapes = (("q", q_dim), ("k", kv_dim), ("v", kv_dim))
        q, k, v = b.linear_split(h, tuple(weight(f"l{i}.{name}", dim, DIM, scale=0.25) for name, dim in shapes))
        q, k = b.rope(q, k, rope)
        a = b.attention(q, k, v, Heads(HEADS, KV_HEADS, HEAD_DIM), scale=HEAD_DIM**-0.5)
        x = b.linear(a, weight(f"l{i}.o", DIM, q_dim), residual=x)
        h = b.rms_norm(x, ones(f"l{i}.norm2", DIM), 1e-5)
        gate, up = b.linear_split(h, (weight(f"l{i}.gate", 128, DIM), weight(f"l{i}.up", 128, DIM)))
        x = b.linear(b.act_mul(gate, up, "silu"), weight(f"l{i}.down", DIM, 128), residual=x)
    h = b.rms_norm(b.select_rows(x), ones("norm", DIM), 1e-5)
    return b.finish(b.linear(h, weight("lm_head", VOCAB, DIM, scale=0.4)))


@pytest.fixture(scope="module", params=FACTORIES)
def device(request):
    limits = dict(num_pages=PAGES, page_size=16, max_tokens=256, max_requests=16, max_logit_rows=80)
    if request.param == "reference":
        limits |= dict(dtype=np.float64, kv_dtype=np.float64)
    executor = FACTORIES[request.param](tiny_program(), **limits)
    executor.exact = request.param != "reference"
    return executor


def asks() -> list[Ask]:
    rng = np.random.default_rng(1)
    prompt = [rng.integers(0, VOCAB, n).tolist() for n in (40, 40, 17, 1, 33, 64, 40)]
    prompt[1] = prompt[0][:25] + prompt[1][25:]  # shares a page and a half with the first
    prompt[6] = prompt[0]
    params = [
        SamplingParams(temperature=0, logprobs=3, max_tokens=24),
        SamplingParams(seed=7, logprobs=0, max_tokens=24),
        SamplingParams(seed=8, temperature=1.5, top_p=0.8, logprobs=2, max_tokens=24),
        SamplingParams(seed=9, top_k=20, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=1, max_tokens=24),
        SamplingParams(seed=10, n=3, min_p=0.02, presence_penalty=0.5, logprobs=1, max_tokens=24),
        SamplingParams(seed=11, temperature=0, prompt_logprobs=2, logit_bias={5: 4.0}, logprobs=1, max_tokens=16),
        SamplingParams(seed=12, min_tokens=10, stop_token_ids=list(range(0, VOCAB, 2)), logprobs=1, max_tokens=24),
    ]
    asks = [Ask(p, s) for p, s in zip(prompt, params)]
    asks[2].bad_words = [[3], [5, 6]]
    return asks


@pytest.fixture(scope="module")
def alone(device):
    """Each request by itself on a cold engine, its prompt in one step."""
    runs = [drive(device, [a], num_pages=PAGES, budget=256, max_num_seqs=16, overlap=False) for a in asks()]
    return {(i, k): reply for i, run in enumerate(runs) for (_, k), reply in run.replies.items()}


def same(device, got, want):
    assert got.keys() == want.keys()
    for key, reply in got.items():
        other = want[key]
        assert reply.tokens == other.tokens, key
        assert (reply.finish_reason, reply.stop_reason) == (other.finish_reason, other.stop_reason)
        for mine, theirs in ((reply.logprobs, other.logprobs), (reply.prompt_logprobs, other.prompt_logprobs)):
            assert len(mine) == len(theirs)
            if device.exact:
                assert mine == theirs, key
            for a, b in zip(mine, theirs):
                assert a.token_id == b.token_id
                np.testing.assert_allclose([a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs], atol=1e-5)


WAYS = {
    "together": dict(),
    "overlapped": dict(overlap=True),
    "chunks of 1": dict(budget=10),
    "chunks of 7": dict(budget=17),
    "one by one": dict(max_num_seqs=1),
    "without a cache": dict(caching=False),
    "preempted": dict(preempt_every=5),
    "preempted in flight": dict(preempt_every=3, overlap=True),
    "preempted, without a cache": dict(preempt_every=7, overlap=True, caching=False),
    "with pages for a few": dict(num_pages=9, overlap=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_logprobs_do_not_depend_on(device, alone, way):
    settings = dict(num_pages=PAGES, budget=256, max_num_seqs=10, overlap=False) | WAYS[way]
    run = drive(device, asks(), check_each_step=True, **settings)
    if "preempted" in way:
        assert run.stats.num_preemptions > 0
    same(device, run.replies, alone)


def test_a_warm_cache_gives_what_a_cold_one_gave(device, alone):
    first = drive(device, asks(), num_pages=PAGES, max_num_seqs=10)
    again = drive(device, asks(), engine=first.engine)
    same(device, again.replies, alone)
    assert again[0].num_cached_tokens == 39


@pytest.mark.parametrize("order", [[6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 5, 2, 4]])
def test_any_order_of_arrival(device, alone, order):
    late = asks()
    for step, i in enumerate(order):
        late[i].at_step = 3 * step
    same(device, drive(device, late, num_pages=PAGES, max_num_seqs=10).replies, alone)


def test_prompt_logprobs_are_whole_and_the_same_on_a_warm_cache(device):
    """BC-012: all positions, equal to the cold run, and the count of cached tokens tells the truth."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, VOCAB, 200).tolist()
    changed = [*prompt[:100], (prompt[100] + 1) % VOCAB, *prompt[101:]]

    def score(tokens):
        return Ask(tokens, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1))

    settings = dict(num_pages=PAGES, max_num_seqs=4)
    cold = [drive(device, [score(p)], **settings)[0] for p in (prompt, changed)]
    run = drive(device, [score(prompt)], **settings)
    warm = [drive(device, [score(p)], engine=run.engine)[0] for p in (prompt, changed)]
    other = Ask(rng.integers(0, VOCAB, 300).tolist(), SamplingParams(temperature=0, max_tokens=8))
    drive(device, [other], engine=run.engine)
    warm.append(drive(device, [score(prompt)], engine=run.engine)[0])
    for got, want in zip(warm, (*cold, cold[0])):
        assert len(got.prompt_logprobs) == 199 and got.num_cached_tokens == 0
        assert [p.token_id for p in got.prompt_logprobs] == [p.token_id for p in want.prompt_logprobs]
        same(device, {0: got}, {0: want})
    plain = drive(device, [Ask(prompt, SamplingParams(temperature=0, max_tokens=2))], engine=run.engine)
    assert plain[0].tokens == cold[0].tokens and plain[0].num_cached_tokens == 199


def test_only_scoring_a_prompt_generates_nothing(device):
    ask = Ask(list(range(50)), SamplingParams(max_tokens=0, prompt_logprobs=0))
    got = drive(device, [ask], num_pages=PAGES)[0]
    assert got.tokens == [] and len(got.prompt_logprobs) == 49 and got.finish_reason == "length"
    assert all(np.isfinite(p.logprob) and p.rank >= 1 for p in got.prompt_logprobs)


def test_seeds(device):
    """BC-044: not cut to 32 bits, equal seeds give equal text whatever runs between, no seed gives a fresh one."""

    def tokens(seed, *others):
        params = SamplingParams(seed=seed, max_tokens=12)
        return drive(device, [Ask([1, 2, 3], params), *others], num_pages=PAGES)[0].tokens

    traffic = Ask([4, 5], SamplingParams(seed=3, max_tokens=20))
    seeds = [-1, 0, 7, 7 + 2**32, 2**31, 2**63 - 1, 2**64 - 2]
    first = [tokens(seed) for seed in seeds]
    assert len(set(map(tuple, first))) == len(seeds)
    assert [tokens(seed, traffic) for seed in seeds] == first
    assert tokens(-1) == tokens(2**64 - 1)
    assert tokens(None) != tokens(None)


def test_choices_differ_and_come_again(device):
    """BC-042."""
    ask = Ask([1, 2, 3, 4], SamplingParams(n=4, seed=7, temperature=1.2, max_tokens=12))
    first, second = (drive(device, [ask], num_pages=PAGES) for _ in range(2))
    assert len({tuple(first[0, k].tokens) for k in range(4)}) == 4
    assert first.answers() == second.answers()
    greedy = drive(device, [Ask([1, 2, 3], SamplingParams(n=3, temperature=0, max_tokens=6))], num_pages=PAGES)
    assert greedy[0, 0].tokens == greedy[0, 1].tokens == greedy[0, 2].tokens
