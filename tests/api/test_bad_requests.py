"""Bad input is answered with the field's name and never hurts the next request (BC-014, 015, 044, 064, 065, 066)."""

import json
import time

import openai
import pytest

from tests.api.server import error_of, read_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]


def post_raw(server, path, fields: str):
    """A body with `fields` as they stand, after the ones that make it whole."""
    start = '"messages": [{"role": "user", "content": "x"}]' if path == CHAT else '"prompt": "x"'
    body = f'{{"model": "{server.model}", "max_tokens": 3, {start}, {fields}}}'
    return server.http.post(path, content=body.encode(), headers={"content-type": "application/json"})


def refused(server, path, fields: str, param: str | None, status: int = 400):
    started = time.monotonic()
    answer = post_raw(server, path, fields)
    assert answer.status_code == status, (fields, answer.text)
    error = error_of(answer)
    assert error["param"] == param and error["type"] == "invalid_request_error", (fields, error)
    assert time.monotonic() - started < 2
    return error


FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "typical_p"]


class TestNumbers:
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    @pytest.mark.parametrize("field", FLOATS)
    @pytest.mark.parametrize(
        "value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"NaN"', '"1"', "true", "[1]"]
    )
    def test_what_is_no_finite_number(self, rigged, path, field, value):
        refused(rigged, path, f'"{field}": {value}', field)

    @pytest.mark.parametrize(
        "fields",
        ['"temperature": -1', '"top_p": -0.1', '"top_p": 1.1', '"min_p": -0.1', '"min_p": 2', '"presence_penalty": 2.1',
         '"frequency_penalty": -2.1', '"repetition_penalty": 0', '"repetition_penalty": -1', '"typical_p": -1',
         '"temperature": 1e30'],
    )  # fmt: skip
    def test_out_of_range(self, rigged, fields):
        refused(rigged, CHAT, fields, fields.split('"')[1])

    @pytest.mark.parametrize("value", ["-0.0", "0", "1e-320", "1e-6"])
    def test_tiny_temperatures_are_greedy(self, tiny, value):
        greedy = post_raw(tiny, COMPLETIONS, '"temperature": 0').json()["choices"]
        assert post_raw(tiny, COMPLETIONS, f'"temperature": {value}').json()["choices"] == greedy

    def test_the_next_request_works(self, rigged):
        refused(rigged, CHAT, '"temperature": NaN', "temperature")
        assert rigged.chat(max_tokens=2)["choices"][0]["message"]["content"] == "ab"


