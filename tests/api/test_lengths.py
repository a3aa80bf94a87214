"""Prompt and output always fit the context; what cannot is refused with both numbers (BC-039, BC-040)."""

import re
import time

import pytest

from tests.api.server import error_of, eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 256  # of the rigged model


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(rigged, stream, length):
    started = time.monotonic()
    answer = rigged.post(COMPLETIONS, {"prompt": [5] * length, "stream": stream})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert re.findall(r"\d+", error["message"])[:2] == [str(CONTEXT), str(length)]
    assert time.monotonic() - started < 0.5


def test_the_longest_that_fits(rigged):
    answer = rigged.complete([5] * (CONTEXT - 1), max_tokens=50)
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_megabytes_of_text_are_refused_cheaply(rigged, path, stream):
    for text in ("word " * 1_000_000, "x" * 5_000_000, "\u00e9" * 2_000_000):
        body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        started = time.monotonic()
        answer = rigged.post(path, body | {"stream": stream})
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == ("messages" if path == CHAT else "prompt")
        assert time.monotonic() - started < 2
    answer = rigged.post(
        path, {"messages": [{"role": "user", "content": "x" * 10_000_000}], "prompt": "x" * 10_000_000}
    )
    assert answer.status_code == 413


def test_they_are_refused_while_the_server_is_busy(endless):
    sock = endless.send_raw(COMPLETIONS, {"prompt": "X", "max_tokens": 50_000})
    assert eventually(lambda: not endless.idle())
    started = time.monotonic()
    answer = endless.post(COMPLETIONS, {"prompt": [5] * 100_001})
    assert answer.status_code == 400 and time.monotonic() - started < 1
    sock.close()
    assert eventually(endless.idle)


class TestMaxTokens:
    """Absent or null: to the context's edge (completions: OpenAI's 16). More than the room: cut to it."""

    @pytest.fixture
    def prompt_tokens(self, rigged):
        return rigged.chat("x", max_tokens=1)["usage"]["prompt_tokens"]

    @pytest.mark.parametrize("extra", [None, "absent", 0, 1, 100_000])
    def test_chat_ends_at_the_edge(self, rigged, prompt_tokens, extra):
        fields = {} if extra == "absent" else {"max_tokens": None if extra is None else CONTEXT - prompt_tokens + extra}
        answer = rigged.chat("x", ignore_eos=True, **fields)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == CONTEXT

    @pytest.mark.parametrize("extra", [0, 1, 100_000])
    def test_completions_too(self, rigged, extra):
        answer = rigged.complete([5] * 100, ignore_eos=True, max_tokens=CONTEXT - 100 + extra)
        assert answer["usage"]["total_tokens"] == CONTEXT

    def test_completions_without_it_write_sixteen(self, rigged):
        assert rigged.complete([5], max_tokens=None)["usage"]["completion_tokens"] == 16

    def test_both_names_are_one_setting(self, rigged):
        assert rigged.chat(max_completion_tokens=3)["usage"]["completion_tokens"] == 3
        assert rigged.chat(max_completion_tokens=3, max_tokens=3)["usage"]["completion_tokens"] == 3
        answer = rigged.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
                                    "max_completion_tokens": 4})  # fmt: skip
        assert (answer.status_code, error_of(answer)["param"]) == (400, "max_completion_tokens")

    def test_streams_end_there_as_well(self, rigged):
        events = rigged.stream(COMPLETIONS, {"prompt": [5] * 250, "max_tokens": 100, "ignore_eos": True})
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_prompt_the_cache_cannot_hold_and_small_ones_beside_it(rigged_path):
    """BC-036 over HTTP: 8 pages of 16 tokens."""
    from tests.api.conftest import QUICK
    from tests.api.server import serving

    page_bytes = 16 * 2 * 2 * (2 * 32) * 2  # positions, layers, K and V, heads x width, f16
    with serving(rigged_path, *QUICK, "--kv-cache-bytes", str(8 * page_bytes)) as small:
        assert small.http.get("/v1/models").json()["data"][0]["max_model_len"] == 128
        assert small.post(COMPLETIONS, {"prompt": [5] * 140}).status_code == 400
        answer = small.complete([5] * 110, max_tokens=100, ignore_eos=True)
        assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (128, "length")
        many = small.post(COMPLETIONS, {"prompt": [5] * 100, "n": 8, "max_tokens": 20, "ignore_eos": True})
        assert small.complete([5] * 5, max_tokens=3)["choices"][0]["text"] == "abc"
        assert many.status_code == 200
        assert [choice["finish_reason"] for choice in many.json()["choices"]] == ["length"] * 8
