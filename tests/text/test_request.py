"""From prompt and parameters to the engine's request: lengths, vocabulary, end tokens, bad words."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from tokenmill.core import SamplingParams
from tokenmill.engine.messages import AddRequest
from tokenmill.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.text.chat import chat_to_ids
from tokenmill.text.request import encode_prompt, make_request


def make(tokenizer, ids, limit=512, **params) -> AddRequest:
    return make_request(tokenizer, ids, SamplingParams(**params), request_id="r", max_model_len=limit)


@pytest.mark.parametrize("count", [1, 510, 511])
def test_a_prompt_that_leaves_room_for_a_token_is_taken(small, count):
    add = make(small, [5] * count, max_tokens=None)
    assert len(add.prompt_token_ids) + add.params.max_tokens == 512


@pytest.mark.parametrize("count", [512, 513, 5000])
def test_one_that_does_not_is_refused_with_both_numbers(small, count):
    with pytest.raises(ContextLengthExceeded) as caught:
        make(small, [5] * count)
    assert caught.value.code == "context_length_exceeded" and caught.value.status == 400
    assert "512" in caught.value.message and str(count) in caught.value.message


@pytest.mark.parametrize(("asked", "got"), [(None, 246), (1, 1), (245, 245), (246, 246), (247, 246), (100000, 246)])
def test_max_tokens_is_cut_to_the_room(small, asked, got):
    add = make(small, [5] * 10, limit=256, max_tokens=asked)
    assert add.params.max_tokens == got


def test_min_tokens_never_exceeds_what_can_be_made(small):
    assert make(small, [5] * 250, limit=256, max_tokens=None, min_tokens=100).params.min_tokens == 6


@pytest.mark.parametrize("unit", ["hello ", "x", " ", "漢", "\n", "ab12 ,", "e\u0301"])
def test_ten_megabytes_are_refused_in_no_time(small, smollm2, spm, unit):
    text = unit * (10 * 2**20 // len(unit.encode()))
    for tokenizer in (small, smollm2, spm):
        tokenizer.max_token_bytes  # noqa: B018  worked out once for all requests
        started = time.process_time()
        with pytest.raises(ContextLengthExceeded) as caught:
            encode_prompt(tokenizer, text, max_model_len=512)
        assert time.process_time() - started < 0.25
        assert "512" in caught.value.message and "at least" in caught.value.message


def test_a_long_chat_is_refused_as_cheaply(smollm2):
    messages = [{"role": "user", "content": "hello " * 2_000_000}]
    started = time.process_time()
    with pytest.raises(ContextLengthExceeded) as caught:
        chat_to_ids(smollm2, messages, max_model_len=512)
    assert caught.value.param == "messages"
    assert time.process_time() - started < 1.0


def test_a_text_that_may_fit_is_tokenised_whole(small, spm):
    """Never refused by a guess: long words of one token each may fill the context to the last place."""
    for tokenizer, text in ((small, " the" * 500), (small, "hello" * 511), (spm, "x" * 300)):
        ids = encode_prompt(tokenizer, text, max_model_len=512)
        assert ids == tokenizer.encode(text)


def test_without_a_limit_nothing_is_refused(small):
    assert len(encode_prompt(small, "x" * 100_000)) == 100_000


@pytest.mark.parametrize("bad", [-1, 320, 10**9, 2**70, 1.0, "5", None, True])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(small, bad):
    with pytest.raises(InvalidRequest) as caught:
        make(small, [5, bad, 6])
    assert caught.value.param == "prompt" and "vocabulary of 320 tokens" in caught.value.message


def test_the_smaller_vocabulary_counts(small):
    with pytest.raises(InvalidRequest, match="vocabulary of 300"):
        make_request(small, [310], SamplingParams(), request_id="r", max_model_len=64, vocab_size=300)


def test_an_empty_prompt_is_refused(small):
    with pytest.raises(InvalidRequest, match="empty") as caught:
        make_request(small, [], SamplingParams(), request_id="r", max_model_len=64, param="messages")
    assert caught.value.param == "messages"


def test_wrong_parameters_are_refused_by_name(small):
    for field, value in (("temperature", float("nan")), ("n", 0), ("top_p", 2.0), ("max_tokens", 0)):
        with pytest.raises(InvalidRequest) as caught:
            make(small, [5], **{field: value})
        assert caught.value.param == field


def test_end_tokens_go_with_the_request_unless_ignored(small):
    assert make(small, [5]).eos_token_ids == [0, 2]
    assert make(small, [5], ignore_eos=True).eos_token_ids == []
    assert make(small, [5], ignore_eos=True, max_tokens=None).params.max_tokens == 511  # still bounded


def test_bad_words_are_given_inside_and_after_a_space(small, spm):
    ids = make(small, [5], bad_words=["the"]).bad_words_ids
    assert ids == [small.encode("the"), small.encode(" the")]
    spelled = make(spm, [5], bad_words=[" the"]).bad_words_ids
    assert [b"".join(map(spm.token_bytes, word)) for word in spelled] == [b"the", b" the"]


def test_numpy_numbers_cross_to_the_engine_as_plain_ones(small):
    add = make_request(
        small,
        np.array([5, 6]),
        SamplingParams(
            temperature=np.float32(0.5),
            seed=np.int64(7),
            logit_bias={np.int32(3): np.float64(1.0)},
            stop_token_ids=[np.int64(4)],
        ),
        request_id="r",
        max_model_len=64,
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(add), type=AddRequest)
    assert again == add
    assert again.prompt_token_ids == [5, 6] and again.params.logit_bias == {3: 1.0}


def test_what_the_server_sets_is_carried(small):
    add = make_request(
        small,
        [5],
        SamplingParams(),
        request_id="r",
        max_model_len=64,
        namespace="m",
        tenant="t",
        weight=2.0,
        priority=1,
    )
    assert (add.namespace, add.tenant, add.weight, add.priority) == ("m", "t", 2.0, 1)
    assert abs(add.arrival_time - time.monotonic()) < 5


def test_settings_that_leave_no_token_at_all_are_refused(small):
    end = next(iter(small.eos_token_ids))
    (word,) = small.encode_continuation("a")
    for params in (
        {"allowed_token_ids": [end], "min_tokens": 1},
        {"allowed_token_ids": [end, 7], "stop_token_ids": [7], "min_tokens": 3},
        {"allowed_token_ids": [word], "bad_words": ["a"]},
        {"allowed_token_ids": [word, end], "bad_words": ["a"], "min_tokens": 1},
    ):
        with pytest.raises(InvalidRequest) as caught:
            make(small, [5], **params)
        assert caught.value.param == "allowed_token_ids"
    for params in (
        {"allowed_token_ids": [end]},
        {"allowed_token_ids": [end], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [word, end], "bad_words": ["a"]},
        {"bad_words": ["a"], "min_tokens": 1},
    ):
        make(small, [5], **params)


@pytest.mark.parametrize("bad", ["1", 1.0, None, True, float("nan")])
def test_a_priority_is_an_integer(small, bad):
    """It is compared with others' in the engine, where a wrong type would end every request."""
    with pytest.raises(InvalidRequest) as caught:
        make_request(small, [5], SamplingParams(), request_id="r", max_model_len=64, priority=bad)
    assert caught.value.param == "priority"