class TestIntegers:
    @pytest.mark.parametrize(
        ("path", "fields", "param"),
        [
            (CHAT, '"top_k": -2', "top_k"),
            (CHAT, '"logprobs": true, "top_logprobs": 1000000000', "top_logprobs"),
            (CHAT, '"logprobs": true, "top_logprobs": -1', "top_logprobs"),
            (CHAT, '"top_logprobs": 2', "top_logprobs"),
            (COMPLETIONS, '"logprobs": 1000000000', "logprobs"),
            (COMPLETIONS, '"prompt_logprobs": 1000000000', "prompt_logprobs"),
            (CHAT, '"n": 5000000', "n"),
            (COMPLETIONS, '"n": 5000000', "n"),
            (COMPLETIONS, '"best_of": 5000000', "n"),
            (CHAT, '"n": 0', "n"),
            (CHAT, '"n": -1', "n"),
            (COMPLETIONS, '"n": 0', "n"),
            (COMPLETIONS, '"n": 3, "best_of": 2', "best_of"),
            (CHAT, '"min_tokens": 4', "min_tokens"),
            (CHAT, '"min_tokens": -1', "min_tokens"),
            (CHAT, '"max_tokens": -1', "max_tokens"),
            (COMPLETIONS, '"max_tokens": 0', "max_tokens"),
            (CHAT, '"max_tokens": 18446744073709551616000', "max_tokens"),
            (CHAT, '"repeat_last_n": -5', "repeat_last_n"),
            (CHAT, '"stop": ' + json.dumps(["x"] * 10000), "stop"),
            (CHAT, '"stop": ["a", ""]', "stop"),
            (CHAT, '"stop": [5]', "stop[0]"),
            (CHAT, '"stop_token_ids": [99999]', "stop_token_ids"),
            (CHAT, '"stop_token_ids": [-1]', "stop_token_ids"),
            (CHAT, '"allowed_token_ids": [99999]', "allowed_token_ids"),
            (CHAT, '"allowed_token_ids": []', "allowed_token_ids"),
            (CHAT, '"logit_bias": {"99999": 1}', "logit_bias"),
            (CHAT, '"logit_bias": {"a": 1}', "logit_bias"),
            (CHAT, '"logit_bias": {"5": 1e9}', "logit_bias"),
            (CHAT, '"bad_words": [""]', "bad_words"),
        ],
    )
    def test_out_of_range(self, rigged, path, fields, param):
        refused(rigged, path, fields, param)

    @pytest.mark.parametrize("fields", ['"top_k": 0', '"top_k": -1', '"top_k": 49153', '"top_k": 9223372036854775807',
                                        '"repeat_last_n": -1', '"max_tokens": 9223372036854775807'])  # fmt: skip
    def test_off_and_clamped_values(self, rigged, fields):
        assert post_raw(rigged, CHAT, fields).status_code == 200

    @pytest.mark.parametrize("seed", ["18446744073709551616", "1.5", '"7"', "true", "-9223372036854775809"])
    def test_seeds_outside_the_range(self, rigged, seed):
        refused(rigged, CHAT, f'"seed": {seed}', "seed")

    @pytest.mark.parametrize("seed", ["0", "-1", "2147483648", "4294967296", "9223372036854775807", "null"])
    def test_seeds_inside_it(self, tiny, seed):
        assert post_raw(tiny, COMPLETIONS, f'"seed": {seed}').status_code == 200


