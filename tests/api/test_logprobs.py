"""Log-probabilities over HTTP: always strict JSON, whole, and the same with a hot cache (BC-011, BC-012)."""

import math

import pytest

from tests.api.server import strict_json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SQUEEZES = [
    {"top_p": 0.01},
    {"temperature": 0.001},
    {"temperature": 0},
    {"top_k": 1},
    {"min_p": 1.0},
    {"logit_bias": {"5": -100}},
    {"allowed_token_ids": [70]},
    {"temperature": 100, "frequency_penalty": 2},
]


@pytest.mark.parametrize("squeeze", SQUEEZES)
@pytest.mark.parametrize("model", ["tiny", "rigged"])
def test_no_setting_makes_them_unwritable(request, model, squeeze):
    server = request.getfixturevalue(model)
    answer = server.chat("hello", logprobs=True, top_logprobs=20, max_tokens=4, **squeeze)
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    entries = choice["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    for entry in entries:
        assert math.isfinite(entry["logprob"]) and entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 20
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]


def test_they_are_the_models_own_distribution(tiny):
    """The same with and without filters, so not of what was left after them."""
    plain = tiny.chat("hi", logprobs=True, top_logprobs=5, max_tokens=1, temperature=0)
    filtered = tiny.chat("hi", logprobs=True, top_logprobs=5, max_tokens=1, temperature=0.5, top_k=1)
    assert plain["choices"][0]["logprobs"] == filtered["choices"][0]["logprobs"]


def test_the_chosen_token_alone_where_no_alternatives_are_asked_for(tiny):
    content = tiny.chat("hi", logprobs=True, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]
    assert tiny.chat("hi", max_tokens=2)["choices"][0]["logprobs"] is None


def test_streamed_they_are_those_of_the_whole_answer(tiny):
    body = {"max_tokens": 9, "seed": 4, "logprobs": True, "top_logprobs": 3}
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    whole = strict_json(tiny.post(CHAT, messages | body).content)["choices"][0]["logprobs"]["content"]
    events = tiny.stream(CHAT, messages | body)
    assert [e for event in events for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]] == whole
    body = {"prompt": "the", "max_tokens": 9, "seed": 4, "logprobs": 3, "echo": True}
    whole = tiny.complete(**body)["choices"][0]["logprobs"]
    parts = [event["choices"][0]["logprobs"] for event in tiny.stream(COMPLETIONS, body)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts if part for x in part[name]] == whole[name], name


class TestLegacyForm:
    def test_echo(self, rigged):
        choice = rigged.complete("hello the!", echo=True, logprobs=5, max_tokens=4, temperature=0)["choices"][0]
        lists = choice["logprobs"]
        assert len({len(values) for values in lists.values()}) == 1
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert all(math.isfinite(value) for value in lists["token_logprobs"][1:])
        for token, offset in zip(lists["tokens"], lists["text_offset"]):
            assert choice["text"][offset:].startswith(token)
        for token, logprob, top in list(zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"]))[1:]:
            assert top[token] >= logprob - 1e-6 and len(top) in range(1, 7)

    def test_without_echo_offsets_start_at_the_output(self, tiny):
        choice = tiny.complete("hello the", logprobs=1, max_tokens=4)["choices"][0]
        assert choice["logprobs"]["text_offset"][0] == 0 and len(choice["logprobs"]["tokens"]) == 4

    def test_zero_alternatives(self, tiny):
        lists = tiny.complete("hello", logprobs=0, max_tokens=3)["choices"][0]["logprobs"]
        assert [len(top) for top in lists["top_logprobs"]] == [1, 1, 1]


class TestPrompt:
    """A prompt of 200 tokens scored cold and hot, changed in the middle, and after somebody else's."""

    @staticmethod
    def scored(server, ids, **fields):
        answer = server.complete(ids, echo=True, logprobs=2, max_tokens=1, temperature=0, **fields)
        return answer["choices"][0]["logprobs"], answer["usage"]

    def test_hot_equals_cold(self, tiny):
        ids = [3 + (i * 37) % 250 for i in range(200)]
        changed = [*ids[:100], ids[100] + 1, *ids[101:]]
        cold, usage = self.scored(tiny, ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        hot, usage = self.scored(tiny, ids)
        assert hot == cold
        assert usage["prompt_tokens_details"]["cached_tokens"] <= 199
        other, _ = self.scored(tiny, changed)
        assert other["token_logprobs"][:100] == cold["token_logprobs"][:100]
        assert other["token_logprobs"][101:] != cold["token_logprobs"][101:]
        tiny.complete([7] * 400, max_tokens=50)
        again, _ = self.scored(tiny, ids)
        assert again == cold and len(again["tokens"]) == 201

    def test_both_after_a_request_that_only_filled_the_cache(self, tiny):
        ids = [4 + (i * 41) % 250 for i in range(120)]
        plain = tiny.complete(ids, max_tokens=1)
        assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        hit = tiny.complete(ids, max_tokens=1)
        assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 119
        scored, _ = self.scored(tiny, ids)
        assert len(scored["token_logprobs"]) == 121 and None not in scored["token_logprobs"][1:]

    def test_vllms_form(self, tiny):
        answer = tiny.complete([5, 6, 7], prompt_logprobs=2, max_tokens=1)["choices"][0]
        first, *rest = answer["prompt_logprobs"]
        assert first is None
        for token_id, entry in zip((6, 7), rest):
            assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
            assert 2 <= len(entry) <= 3
        chat = tiny.chat("hi", prompt_logprobs=0, max_tokens=1)
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (chat["usage"]["prompt_tokens"] - 1)

    def test_several_choices_share_one_scoring(self, tiny):
        answer = tiny.complete([5, 6, 7], echo=True, logprobs=1, n=3, max_tokens=1, seed=1)
        prompts = [choice["logprobs"]["token_logprobs"][:3] for choice in answer["choices"]]
        assert prompts[0] == prompts[1] == prompts[2] and None not in prompts[0][1:]

    def test_a_prompt_of_one_token(self, tiny):
        lists, _ = self.scored(tiny, [5])
        assert lists["token_logprobs"][0] is None and len(lists["tokens"]) == 2


def test_smollm2(smol):
    """The real model: the API's own example of each form."""
    answer = smol.openai.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=20, max_tokens=3
    )
    assert len(answer.choices[0].logprobs.content) == 3
    answer = smol.openai.completions.create(model="smol", prompt="The sky is", echo=True, logprobs=5, max_tokens=2)
    assert answer.choices[0].logprobs.tokens[:3] == ["The", " sky", " is"]
    assert answer.choices[0].logprobs.text_offset[:4] == [0, 3, 7, 10]
