"""Every sampler draws from the distribution that its params describe, row by row, whatever the other rows ask for."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.sampling.samplers import SAMPLERS, empty_outputs, inputs, make_request, run
from tokenmill.core import SamplingParams

each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
LOGITS = np.log(np.array([0.30, 0.05, 0.20, 0.02, 0.13, 0.10, 0.11, 0.09], np.float32))
DRAWS = 4000


def softmax(logits) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def only(kept, temperature=1.0, logits=LOGITS) -> np.ndarray:
    """The distribution over the ids in `kept`, renormalised."""
    p = softmax(np.asarray(logits, np.float64) / temperature)
    p[[i for i in range(len(p)) if i not in kept]] = 0
    return p / p.sum()


def fits(tokens: np.ndarray, p: np.ndarray) -> None:
    """Chi-squared against exact probabilities, at a level that a right sampler misses once in a million runs."""
    counts = np.bincount(tokens, minlength=len(p))
    possible = p > 0
    assert counts[~possible].sum() == 0, "a forbidden token was drawn"
    if possible.sum() > 1:
        assert stats.chisquare(counts[possible], p[possible] * len(tokens)).pvalue > 1e-6


ALL = range(8)
CASES = {
    "as it is": (dict(), only(ALL)),
    "temperature 2": (dict(temperature=2.0), only(ALL, 2.0)),
    "temperature 0.5": (dict(temperature=0.5), only(ALL, 0.5)),
    "top_k 3": (dict(top_k=3), only({0, 2, 4})),
    "top_k over the vocabulary": (dict(top_k=10**6), only(ALL)),
    "top_k -1": (dict(top_k=-1), only(ALL)),
    "top_p 0.6": (dict(top_p=0.6), only({0, 2, 4})),  # 0.30 + 0.20 < 0.6
    "top_p 0": (dict(top_p=0.0), only({0})),
    "min_p 0.35": (dict(min_p=0.35), only({0, 2, 4, 6})),  # of 0.30: from 0.105
    "min_p 1": (dict(min_p=1.0), only({0})),
    "top_k then top_p": (dict(top_k=4, top_p=0.6), only({0, 2})),  # of {.30 .20 .13 .11}: .30 + .20 is 0.68 of them
    "temperature then top_p": (dict(temperature=4.0, top_p=0.5), only({0, 2, 4, 6}, 4.0)),
    "bias": (dict(logit_bias={3: 3.0, 0: -1.0}), softmax(LOGITS + np.eye(8)[3] * 3 - np.eye(8)[0])),
    "bias -100": (dict(logit_bias={0: -100.0}), only(set(ALL) - {0})),
    "allowed": (dict(allowed_token_ids=[1, 3, 7]), only({1, 3, 7})),
    "allowed, then top_k": (dict(allowed_token_ids=[1, 3, 7], top_k=2), only({1, 7})),
}


@each_sampler
@pytest.mark.parametrize("name", CASES)
def test_draws_fit_the_exact_distribution(sampler, name):
    params, p = CASES[name]
    requests = [make_request(SamplingParams(**params), seed=i) for i in range(DRAWS)]
    fits(run(sampler, LOGITS, requests).token_ids, p)


@each_sampler
def test_draws_along_one_request_fit_too(sampler):
    """The counter alone must give independent numbers."""
    requests = [make_request(SamplingParams(), seed=99)] * DRAWS
    tokens = run(sampler, LOGITS, requests, counters=range(DRAWS)).token_ids
    fits(tokens, only(ALL))
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    assert stats.chisquare(pairs, np.outer(only(ALL), only(ALL)).ravel() * (DRAWS - 1)).pvalue > 1e-6


@each_sampler
@pytest.mark.parametrize("typical_p", [0.1, 0.5, 0.9])
def test_typical_p_keeps_the_least_surprising_of_the_typical(sampler, typical_p):
    p = only(ALL)
    surprise = np.abs(-np.log(p) + (p * np.log(p)).sum())
    order = sorted(ALL, key=lambda i: (surprise[i], i))
    kept, mass = set(), 0.0
    for i in order:
        if mass >= typical_p:
            break
        kept.add(i)
        mass += p[i]
    requests = [make_request(SamplingParams(typical_p=typical_p), seed=i) for i in range(DRAWS)]
    fits(run(sampler, LOGITS, requests).token_ids, only(kept))


@each_sampler
def test_penalties_count_prompt_and_output_as_they_should(sampler):
    """repetition: prompt and output; frequency, presence: output alone."""
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3)
    logits = LOGITS + 3  # some positive, some negative
    x = logits.astype(np.float64)
    for token in (0, 2, 3):
        x[token] = x[token] / 1.5 if x[token] > 0 else x[token] * 1.5
    for token, count in ((2, 3), (3, 1)):
        x[token] -= 0.4 * count + 0.3
    requests = [make_request(params, seed=i, prompt=[0, 0], output=[2, 2, 3, 2]) for i in range(DRAWS)]
    fits(run(sampler, logits, requests).token_ids, softmax(x))


@each_sampler
def test_greedy_takes_the_best_and_the_lowest_id_among_equals(sampler):
    logits = np.array([1, 3, 3, 2], np.float32)
    for params in (
        dict(temperature=0.0),
        dict(temperature=-0.0),
        dict(temperature=1e-320),
        dict(temperature=9e-6, top_k=3, top_p=0.1, min_p=1.0, typical_p=0.1),
        dict(top_k=1),
        dict(top_p=-0.0),
    ):
        assert run(sampler, logits, [make_request(SamplingParams(**params))]).token_ids.tolist() == [1]
    forbidden = SamplingParams(temperature=0, logit_bias={1: -100.0})
    assert run(sampler, logits, [make_request(forbidden)]).token_ids.tolist() == [2]


@each_sampler
def test_bad_words_forbid_their_last_token_only_after_the_others(sampler):
    params = SamplingParams(temperature=0)
    words = ((5,), (1, 0), (3, 4, 2))
    logits = np.array([9, 1, 8, 1, 7, 10], np.float32)
    for output, token in (([4], 0), ([1], 2), ([3, 4], 0), ([1, 3, 4], 0), ([], 2)):
        request = make_request(params, prompt=[3, 1], output=output, bad_words=words)
        assert run(sampler, logits, [request]).token_ids.tolist() == [token], output
    both = make_request(params, prompt=[0], output=[3, 4, 1], bad_words=((5,), (1, 0), (4, 1, 2)))
    assert run(sampler, logits, [both]).token_ids.tolist() == [4]
    across = make_request(params, prompt=[3], output=[4], bad_words=((5,), (0,), (3, 4, 2)))
    assert run(sampler, logits, [across]).token_ids.tolist() == [4]


@each_sampler
def test_min_tokens_forbids_the_ends_until_reached(sampler):
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2])
    logits = np.array([1, 4, 3, 2], np.float32)
    for output, token in (([], 3), ([3], 3), ([3, 3], 1)):
        assert run(sampler, logits, [make_request(params, output=output, eos=[1])]).token_ids.tolist() == [token]


@each_sampler
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_minus_one_and_its_neighbours_do_not_notice(sampler, bad):
    logits = np.tile(LOGITS, (3, 1))
    logits[1, 5] = bad
    requests = [make_request(SamplingParams(logprobs=2, temperature=0)) for _ in range(3)]
    out = empty_outputs(3)
    sampler(logits, inputs(requests), out)
    assert out.token_ids.tolist() == [0, -1, 0]
    assert np.isfinite(out.logprobs[[0, 2]]).all()


@each_sampler
def test_when_every_token_is_forbidden_the_answer_is_minus_one(sampler):
    params = SamplingParams(allowed_token_ids=[3], min_tokens=5, stop_token_ids=[3])
    assert run(sampler, LOGITS, [make_request(params)]).token_ids.tolist() == [-1]


@each_sampler
@pytest.mark.parametrize(
    "params",
    [
        dict(top_p=0.01),
        dict(temperature=0.001),
        dict(logit_bias={0: -100.0}),
        dict(allowed_token_ids=[3]),
        dict(repetition_penalty=5.0, presence_penalty=2.0),
    ],
)
def test_logprobs_are_the_models_own_and_finite(sampler, params):
    """BC-011: whatever is forbidden or filtered, what is reported is the distribution before it."""
    own = np.log(softmax(LOGITS))
    out = run(sampler, LOGITS, [make_request(SamplingParams(logprobs=20, **params), output=[3])])
    token = out.token_ids[0]
    np.testing.assert_allclose(out.logprobs[0], own[token], rtol=1e-6)
    order = np.argsort(-own, kind="stable")
    assert out.top_ids[0, :8].tolist() == order.tolist() and out.ranks[0] == 1 + order.tolist().index(token)
    np.testing.assert_allclose(out.top_logprobs[0, :8], own[order], rtol=1e-6)
    assert (out.top_ids[0, 8:] == -1).all()


@each_sampler
def test_equal_logits_share_the_best_rank_and_come_in_order_of_id(sampler):
    out = run(sampler, [1, 2, 2, 2], [make_request(SamplingParams(logprobs=3, temperature=0))])
    assert out.ranks.tolist() == [1] and out.top_ids[0, :3].tolist() == [1, 2, 3]


@each_sampler
def test_scoring_rows_report_the_target_and_sample_nothing(sampler):
    how = inputs([make_request(SamplingParams(logprobs=None, allowed_token_ids=[0]))])
    how.target[:], how.num_logprobs[:] = 3, 1
    out = empty_outputs(1)
    sampler(LOGITS[None].copy(), how, out)
    assert out.token_ids[0] == 3 and out.ranks[0] == 8 and out.top_ids[0, 0] == 0
    np.testing.assert_allclose(out.logprobs[0], math.log(0.02), rtol=1e-5)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    typical_p=st.sampled_from([0.2, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    logit_bias=st.sampled_from([None, {3: 5.0, 4: -100.0}]),
    logprobs=st.sampled_from([None, 0, 5]),
)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "reference"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_native_samplers_follow_the_reference(name, data):
    """Same tokens row by row, in mixed company; logprobs within a millionth."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count, vocab = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([7, 300, 1031]))
    logits = (rng.standard_normal((count, vocab)) * data.draw(st.sampled_from([0.5, 3.0, 12.0]))).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # many ties
    requests = []
    for i in range(count):
        params = data.draw(PARAMS)
        if data.draw(st.booleans()):
            params = replace(params, allowed_token_ids=list(range(0, vocab, 3)))
        history = rng.integers(0, vocab, 4 + i).tolist()
        seed = int(rng.integers(0, 2**63))
        requests.append(make_request(params, seed=seed, prompt=history[:4], output=history[4:]))
    want, got = (run(SAMPLERS[which], logits, requests) for which in ("reference", name))
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    for i, request in enumerate(requests):
        if request.params.logprobs is not None and want.token_ids[i] >= 0:
            assert got.ranks[i] == want.ranks[i]
            np.testing.assert_array_equal(got.top_ids[i], want.top_ids[i])
            np.testing.assert_allclose(got.logprobs[i], want.logprobs[i], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(got.top_logprobs[i], want.top_logprobs[i], rtol=1e-6, atol=1e-6)


@each_sampler
def test_a_row_does_not_depend_on_its_company(sampler):
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((6, 300)).astype(np.float32) * 3
    requests = [
        make_request(params, seed=i, prompt=[1, 2, 3], output=[4, 5][:i])
        for i, params in enumerate(
            [
                SamplingParams(),
                SamplingParams(temperature=0),
                SamplingParams(top_k=5, repetition_penalty=1.3, logprobs=3),
                SamplingParams(allowed_token_ids=[4, 5, 6]),
                SamplingParams(top_p=0.5, typical_p=0.8, logit_bias={7: 9.0}),
                SamplingParams(min_p=0.3, frequency_penalty=1.0),
            ]
        )
    ]
    together = run(sampler, logits, requests).token_ids
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 3, 4]):
        other = run(sampler, logits[order], [requests[i] for i in order]).token_ids
        assert other.tolist() == together[order].tolist()
    alone = [run(sampler, logits[i : i + 1], [requests[i]]).token_ids[0] for i in range(6)]
    assert alone == together.tolist()