class TestTypes:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ('"stream": "false"', "stream"),
            ('"stream": 0', "stream"),
            ('"max_tokens": "5"', "max_tokens"),
            ('"max_tokens": 5.0', "max_tokens"),
            ('"n": true', "n"),
            ('"messages": {"role": "user"}', "messages"),
            ('"messages": ["x"]', "messages[0]"),
            ('"messages": [{"content": "x"}]', "messages[0].role"),
            ('"messages": [{"role": "user"}]', "messages[0].content"),
            ('"messages": [{"role": "user", "content": null}]', "messages[0].content"),
            ('"messages": [{"role": "user", "content": 5}]', "messages[0].content"),
            ('"messages": [{"role": "user", "content": []}]', "messages[0].content"),
            ('"messages": [{"role": "user", "content": [{"type": "text"}]}]', "messages[0].content[0].text"),
            ('"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
             "messages[0].content[0].type"),
            ('"messages": [{"role": "wizard", "content": "x"}]', "messages[0].role"),
            ('"messages": [{"role": 5, "content": "x"}]', "messages[0].role"),
            ('"messages": []', "messages"),
            ('"messages": null', "messages"),
            ('"model": 5', "model"),
            ('"model": null', "model"),
            ('"stream_options": true', "stream_options"),
            ('"logit_bias": [1]', "logit_bias"),
            ('"chat_template_kwargs": []', "chat_template_kwargs"),
        ],
    )  # fmt: skip
    def test_wrong_ones_are_named_and_not_coerced(self, rigged, fields, param):
        refused(rigged, CHAT, fields, param)

    def test_a_type_of_content_the_model_cannot_read_is_named(self, rigged):
        content = [{"type": "image_url", "image_url": {"url": "data:"}}]
        answer = rigged.post(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert "image_url" in error_of(answer)["message"]

    def test_null_is_absent_everywhere(self, rigged):
        from tokenmill.server.protocol import ChatRequest, CompletionRequest

        for path, kind, given in [
            (CHAT, ChatRequest, {"messages": MESSAGES}),
            (COMPLETIONS, CompletionRequest, {"prompt": "x"}),
        ]:
            nulls = dict.fromkeys(kind.__struct_fields__)
            plain = rigged.post(path, given | {"temperature": None}).json()
            answer = rigged.post(path, nulls | given | {"model": rigged.model})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == plain["choices"]

    @pytest.mark.parametrize(
        "fields",
        ['"foo": 1', '"user": "u"', '"metadata": {"a": "b"}', '"store": true', '"service_tier": "auto"',
         '"reasoning_effort": "low"', '"parallel_tool_calls": false', '"tools": []', '"tool_choice": "none"',
         '"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"',
         '"response_format": {"type": "text"}', '"modalities": ["text"]', '"temperature": 9, "temperature": 0',
         '"stop": null', '"stop": []', '"prompt_cache_key": "k"', '"safety_identifier": "s"', '"verbosity": "low"'],
    )  # fmt: skip
    def test_harmless_fields_are_taken(self, rigged, fields):
        assert post_raw(rigged, CHAT, fields).status_code == 200

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ('"tools": [{"type": "function", "function": {"name": "f"}}]', "tools"),
            ('"tool_choice": "required"', "tool_choice"),
            ('"tool_choice": {"type": "function"}', "tool_choice"),
            ('"response_format": {"type": "json_object"}', "response_format"),
            ('"response_format": {"type": "json_schema", "json_schema": {}}', "response_format"),
            ('"structured_outputs": {"regex": "a"}', "structured_outputs"),
            ('"guided_json": {}', "guided_json"),
            ('"guided_choice": ["a"]', "guided_choice"),
            ('"grammar": "root ::= x"', "grammar"),
            ('"functions": [{"name": "f"}]', "functions"),
            ('"audio": {"voice": "x"}', "audio"),
            ('"modalities": ["text", "audio"]', "modalities"),
            ('"continue_final_message": true', "continue_final_message"),
            ('"use_beam_search": true', "use_beam_search"),
            ('"truncate_prompt_tokens": 5', "truncate_prompt_tokens"),
            ('"mirostat": 2', "mirostat"),
            ('"xtc_probability": 0.5', "xtc_probability"),
            ('"repeat_last_n": 64', "repeat_last_n"),
            ('"priority": 1', "priority"),
            ('"priority": false', "priority"),
        ],
    )
    def test_fields_we_know_and_do_not_honour_are_refused_by_name(self, rigged, fields, param):
        assert refused(rigged, CHAT, fields, param)["code"] == "unsupported_field"


class TestBodies:
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
    @pytest.mark.parametrize(
        "body",
        [b"", b" ", b"{", b"null", b"[]", b'"x"', b"5", b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b"{\xff}", b"{} {}",
         b"[" * 100_000, b'{"x":' * 50_000, b'{"messages": ' + b"[" * 50_000, b'{"foo": ' + b"[" * 100_000],
    )  # fmt: skip
    def test_no_json_object(self, rigged, path, body):
        answer = rigged.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert error_of(answer)["type"] == "invalid_request_error"

    @pytest.mark.parametrize(("path", "param"), [(CHAT, "model"), (COMPLETIONS, "model")])
    def test_an_empty_object(self, rigged, path, param):
        answer = rigged.http.post(path, json={})
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)

    @pytest.mark.parametrize(
        ("prompt", "param"),
        [("", "prompt"), ([""], "prompt"), ([], "prompt"), ([[]], "prompt"), (["x", ""], "prompt[1]"), (None, "prompt"),
         ([1, "x"], "prompt"), ([999999], "prompt"), ([-1], "prompt"), ([["x"]], "prompt[0][0]"), ([1.5], "prompt[0]"),
         ({"a": 1}, "prompt"), (["x"] * 1000, "prompt")],
    )  # fmt: skip
    def test_prompts(self, rigged, prompt, param):
        answer = rigged.post(COMPLETIONS, {"prompt": prompt})
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)

    def test_a_lone_surrogate(self, rigged):
        answer = post_raw(rigged, CHAT, '"messages": [{"role": "user", "content": "\\ud800"}]')
        assert answer.status_code == 400
        error_of(answer)

    def test_a_field_that_is_nearly_a_known_one_is_named_in_the_log_once(self, rigged):
        for _ in range(2):
            body = {"messages": MESSAGES, "temprature": 0, "store": False, "max_tokens": 1}
            assert rigged.post(CHAT, body).status_code == 200
        assert rigged.log.count("field 'temprature' is ignored; did its client mean 'temperature'?") == 1
        assert "'store'" not in rigged.log

    def test_a_hundred_thousand_unknown_keys(self, rigged):
        body = {f"k{i}": i for i in range(100_000)}
        assert rigged.post(CHAT, body | {"messages": MESSAGES, "max_tokens": 1}).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [{"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"},
         {"content-type": "application/json", "content-encoding": "gzip"}],
    )  # fmt: skip
    def test_other_media_types(self, rigged, headers):
        answer = rigged.http.post(CHAT, content=b"{}", headers=headers)
        assert answer.status_code == 415
        error_of(answer)

    @pytest.mark.parametrize(
        "kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json", None]
    )
    def test_media_types_that_are_json(self, rigged, kind):
        body = json.dumps({"model": rigged.model, "prompt": "x"}).encode()
        headers = {"content-type": kind} if kind else {}
        assert rigged.http.post(COMPLETIONS, content=body, headers=headers).status_code == 200


