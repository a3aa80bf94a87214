"""Every sampling parameter at, inside and past its bounds; refusals name field, value, limit (BC-014, 015, 044)."""

from dataclasses import fields

import numpy as np
import pytest

from tokenmill.core import SamplingParams
from tokenmill.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.sampling.validate import validate

NAN, INF = float("nan"), float("inf")
VOCAB = 49152


def check(max_n=128, num_prompt_tokens=10, **given):
    validate(
        SamplingParams(**given),
        vocab_size=VOCAB,
        max_model_len=8192,
        num_prompt_tokens=num_prompt_tokens,
        max_n=max_n,
    )


FLOATS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e400, "NaN", "1", True, False, None, [1.0], {}, 1j, 10**400])
def test_what_is_not_a_finite_number_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=f"^{field} is .*; it must be") as refusal:
        check(**{field: value})
    assert refusal.value.param == field and len(str(refusal.value)) < 200


@pytest.mark.parametrize("field", FLOATS)
def test_the_bounds_are_allowed_and_the_next_number_is_not(field):
    low, high = FLOATS[field]
    for value in (low, high, float(low), np.float32(1.0), np.float64(high), np.int64(1)):
        check(**{field: value})
    for value in (np.nextafter(high, INF), np.nextafter(low, -INF), high + 1, low - 1):
        with pytest.raises(InvalidRequest, match=f"{field} is .*between {low} and {high}"):
            check(**{field: value})


@pytest.mark.parametrize("value", [0, -0.0, 1e-320, 5e-324, 9e-6])
def test_tiny_temperatures_are_taken(value):
    check(temperature=value)
    check(top_p=value)


@pytest.mark.parametrize(
    "field, good, bad",
    [
        ("n", [1, 128, np.int32(3)], [0, -1, 129, 5_000_000, 1.0, "1", True, None]),
        ("top_k", [0, -1, 1, 49152, 49153, 2**63], [-2, 2**64, 1.5, "5", True, None]),
        ("seed", [None, 0, -1, 2**31, 2**32, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1, 1.5, "7", True, NAN]),
        ("min_tokens", [0, 16], [-1, 17, 2**64, 1.0, None, True]),
        ("max_tokens", [None, 1, 100_000, 2**62], [0, -1, 2**64, 10**400, 1.5, "5", True]),
        ("logprobs", [None, 0, 20], [-1, 21, 10**9, 1.0, True, "5"]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21, 10**9, 1.0, True]),
        ("ignore_eos", [True, False, np.bool_(True)], [1, 0, None, "true"]),
        ("include_stop_str_in_output", [True, False], [1, None, "x"]),
        ("skip_special_tokens", [True, False], [1, None, "x"]),
        ("stop", [None, [], "a", ["a", "b"], ("a",), ["é"] * 64, "x" * 1024], ["", [""], ["a", ""], ["a"] * 10_000, 5,
         [5], [None], b"a", {"a": 1}, "x" * 1025, "\ud800"]),
        ("stop_token_ids", [None, [], [0, VOCAB - 1]], [[VOCAB], [-1], [1.0], [True], ["1"], 5, "12", [1] * 129]),
        ("bad_words", [None, [], ["a", " b"]], [[""], ["  "], "word", [1], ["x" * 257], ["a"] * 1025]),
        ("allowed_token_ids", [None, [0], list(range(1000))], [[], [VOCAB], [-1], ["1"], [True], 7]),
        ("logit_bias", [None, {}, {0: 100, VOCAB - 1: -100.0}], [{"5": 1}, {VOCAB: 1}, {-1: 1}, {True: 1}, {5: 101},
         {5: NAN}, {5: -INF}, {5: "1"}, {5: True}, {5: None}, [5], 5, {i: 0 for i in range(1025)}]),
    ],
)  # fmt: skip
def test_bounds(field, good, bad):
    for value in good:
        check(**{field: value})
    for value in bad:
        with pytest.raises(InvalidRequest) as refusal:
            check(**{field: value})
        assert refusal.value.param == field and field in str(refusal.value) and len(str(refusal.value)) < 250


def test_a_limit_nobody_reaches_is_not_shown():
    with pytest.raises(InvalidRequest, match=r"^max_tokens is -1; it must be at least 1$"):
        check(max_tokens=-1)


def test_max_tokens_0_only_scores_a_prompt():
    check(max_tokens=0, prompt_logprobs=0)
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        check(max_tokens=0)


def test_min_tokens_is_compared_with_max_tokens_only_when_there_is_one():
    check(min_tokens=5000, max_tokens=None)
    with pytest.raises(InvalidRequest, match="min_tokens is 6; it must be at most max_tokens, which is 5"):
        check(min_tokens=6, max_tokens=5)


def test_the_first_wrong_field_is_the_one_named():
    wrong = dict(
        n=0, temperature=-1, top_k=-2, top_p=2, min_p=-1, typical_p=2, repetition_penalty=0, seed="x", logprobs=-1
    )
    order = [f.name for f in fields(SamplingParams) if f.name in wrong]
    for name in order:
        with pytest.raises(InvalidRequest) as refusal:
            check(**wrong)
        assert refusal.value.param == name
        del wrong[name]


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers():
    check(num_prompt_tokens=8191)
    for count in (8192, 8193, 10**7):
        with pytest.raises(ContextLengthExceeded, match=f"{count} tokens.*8192"):
            check(num_prompt_tokens=count)


def test_the_server_may_allow_fewer_choices():
    with pytest.raises(InvalidRequest, match="n is 3; it must be between 1 and 2"):
        check(n=3, max_n=2)
