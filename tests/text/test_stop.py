"""Stop strings: the first in the text wins, whatever the tokens; nothing of a match is shown, nothing else is kept."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.text.stop import StopMatcher

PIECES = ["KLM", "NOP", "Q", "RS", "TU"]


def run(pieces, stops, include_stop=False):
    """-> (what each piece released, what the end released, the matcher)."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = [matcher.push(piece) for piece in pieces]
    return shown, matcher.flush(), matcher


def expected(text, stops, include_stop=False):
    """A plain search over the whole text."""
    found = min(((text.find(stop), len(stop), stop) for stop in stops if stop and stop in text), default=None)
    if found is None:
        return text, None
    start, length, stop = found
    return text[: start + length * include_stop], stop


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["NOPQRST"], "KLM"),
        (["L"], "K"),
        (["K"], ""),
        (["U"], "KLMNOPQRST"),
        (["OPQ", "NOPQR"], "KLM"),
        (["NOPQR", "OPQ"], "KLM"),
        (["OPQ", "NOPQX"], "KLMN"),
        (["MN", "NOP"], "KL"),
        (["\n"], "KLMNOPQRSTU"),
        (["UV", "TUV"], "KLMNOPQRSTU"),
        (["QRSTU"], "KLMNOP"),
    ],
)
def test_the_first_match_in_the_text_wins(stops, text, include_stop):
    shown, rest, matcher = run(PIECES, stops, include_stop)
    whole, stop = expected("".join(PIECES), stops, include_stop)
    assert "".join(shown) + rest == whole
    assert whole.startswith(text)
    assert (matcher.match.stop if matcher.match else None) == stop


def test_only_what_may_become_a_match_is_held_back():
    matcher = StopMatcher(["NOPQRST"])
    assert matcher.push("KLM") == "KLM"
    assert matcher.push("NOP") == ""
    assert matcher.push("x") == "NOPx"
    assert matcher.push("yN") == "y"
    assert matcher.push("NO") == "N"
    assert matcher.flush() == "NO"
    assert matcher.match is None


def test_nothing_is_released_after_a_match():
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.push("def") == "" and matcher.flush() == ""


def test_a_complete_match_waits_for_one_that_began_before():
    matcher = StopMatcher(["OPQ", "NOPQR"])
    assert matcher.push("KLMNOPQ") == "KLM"
    assert matcher.match is None and matcher.complete_but_waiting
    assert matcher.push("X") == "N"
    assert matcher.match.stop == "OPQ" and (matcher.match.start, matcher.match.end) == (4, 7)

    waiting = StopMatcher(["OPQ", "NOPQR"])
    waiting.push("KLMNOPQ")
    assert waiting.flush() == "N"  # the reply ended: the one that is complete counts
    assert waiting.match.stop == "OPQ"


def test_of_two_that_begin_together_the_shorter_is_complete_first():
    shown, rest, matcher = run(["ab", "c"], ["abc", "ab"])
    assert ("".join(shown) + rest, matcher.match.stop) == ("", "ab")


def test_empty_and_repeated_stops_stop_nothing():
    for stops in ([], [""], ["", ""]):
        shown, rest, matcher = run(PIECES, stops)
        assert shown == PIECES and rest == "" and matcher.match is None
    assert run(["aXb"], ["X", "X"])[0] == ["a"]


def test_regular_expression_signs_are_plain_text():
    for stop in (".*", "[a]", "\\", "$", "(", "a|b", "^"):
        shown, rest, matcher = run(["say ", stop, " more"], [stop])
        assert "".join(shown) + rest == "say " and matcher.match.stop == stop
        assert run(["plain a b"], [stop])[2].match is None


@given(
    st.text(st.sampled_from("abc"), max_size=14),
    st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_the_same_under_every_cut(text, stops, include_stop):
    """Against a search over the whole text; the split is into single characters, whole, and at each place."""
    whole, stop = expected(text, stops, include_stop)
    cuts = [list(text), [text], *([text[:i], text[i:]] for i in range(len(text)))]
    cuts += [[text[:i], text[i:j], text[j:]] for i, j in itertools.combinations(range(len(text)), 2)]
    for pieces in cuts:
        shown, rest, matcher = run(pieces, stops, include_stop)
        assert "".join(shown) + rest == whole
        assert (matcher.match.stop if matcher.match else None) == stop
        assert whole.startswith("".join(shown))
        if matcher.match:
            assert text[matcher.match.start : matcher.match.end] == stop


@given(st.text(st.sampled_from("ab"), max_size=12), st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4)))
@settings(max_examples=200, deadline=None)
def test_what_is_held_could_still_become_a_match(text, stops):
    matcher = StopMatcher(stops)
    released = ""
    for i, character in enumerate(text):
        released += matcher.push(character)
        if matcher.match is not None:
            break
        held = text[len(released) : i + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_text_before_min_tokens_is_no_part_of_a_match():
    matcher = StopMatcher(["ab"])
    assert matcher.pass_through("xaba") == "xaba"
    assert matcher.push("b") == "b"  # the a was let through
    assert matcher.push("ab") == ""
    assert (matcher.match.start, matcher.match.end) == (5, 7)


def test_long_and_many_stops_stay_cheap():
    matcher = StopMatcher([f"stop number {i} " * 20 for i in range(64)])
    started = time.process_time()
    for _ in range(2000):
        matcher.push("stop number 7 or not ")
    assert time.process_time() - started < 2.0
