"""Streams end as they should, also when something went wrong; usage comes when asked for (BC-027, BC-028)."""

import json

import pytest

from tests.api.conftest import TEXT
from tests.api.engine_double import EXITS, REFUSED
from tests.api.server import error_of, events_of, eventually, read_all, read_until, strict_json, unchunk

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = {"/v1/chat/completions": {"messages": MESSAGES}, "/v1/completions": {"prompt": "HELLO", "max_tokens": 40}}
PATHS = list(BODIES)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{"n": 0}, {"temperature": -1}, {"model": "other"}])
def test_what_is_wrong_before_the_first_token_is_a_plain_answer(rigged, path, fields):
    answer = rigged.post(path, BODIES[path] | {"stream": True} | fields)
    assert answer.status_code in (400, 404)
    error_of(answer)


@pytest.mark.parametrize("path", PATHS)
def test_an_overlong_prompt_is_refused_before_any_event(rigged, path):
    body = {"messages": [{"role": "user", "content": "x" * 5000}]} if "chat" in path else {"prompt": "X" * 5000}
    answer = rigged.post(path, body | {"stream": True})
    assert answer.status_code == 400 and error_of(answer)["code"] == "context_length_exceeded"


def test_an_engine_that_dies_before_the_first_token_is_a_503(double):
    answer = double.post("/v1/completions", {"prompt": [EXITS], "stream": True})
    assert answer.status_code == 503 and error_of(answer)["code"] == "engine_unavailable"
    assert eventually(double.healthy)


def test_what_the_engine_refuses_is_an_error(double):
    for stream in (False, True):
        answer = double.post("/v1/completions", {"prompt": [REFUSED], "stream": stream})
        assert answer.status_code == 500 and error_of(answer)["message"] == "the double does not like this"


def test_connections_are_used_again_after_a_stream(rigged):
    sock = rigged.connect()
    for _ in range(3):
        rigged.send_raw("/v1/completions", {"prompt": "X", "stream": True, "max_tokens": 30}, sock)
        raw = read_until(sock, b"0\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 200") and b"data: [DONE]\n\n" in raw
    sock.close()


def test_many_streams_end_with_reason_usage_and_done(tiny):
    """Read as raw bytes; the whole answer's text is the stream's."""
    for length in (1, 2, 3, 5, 17, 100, 400):
        body = {"prompt": "the", "max_tokens": length, "temperature": 0, "ignore_eos": True}
        sock = tiny.send_raw("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
        raw = read_until(sock, b"0\r\n\r\n")
        sock.close()
        *chunks, usage = events_of(unchunk(raw))
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        whole = tiny.complete(**body)
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage["usage"][count] == whole["usage"][count]


class TestUsage:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
    def test_not_asked_for_there_is_none(self, rigged, path, options):
        body = dict(BODIES[path])
        if options is not None:
            body["stream_options"] = options
        events = rigged.stream(path, body)
        assert all("usage" not in event and event["choices"] for event in events)

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("n", [1, 2])
    def test_asked_for_it_is_one_chunk_of_its_own(self, rigged, path, n):
        *chunks, last = rigged.stream(path, BODIES[path] | {"n": n, "stream_options": {"include_usage": True}})
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        assert last["choices"] == []
        whole = strict_json(rigged.post(path, BODIES[path] | {"n": n}).content)["usage"]
        assert last["usage"]["completion_tokens"] == whole["completion_tokens"] == n * (len(TEXT) + 1)
        assert last["usage"]["prompt_tokens"] == whole["prompt_tokens"]
        assert set(last["usage"]["prompt_tokens_details"]) == {"cached_tokens"}

    def test_so_far_in_every_chunk_for_those_who_ask(self, rigged):
        events = rigged.stream("/v1/completions", {"prompt": "X", "max_tokens": 5,
                               "stream_options": {"continuous_usage_stats": True}})  # fmt: skip
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[-1] == 5

    @pytest.mark.parametrize("stream", [False, None])
    def test_stream_options_without_a_stream_are_refused(self, rigged, stream):
        body = {"prompt": "X", "stream": stream, "stream_options": {"include_usage": True}}
        answer = rigged.post("/v1/completions", body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "stream_options")

    def test_the_sdk_reads_it(self, rigged):
        stream = rigged.openai.chat.completions.create(
            model=rigged.model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        *_, last = list(stream)
        assert last.usage.completion_tokens == len(TEXT) + 1 and last.choices == []


def test_choices_of_one_stream_finish_once_each_and_keep_their_index(tiny):
    events = tiny.stream("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "max_tokens": 8, "seed": 5})
    texts, ends, roles = {0: "", 1: "", 2: ""}, [], []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends += [choice["index"]] * (choice["finish_reason"] is not None)
        roles += [choice["index"]] * ("role" in choice["delta"])
    assert sorted(ends) == sorted(roles) == [0, 1, 2]
    whole = strict_json(
        tiny.post("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "max_tokens": 8, "seed": 5}).content
    )
    assert texts == {c["index"]: c["message"]["content"] for c in whole["choices"]}


def test_a_stream_of_http_1_0_ends_by_closing(rigged):
    body = json.dumps({"model": rigged.model, "prompt": "X", "stream": True, "max_tokens": 3}).encode()
    sock = rigged.connect()
    sock.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
    assert b"data: [DONE]\n\n" in read_all(sock)
