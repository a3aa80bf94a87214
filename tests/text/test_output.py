"""What the caller sees: deltas that add up, tokens counted as generated, late deltas ignored."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.core import FinishReason, SamplingParams, TokenLogprobs
from tokenmill.engine.messages import AddRequest, TokenDelta
from tokenmill.text.output import RequestState
from tokenmill.text.tokenizer import Tokenizer

from .test_detokenizer import Bytes
from .test_stop import expected

PIECES = ["KLM", "NOP", "Q", "RS", "TU"]
STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


def tokenizer_of(pieces) -> Tokenizer:
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return Tokenizer(Bytes([*data, b"<end>"]), special_token_ids=frozenset({len(data)}))


def state_of(pieces, **params) -> RequestState:
    """Token i of the model is pieces[i]; the last id is the end token <end>."""
    tokenizer = tokenizer_of(pieces)
    ends = [] if params.get("ignore_eos") else [len(pieces)]
    add = AddRequest(request_id="r", prompt_token_ids=[0, 1], params=SamplingParams(**params), eos_token_ids=ends)
    return RequestState(add, tokenizer)


def tokens(*ids, index=0, finish=None, **fields) -> TokenDelta:
    return TokenDelta(request_id="r", index=index, token_ids=list(ids), finish_reason=finish, **fields)


def feed(state, deltas):
    return [shown for shown in map(state.process, deltas) if shown is not None]


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("include_stop", [True, False])
def test_a_stop_string_over_several_tokens(one_by_one, include_stop):
    state = state_of(PIECES, stop="NOPQRST", include_stop_str_in_output=include_stop)
    ids = range(len(PIECES))
    shown = feed(state, [tokens(i) for i in ids] if one_by_one else [tokens(*ids)])
    assert "".join(delta.text for delta in shown) == ("KLMNOPQRST" if include_stop else "KLM")
    assert shown[-1].finish_reason is STOP and shown[-1].stop_reason == "NOPQRST"
    assert shown[-1].abort.request_id == "r" and shown[-1].abort.index == 0 and shown[-1].abort.finish_reason is STOP
    assert state.usage.completion_tokens == 5 == sum(len(delta.token_ids) for delta in shown)
    assert all(delta.finish_reason is None and delta.abort is None for delta in shown[:-1])


def test_what_the_engine_made_after_the_match_is_not_counted():
    """However far it ran before it heard of the stop, the answer and the bill are the same."""
    for overshoot in range(4):
        state = state_of([*PIECES, "x", "y", "z"], stop=["PQ"])
        shown = feed(state, [tokens(0), tokens(*range(1, 3 + overshoot)), tokens(7, finish=LENGTH)])
        assert "".join(delta.text for delta in shown) == "KLMNO"
        assert state.choices[0].token_ids == [0, 1, 2]
        assert state.usage.completion_tokens == 3
        assert shown[-1].finish_reason is STOP


def test_the_token_that_completed_a_stop_counts_even_if_an_earlier_match_was_waited_for():
    state = state_of(["KLM", "NOP", "Q", "x", "y"], stop=["OPQ", "NOPQR"])
    shown = feed(state, [tokens(i) for i in range(5)])
    assert state.choices[0].text == "KLMN"
    assert state.choices[0].token_ids == [0, 1, 2]  # Q completed it; x only showed that NOPQR does not come
    assert [delta.token_ids for delta in shown] == [[0], [1], [2]]
    assert shown[-1].stop_reason == "OPQ"


def test_a_stop_string_whose_character_is_cut():
    data = "aé!b".encode()
    state = state_of([data[:2], data[2:4], data[4:]], stop="é!")
    shown = feed(state, [tokens(0), tokens(1), tokens(2)])
    assert "".join(delta.text for delta in shown) == "a"
    assert state.usage.completion_tokens == 2


def test_the_end_token_is_counted_and_not_shown():
    for skip in (True, False):
        state = state_of(PIECES, skip_special_tokens=skip)
        shown = feed(state, [tokens(0), tokens(5, finish=STOP)])
        assert state.choices[0].text == "KLM"
        assert shown[-1].finish_reason is STOP and shown[-1].stop_reason is None
        assert state.choices[0].token_ids == [0, 5] and state.usage.completion_tokens == 2
    shown = feed(state_of(PIECES, skip_special_tokens=False, include_stop_str_in_output=True), [tokens(5, finish=STOP)])
    assert shown[-1].text == "<end>"


def test_a_stop_token_is_not_shown_unless_asked():
    for include in (True, False):
        state = state_of(PIECES, stop_token_ids=[2], include_stop_str_in_output=include)
        feed(state, [tokens(0), tokens(2, finish=STOP, stop_reason=2)])
        assert state.choices[0].text == ("KLMQ" if include else "KLM")
        assert state.choices[0].stop_reason == 2


def test_with_ignore_eos_the_end_token_is_like_any_other():
    state = state_of(PIECES, ignore_eos=True, skip_special_tokens=False)
    feed(state, [tokens(0, 5, 1, finish=LENGTH)])
    assert state.choices[0].text == "KLM<end>NOP" and state.choices[0].finish_reason is LENGTH


@pytest.mark.parametrize("finish", [LENGTH, ABORT, ERROR])
def test_what_was_held_back_is_flushed_at_the_end(finish):
    fire = "🔥".encode()
    state = state_of(["NOP", fire[:2]], stop="NOPQ")
    assert state.process(tokens(0)).text == ""
    last = state.process(tokens(1, finish=finish, error="broke" if finish is ERROR else None))
    assert last.text == "NOP\ufffd" and last.finish_reason is finish
    assert last.abort is None and last.error == ("broke" if finish is ERROR else None)


def test_a_stop_string_completed_by_the_last_token_wins_over_length():
    state = state_of(PIECES, stop="OPQ")
    last = feed(state, [tokens(0), tokens(1), tokens(2, finish=LENGTH)])[-1]
    assert last.finish_reason is STOP and last.abort is None  # the engine has ended it already
    assert state.choices[0].text == "KLMN"


def test_a_match_that_was_waiting_counts_at_the_end():
    state = state_of(PIECES, stop=["OPQ", "NOPQR"])
    last = feed(state, [tokens(0), tokens(1), tokens(2, finish=LENGTH)])[-1]
    assert last.finish_reason is STOP and last.stop_reason == "OPQ" and state.choices[0].text == "KLMN"


def test_deltas_after_the_end_are_ignored():
    state = state_of(PIECES, stop="L")
    feed(state, [tokens(0)])
    before = state.usage
    assert state.process(tokens(1, 2)) is None
    assert state.process(tokens(finish=ABORT)) is None
    assert state.usage == before and state.choices[0].finish_reason is STOP


def test_min_tokens_holds_for_stop_strings():
    state = state_of(PIECES, stop="NOP", min_tokens=3, max_tokens=9)
    feed(state, [tokens(0), tokens(1), tokens(2), tokens(1), tokens(0)])
    assert state.choices[0].text == "KLMNOPQ" and state.usage.completion_tokens == 4


def test_choices_are_apart():
    state = state_of(PIECES, n=3, stop="Q")
    feed(state, [tokens(0, index=0), tokens(1, index=2), tokens(2, index=1), tokens(0, index=2)])
    assert [choice.text for choice in state.choices] == ["KLM", "", "NOPKLM"]
    assert [choice.finished for choice in state.choices] == [False, True, False]
    assert not state.finished
    feed(state, [tokens(5, index=0, finish=STOP), tokens(3, index=2, finish=LENGTH)])
    assert state.finished
    assert state.usage.prompt_tokens == 2 and state.usage.completion_tokens == 2 + 1 + 3
    assert state.usage.total_tokens == 8


def test_cached_tokens_are_kept_from_the_first_delta():
    state = state_of(PIECES)
    shown = feed(state, [tokens(0, num_cached_tokens=1, first_scheduled_time=5.0), tokens(1)])
    assert [delta.token_ids for delta in shown] == [[0], [1]]
    assert state.num_cached_tokens == state.usage.cached_tokens == 1 and state.first_scheduled_time == 5.0
    assert state.usage.prompt_tokens == 2 and state.usage.completion_tokens == 2


def test_a_delta_with_nothing_new_shows_nothing():
    assert state_of(PIECES).process(tokens()) is None


def lp(token_id, *top) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, tuple(top), tuple(-1.0 - i for i in range(len(top))))


def test_logprobs_carry_text_bytes_and_offsets():
    fire = "🔥".encode()
    state = state_of(["ab", fire[:3], fire[3:], "c"], logprobs=2)
    deltas = [tokens(i, logprobs=[lp(i, 3, i)]) for i in range(4)]
    shown = feed(state, deltas)
    entries = [entry for delta in shown for entry in delta.logprobs]
    assert [entry.text for entry in entries] == ["ab", "\ufffd", "\ufffd", "c"]
    assert [entry.bytes for entry in entries] == [b"ab", fire[:3], fire[3:], b"c"]
    assert [entry.text_offset for entry in entries] == [0, 2, 2, 3]
    assert entries[1].logprob == -0.5 and entries[1].rank == 1
    assert [(c.token_id, c.text, c.logprob) for c in entries[1].top] == [(3, "c", -1.0), (1, "\ufffd", -2.0)]
    assert state.choices[0].logprobs == entries


def test_logprobs_are_as_many_as_tokens_also_at_a_stop_string():
    state = state_of(PIECES, stop="OPQ", logprobs=0)
    shown = feed(state, [tokens(0, 1, logprobs=[lp(0), lp(1)]), tokens(2, 3, logprobs=[lp(2), lp(3)])])
    assert [len(delta.logprobs) for delta in shown] == [len(delta.token_ids) for delta in shown] == [2, 1]
    assert feed(state_of(PIECES), [tokens(0)])[0].logprobs is None


def test_prompt_logprobs_are_collected_from_position_one():
    state = state_of(["ab", "cd", "e"], prompt_logprobs=1)
    assert state.prompt_logprobs == [None]
    assert state.process(tokens(prompt_logprobs=[lp(1, 2)])) is None
    assert state.prompt_logprobs == [None, lp(1, 2)]
    first, second = state.describe_prompt()
    assert first is None and (second.text, second.text_offset, second.top[0].text) == ("cd", 2, "e")
    assert state_of(["a"]).prompt_logprobs is None


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", b"\xc3", b"\xa9", "é", "abc"]), min_size=1, max_size=12),
    st.lists(st.sampled_from(["ab", "b", "ba", "é", "cab", "abca"]), max_size=3),
    st.integers(0, 10**6),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_grouping_of_tokens_gives_the_same_answer(pieces, stops, seed, include_stop):
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    whole, stop = expected(b"".join(data).decode("utf-8", "replace"), stops, include_stop)
    answers = set()
    rng = random.Random(seed)
    for _ in range(3):
        state = state_of(pieces, stop=stops, include_stop_str_in_output=include_stop)
        ids, deltas = list(range(len(pieces))), []
        while ids:
            take = rng.randint(1, 3)
            deltas.append(tokens(*ids[:take]))
            ids = ids[take:]
        deltas[-1].finish_reason = LENGTH
        shown = feed(state, deltas)
        choice = state.choices[0]
        assert "".join(delta.text for delta in shown) == choice.text == whole
        assert [t for delta in shown for t in delta.token_ids] == choice.token_ids
        assert choice.stop_reason == stop and choice.finish_reason is (STOP if stop else LENGTH)
        answers.add((choice.text, tuple(choice.token_ids), choice.stop_reason))
    assert len(answers) == 1
