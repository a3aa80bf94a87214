"""The native sampler against its specification, backends/reference_sampler.py, on random rows and random settings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.backends.cpu import _native
from tokenmill.backends.interface import MAX_LOGPROBS, SamplingInputs, SamplingOutputs
from tokenmill.backends.reference_sampler import sample as reference

ISAS = _native.instruction_sets()


def outputs(rows: int) -> SamplingOutputs:
    return SamplingOutputs(
        np.full(rows, -7, np.int32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int32),
        np.zeros((rows, MAX_LOGPROBS), np.int32),
        np.zeros((rows, MAX_LOGPROBS), np.float32),
    )


def lists(rng, rows, vocab, longest):
    parts = [rng.integers(0, vocab, rng.integers(0, longest + 1)) for _ in range(rows)]
    start = np.cumsum([0] + [len(p) for p in parts]).astype(np.int32)
    return start, np.concatenate([*parts, []]).astype(np.int32)


def random_inputs(rng, rows: int, vocab: int) -> SamplingInputs:
    def some(off, *values, dtype=np.float32):
        return rng.choice(np.array([off, off, *values]), rows).astype(dtype)

    bias_start, bias_ids = lists(rng, rows, vocab, 4)
    allowed_start, allowed_ids = lists(rng, rows, vocab, 6)
    history_start, history_ids = lists(rng, rows, vocab, 30)
    return SamplingInputs(
        temperature=some(1.0, 0.0, 0.3, 2.5, 1e-6),
        top_k=some(0, 1, 5, vocab, vocab + 9, dtype=np.int32),
        top_p=some(1.0, 0.01, 0.5, 0.95),
        min_p=some(0.0, 0.02, 0.5, 1.0),
        typical_p=some(1.0, 0.05, 0.6, 0.95),
        repetition_penalty=some(1.0, 0.8, 1.7),
        presence_penalty=some(0.0, -1.5, 1.5),
        frequency_penalty=some(0.0, -0.5, 0.7),
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        counter=rng.integers(0, 2**32, rows, dtype=np.uint32),
        num_logprobs=rng.integers(-1, MAX_LOGPROBS + 1, rows).astype(np.int32),
        target=np.where(rng.random(rows) < 0.2, rng.integers(0, vocab, rows), -1).astype(np.int32),
        bias_start=bias_start,
        bias_ids=bias_ids,
        bias_values=rng.choice([-100.0, -np.inf, 3.0, 100.0], len(bias_ids)).astype(np.float32),
        allowed_start=allowed_start,
        allowed_ids=allowed_ids,
        history_start=history_start,
        history_ids=history_ids,
        history_prompt_len=np.array([rng.integers(0, n + 1) for n in np.diff(history_start)], np.int32),
    )


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=120)
@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([3, 16, 61, 700, 5000]), spread=st.sampled_from([0.5, 4, 20]))
def test_native_and_specification_choose_and_report_alike(isa, seed, vocab, spread):
    rng = np.random.default_rng(seed)
    rows = 6
    logits = (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)  # ties
    if rng.random() < 0.2:
        logits[rng.integers(rows), rng.integers(vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    inputs, native, spec = random_inputs(rng, rows, vocab), outputs(rows), outputs(rows)
    _native.sample(isa, logits, inputs, native)
    reference(logits.copy(), inputs, spec)
    np.testing.assert_array_equal(native.token_ids, spec.token_ids)
    np.testing.assert_array_equal(native.ranks, spec.ranks)
    np.testing.assert_array_equal(native.top_ids, spec.top_ids)
    np.testing.assert_allclose(native.logprobs, spec.logprobs, atol=2e-5)
    np.testing.assert_allclose(native.top_logprobs, spec.top_logprobs, atol=2e-5)


@pytest.mark.parametrize("name, value", [("bias_ids", 61), ("target", 61), ("history_ids", -1), ("allowed_ids", 99)])
def test_indices_outside_the_vocabulary_are_refused(name, value):
    rng = np.random.default_rng(1)
    inputs, out = random_inputs(rng, 40, 61), outputs(40)
    getattr(inputs, name)[-1] = value
    with pytest.raises(ValueError, match="outside the vocabulary"):
        _native.sample("", np.zeros((40, 61), np.float32), inputs, out)
