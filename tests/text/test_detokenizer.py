"""Characters come out whole, at the token that completes them, however their bytes are spread."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.text.detokenizer import Detokenizer
from tokenmill.text.tokenizer import Tokenizer


class Bytes:
    """A vocabulary whose token i stands for pieces[i]."""

    special: frozenset[int] = frozenset()
    strips_leading_space = False

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces
        self.size = len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def push_all(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join(map(detokenizer.push, ids))


def deltas(pieces: list[bytes], **settings) -> list[str]:
    tokenizer = Tokenizer(Bytes(pieces), **settings)
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in range(len(pieces))), detokenizer.flush()]


def all_cuts(data: bytes):
    for count in range(len(data)):
        for places in itertools.combinations(range(1, len(data)), count):
            edges = [0, *places, len(data)]
            yield [data[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    "character", ["é", "ท", "漢", "🔥", "🌶", "\u07ff", "\u0800", "\uffff", "\U00010000", "\U0010ffff"]
)
def test_every_cut_of_a_character(character):
    for pieces in all_cuts(b"a" + character.encode() + b"b"):
        shown = deltas(pieces)
        assert "".join(shown) == f"a{character}b"
        for i, text in enumerate(shown):
            assert "\ufffd" not in text
            whole = b"".join(pieces[: i + 1]).decode(errors="ignore")
            assert "".join(shown[: i + 1]) == whole  # nothing is held that is whole


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_reply_that_ends_inside_a_character_flushes_one_mark(cut):
    assert deltas(["🔥".encode()[i : i + 1] for i in range(cut)]) == [""] * cut + ["\ufffd"]


def test_one_mark_for_each_ill_formed_run():
    assert "".join(deltas([b"\xf0\x9f", b"A"])) == "\ufffdA"
    assert "".join(deltas([b"\xf0", b"\x9f\x94", b"\xf0\x9f\x94\xa5"])) == "\ufffd🔥"
    assert "".join(deltas([b"\xff", b"\xfe", b"x"])) == "\ufffd\ufffdx"


@given(st.lists(st.binary(max_size=5), max_size=30))
@settings(max_examples=300, deadline=None)
def test_joined_deltas_are_the_whole_decoded(pieces):
    tokenizer = Tokenizer(Bytes(pieces))
    shown = deltas(pieces)
    whole = b"".join(pieces).decode("utf-8", "replace")
    assert "".join(shown) == whole == tokenizer.decode(range(len(pieces)))
    "".join(shown).encode()  # always valid Unicode


@given(st.text(max_size=30), st.data())
@settings(max_examples=200, deadline=None)
def test_no_mark_for_sound_text_under_any_cut(text, data):
    encoded = text.encode()
    edges = sorted(data.draw(st.sets(st.integers(0, len(encoded)), max_size=10)) | {0, len(encoded)})
    pieces = [encoded[a:b] for a, b in itertools.pairwise(edges)]
    assert "".join(deltas(pieces)) == text


@given(st.lists(st.integers(0, 49151), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_tokens_of_smollm2(smollm2, ids):
    for skip in (True, False):
        detokenizer = Detokenizer(smollm2, skip_special_tokens=skip)
        shown = [detokenizer.push(i) for i in ids]
        assert "".join(shown) + detokenizer.flush() == smollm2.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_skipped_or_shown(small):
    ids = small.encode("hello<|im_end|> world")
    assert push_all(Detokenizer(small), ids) == "hello world"
    assert push_all(Detokenizer(small, skip_special_tokens=False), ids) == "hello<|im_end|> world"


def test_ids_outside_the_vocabulary_have_no_text(small):
    assert push_all(Detokenizer(small), [10**9, -1, *small.encode("hello")]) == "hello"


def test_the_space_sentencepiece_puts_first_is_no_text(spm):
    ids = spm.encode("the world", add_special_tokens=False)
    assert spm.token_bytes(ids[0]).startswith(b" ")
    assert push_all(Detokenizer(spm), ids) == "the world" == spm.decode(ids)
    assert push_all(Detokenizer(spm, after=spm.bos_token_id), ids) == "the world"
    # after words it separates: the completion of "hello" begins with a space
    assert push_all(Detokenizer(spm, after=ids[-1]), ids) == " the world"
    # only one space, and only the first token's
    assert push_all(Detokenizer(spm), spm.encode("  the", add_special_tokens=False)) == "  the"


@given(st.text(max_size=30))
@settings(max_examples=150, deadline=None)
def test_sentencepiece_deltas_are_the_whole_decoded(spm, text):
    ids = spm.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(spm)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == spm.decode(ids)


def test_a_token_takes_a_few_microseconds(small):
    detokenizer = Detokenizer(small)
    ids = small.encode("hello world, the end. ") * 2000
    started = time.process_time()
    for i in ids:
        detokenizer.push(i)
    assert (time.process_time() - started) / len(ids) < 5e-6
