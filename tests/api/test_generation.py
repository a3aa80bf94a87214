"""Chat and completions, whole and streamed, as the OpenAI SDK sees them."""

import asyncio

import openai
import pytest

from tests.api.conftest import TEXT, ids_of
from tests.api.server import strict_json
from tests.support.checkpoints import IM_END_ID

HELLO = [{"role": "user", "content": "hello"}]


class TestChat:
    def test_whole(self, rigged):
        answer = rigged.openai.chat.completions.create(model=rigged.model, messages=HELLO)
        assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
        assert answer.model == rigged.model
        (choice,) = answer.choices
        assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", TEXT)
        assert choice.finish_reason == "stop" and choice.logprobs is None
        # every sampled token counts, the end token too
        assert answer.usage.completion_tokens == len(TEXT) + 1
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    def test_streamed(self, rigged):
        chunks = list(rigged.openai.chat.completions.create(model=rigged.model, messages=HELLO, stream=True))
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk.id for chunk in chunks}) == 1
        first, *middle, last = [chunk.choices[0] for chunk in chunks]
        assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
        assert "".join(choice.delta.content for choice in middle) == TEXT
        assert all(choice.finish_reason is None and choice.delta.role is None for choice in middle)
        assert (last.finish_reason, last.delta.content) == ("stop", None)

    def test_async(self, rigged):
        async def run():
            async with rigged.async_openai() as client:
                whole = client.chat.completions.create(model=rigged.model, messages=HELLO, max_tokens=3)
                stream = await client.chat.completions.create(model=rigged.model, messages=HELLO, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                return (await whole).choices[0].message.content, text

        assert asyncio.run(run()) == (TEXT[:3], TEXT)

    def test_many_at_once_each_get_their_own(self, tiny):
        async def run(n, together):
            async with tiny.async_openai() as client:

                async def one(i):
                    answer = await client.chat.completions.create(
                        model=tiny.model,
                        messages=[{"role": "user", "content": f"number {i}"}],
                        max_tokens=12,
                        seed=i,
                        temperature=1.0,
                    )
                    return answer.choices[0].message.content

                if together:
                    return await asyncio.gather(*(one(i) for i in range(n)))
                return [await one(i) for i in range(n)]

        assert asyncio.run(run(12, True)) == asyncio.run(run(12, False))

    def test_max_tokens_ends_with_length(self, rigged):
        answer = rigged.chat(max_tokens=5)["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (TEXT[:5], "length")

    @pytest.mark.parametrize(
        ("stop", "text"),
        [("fgh", "abcde"), (["z", "d"], "abc"), ("a", ""), ("no such thing", TEXT), ("", None), ([], TEXT)],
    )
    def test_stop_strings(self, rigged, stop, text):
        for stream in (False, True):
            body = {"messages": HELLO, "stop": stop}
            if text is None:
                assert rigged.post("/v1/chat/completions", body | {"stream": stream}).status_code == 400
                continue
            if stream:
                events = rigged.stream("/v1/chat/completions", body)
                got = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
                reason = events[-1]["choices"][0]["finish_reason"]
            else:
                choice = rigged.chat("hello", stop=stop)["choices"][0]
                got, reason = choice["message"]["content"], choice["finish_reason"]
            assert (got, reason) == (text, "stop")

    def test_a_stop_string_counts_the_tokens_up_to_its_end(self, rigged):
        answer = rigged.chat(stop="fgh")
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["stop_reason"] == "fgh"
        included = rigged.chat(stop="fgh", include_stop_str_in_output=True)
        assert included["choices"][0]["message"]["content"] == "abcdefgh"

    def test_stop_token_ids_and_ignore_eos(self, rigged):
        (c_id,) = ids_of("c")
        answer = rigged.chat(stop_token_ids=[c_id])["choices"][0]
        assert (answer["message"]["content"], answer["stop_reason"]) == ("ab", c_id)
        answer = rigged.chat(ignore_eos=True, max_tokens=40)["choices"][0]
        assert answer["finish_reason"] == "length" and len(answer["message"]["content"]) > len(TEXT)

    def test_content_parts_are_the_same_prompt_as_one_text(self, rigged):
        whole = rigged.http.post("/tokenize", json={"messages": [{"role": "user", "content": "AB"}]}).json()
        parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
        split = rigged.http.post("/tokenize", json={"messages": [{"role": "user", "content": parts}]}).json()
        assert split["tokens"] == whole["tokens"]
        assert rigged.chat(parts)["usage"]["prompt_tokens"] == whole["count"]

    def test_developer_is_system_and_a_system_turn_may_stand_anywhere(self, rigged):
        def tokens(*roles):
            messages = [{"role": role, "content": "x"} for role in roles]
            return rigged.http.post("/tokenize", json={"messages": messages}).json()["tokens"]

        assert tokens("developer", "user") == tokens("system", "user")
        assert tokens("user", "system", "user") == tokens("user", "developer", "user")
        assert tokens("system", "system", "user") != tokens("system", "user")

    def test_names_and_refusals_of_earlier_turns_are_taken(self, rigged):
        messages = [
            {"role": "user", "content": "x", "name": "ann"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "user", "content": "y"},
        ]
        assert rigged.post("/v1/chat/completions", {"messages": messages}).status_code == 200

    def test_content_is_never_evaluated_and_templates_are_not_the_clients(self, rigged):
        plain = rigged.http.post("/tokenize", json={"messages": [{"role": "user", "content": "{{7*7}}"}]}).json()
        text = rigged.http.post("/detokenize", json={"tokens": plain["tokens"]}).json()["prompt"]
        assert "{{7*7}}" in text
        answer = rigged.post("/v1/chat/completions", {"messages": HELLO, "chat_template": "{{ 1 }}"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template"
        for name in ("messages", "chat_template", "template", "tools", "max_model_len"):
            answer = rigged.post("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {name: "x"}})
            assert answer.status_code == 400, name

    def test_the_ids_can_be_had(self, rigged):
        answer = rigged.chat("x", return_token_ids=True, max_tokens=3)
        assert answer["choices"][0]["token_ids"] == ids_of("abc")
        assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
        events = rigged.stream("/v1/chat/completions", {"messages": HELLO, "return_token_ids": True})
        ids = [i for event in events for i in event["choices"][0].get("token_ids", [])]
        assert ids == [*ids_of(TEXT), IM_END_ID]


class TestCompletions:
    def test_whole_with_openais_default_length(self, rigged):
        answer = rigged.openai.completions.create(model=rigged.model, prompt="hello")
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
        assert answer.choices[0].text == TEXT[:16] and answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 16

    def test_streamed(self, rigged):
        chunks = list(rigged.openai.completions.create(model=rigged.model, prompt="X", stream=True, max_tokens=30))
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
        assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompt", [["X", "Y and MORE"], [[5, 6], [7]], ["X", [5, 6, 7]]])
    def test_lists_of_prompts(self, rigged, prompt, stream):
        body = {"prompt": prompt, "n": 2, "max_tokens": 4}
        if stream:
            texts = {i: "" for i in range(4)}
            for event in rigged.stream("/v1/completions", body):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
        else:
            answer = strict_json(rigged.post("/v1/completions", body).content)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
            one = [rigged.complete(p, max_tokens=1)["usage"]["prompt_tokens"] for p in prompt]
            assert answer["usage"]["prompt_tokens"] == sum(one)
            assert answer["usage"]["completion_tokens"] == 16
        assert texts == {i: TEXT[:4] for i in range(4)}

    def test_a_list_of_ids_is_one_prompt(self, rigged):
        answer = rigged.complete([5, 6, 7], return_token_ids=True, max_tokens=2)
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["choices"][0]["prompt_token_ids"] == [5, 6, 7]
        assert answer["choices"][0]["token_ids"] == ids_of("ab")

    def test_echo(self, rigged):
        assert rigged.complete("hello! ", echo=True, max_tokens=3)["choices"][0]["text"] == "hello! abc"
        assert rigged.complete(ids_of("XY"), echo=True, max_tokens=1)["choices"][0]["text"] == "XYa"
        events = rigged.stream("/v1/completions", {"prompt": "hello! ", "echo": True, "max_tokens": 3})
        assert "".join(event["choices"][0]["text"] for event in events) == "hello! abc"

    @pytest.mark.parametrize("stream", [False, True])
    def test_echo_without_output_scores_the_prompt_alone(self, rigged, stream):
        body = {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1}
        if stream:
            events = rigged.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
            text = "".join(event["choices"][0]["text"] for event in events[:-1])
            tokens = [t for e in events[:-1] for t in (e["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
            usage = events[-1]["usage"]
        else:
            answer = rigged.complete(**body)
            text, usage = answer["choices"][0]["text"], answer["usage"]
            tokens = answer["choices"][0]["logprobs"]["tokens"]
        assert text == "hello" == "".join(tokens)
        assert usage["completion_tokens"] == 0

    def test_best_of_returns_the_likeliest(self, tiny):
        body = {"prompt": "the", "max_tokens": 6, "seed": 11, "logprobs": 0}
        all_four = tiny.complete(**body, n=4)["choices"]
        best = tiny.complete(**body, n=2, best_of=4)
        means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / 6 for c in all_four}
        assert len(means) > 2
        expected = sorted(means, key=lambda text: -means[text])[:2]
        assert [choice["text"] for choice in best["choices"]] == expected
        assert [choice["index"] for choice in best["choices"]] == [0, 1]
        assert best["usage"]["completion_tokens"] == 24  # all that were generated

    def test_best_of_is_refused_where_it_means_nothing(self, rigged):
        for fields, param in [({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 2, "stream": True}, "best_of")]:
            answer = rigged.post("/v1/completions", {"prompt": "X", **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert len(rigged.complete("X", n=2, best_of=2)["choices"]) == 2

    def test_suffix_is_refused_by_name(self, rigged):
        with pytest.raises(openai.BadRequestError) as refused:
            rigged.openai.completions.create(model=rigged.model, prompt="X", suffix="y")
        assert (refused.value.code, refused.value.param) == ("unsupported_field", "suffix")

    def test_sampling_extensions_reach_the_engine(self, rigged):
        """Each changes what the rigged model writes, which nothing else would."""
        b, c, z = ids_of("bcz")
        assert rigged.complete("X", max_tokens=2, allowed_token_ids=[z], temperature=0)["choices"][0]["text"] == "zz"
        text = rigged.complete("X", max_tokens=2, logit_bias={str(b): -100}, temperature=0)["choices"][0]["text"]
        assert text[0] == "a" and text[1] != "b"
        text = rigged.complete("X", max_tokens=3, bad_words=["ab"], temperature=0)["choices"][0]["text"]
        assert text[0] == "a" and text[1] != "b"
        answer = rigged.complete("X", max_tokens=3, stop_token_ids=[c], min_tokens=3, temperature=0)
        assert answer["choices"][0]["finish_reason"] == "length"


class TestModels:
    def test_list_and_one(self, rigged):
        (listed,) = rigged.openai.models.list().data
        assert listed.id == rigged.model == "rigged" and listed.object == "model"
        assert rigged.openai.models.retrieve("rigged").id == "rigged"
        with pytest.raises(openai.NotFoundError) as missing:
            rigged.openai.models.retrieve("gpt-4")
        assert missing.value.code == "model_not_found"

    def test_the_length_is_told(self, rigged):
        assert rigged.http.get("/v1/models").json()["data"][0]["max_model_len"] == 256


class TestTokenize:
    @pytest.mark.parametrize("text", ["hello the world", "", "é漢🔥\u200d", "a\r\n\tb", "x" * 5000])
    def test_there_and_back(self, rigged, text):
        answer = rigged.http.post("/tokenize", json={"prompt": text}).json()
        assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 256
        back = rigged.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back == {"prompt": text}

    @pytest.mark.parametrize(
        "body",
        [
            {"prompt": "x" * 1048577},
            {"messages": [{"role": "user", "content": "x" * 1048577}]},
        ],
    )
    def test_a_text_that_would_fill_the_memory_is_refused(self, rigged, body):
        answer = rigged.http.post("/tokenize", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(body))

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "X", "messages": HELLO}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [1, 320]}, "tokens[1]"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ],
    )
    def test_bad_bodies(self, rigged, path, body, param):
        answer = rigged.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_request_ids_are_echoed_and_never_used(rigged):
    answers = [
        rigged.http.post(
            "/v1/completions",
            json={"model": rigged.model, "prompt": "X", "max_tokens": 1, "request_id": "mine"},
            headers={"x-request-id": "mine"},
        )
        for _ in range(2)
    ]
    assert [a.headers["x-request-id"] for a in answers] == ["mine", "mine"]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert len(rigged.http.get("/health").headers["x-request-id"]) == 16
    hostile = rigged.http.get("/health", headers={"x-request-id": "a" * 1000})
    assert len(hostile.headers["x-request-id"]) == 16


def test_small_things(rigged):
    assert rigged.http.get("/version").json() == {"version": "0.1.0"}
    assert rigged.http.get("/").json()["model"] == "rigged"
    assert rigged.http.get("/health").json() == {"status": "ok"}


def test_the_startup_lines_say_what_was_decided_and_give_a_request_that_works(rigged):
    import subprocess

    assert "KV cache" in rigged.log and "threads" in rigged.log
    curl = next(line.strip() for line in rigged.lines if "curl http" in line)
    answer = subprocess.run(["sh", "-c", f"{curl} -sS"], capture_output=True, text=True, check=True, timeout=30)
    assert strict_json(answer.stdout)["choices"][0]["message"]["content"] == TEXT