class TestRoutes:
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [("GET", CHAT, 405), ("GET", COMPLETIONS, 405), ("PUT", CHAT, 405), ("POST", "/v1/models", 405),
         ("GET", "/tokenize", 405), ("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", "/v1/models/", 404),
         ("GET", "/v1/models/nope", 404), ("GET", "/V1/models", 404), ("GET", "/../etc/passwd", 404)],
    )  # fmt: skip
    def test_wrong_ones(self, rigged, method, path, status):
        answer = rigged.http.request(method, path)
        assert answer.status_code == status
        assert error_of(answer)["type"] == "invalid_request_error"
        if status == 405:
            assert answer.headers["allow"]

    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            ("/chat/completions", CHAT),
            ("/v1/v1/chat/completions", CHAT),
            ("/completions", COMPLETIONS),
            ("/nope", None),
        ],
    )
    def test_a_base_url_without_v1_is_told_the_right_path(self, rigged, path, meant):
        message = error_of(rigged.http.request("POST", path))["message"]
        assert message == f"there is no POST {path}" + (f"; did you mean {meant}?" if meant else "")

    def test_an_unknown_model(self, rigged):
        for path, body in [
            (CHAT, {"messages": MESSAGES}),
            (COMPLETIONS, {"prompt": "x"}),
            ("/tokenize", {"prompt": "x"}),
        ]:
            answer = rigged.post(path, body | {"model": "gpt-4"})
            assert answer.status_code == 404
            error = error_of(answer)
            assert (error["code"], error["param"]) == ("model_not_found", "model")

    def test_no_http_at_all(self, rigged):
        sock = rigged.connect()
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
        raw = read_until(sock, b"}}")
        assert raw.startswith(b"HTTP/1.1 400")
        assert error_of(raw)["type"] == "invalid_request_error"


class TestTheSdkRaisesItsOwn:
    def test_each_class(self, rigged):
        create = rigged.openai.chat.completions.create
        with pytest.raises(openai.NotFoundError):
            create(model="gpt-4", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as bad:
            create(model=rigged.model, messages=MESSAGES, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            create(model=rigged.model, messages=[])
        with pytest.raises(openai.BadRequestError):
            create(model=rigged.model, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])


def test_a_hundred_of_each_while_a_stream_runs(rigged):
    bad = [(b"{", 400), (b"{}", 400), (b"[" * 1000, 400), (b'{"model": "x"}', 404)]
    stream = rigged.openai.completions.create(
        model=rigged.model, prompt="x", stream=True, max_tokens=200, extra_body={"ignore_eos": True}
    )
    seen = 0
    for round_ in range(100):
        for body, status in bad:
            answer = rigged.http.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == status
        if round_ < 5:
            seen += len(next(stream).choices[0].text)
    assert seen + sum(len(chunk.choices[0].text) for chunk in stream) > 100
    assert rigged.healthy()
