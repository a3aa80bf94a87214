"""Messages become the prompt the model's template writes; what cannot be is refused, naming the place."""

from __future__ import annotations

import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.text.chat import chat_to_ids, prepare_messages, render_chat
from tokenmill.text.gguf_tokenizer import gguf_tokenizer

from .conftest import byte_level_metadata, sentencepiece_metadata

HI = [{"role": "user", "content": "hi"}]
ROLES = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def refused(*args, **kwargs) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render_chat(*args, **kwargs)
    assert caught.value.status == 400 and caught.value.type == "invalid_request_error"
    return caught.value


def test_smollm2s_prompt(smollm2):
    text = render_chat(smollm2, HI)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = chat_to_ids(smollm2, HI)
    assert ids[0] == 1 and smollm2.decode(ids[1:2]) == "system"
    assert render_chat(smollm2, HI, add_generation_prompt=False) == text.removesuffix("<|im_start|>assistant\n")


def test_the_tokenizer_has_transformers_word_for_it(smollm2):
    text = smollm2.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert text == render_chat(smollm2, HI)
    assert smollm2.apply_chat_template(HI, add_generation_prompt=True) == chat_to_ids(smollm2, HI)
    assert smollm2.apply_chat_template(HI, tokenize=False) == render_chat(smollm2, HI, add_generation_prompt=False)
    assert smollm2.apply_chat_template(HI, tokenize=False, chat_template=ROLES) == "[user:hi]"


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_a_chat_prompt_has_one_start_token(add_bos):
    """However the file is marked, when the template writes it."""
    tokenizer = gguf_tokenizer(byte_level_metadata(add_bos_token=add_bos))
    ids = chat_to_ids(tokenizer, HI)
    assert ids[0] == 1 and ids[1] != 1
    assert ids == chat_to_ids(gguf_tokenizer(byte_level_metadata()), HI)


def test_a_model_that_wants_a_start_token_gets_it_once(sp_file):
    wants = gguf_tokenizer(sentencepiece_metadata(sp_file))
    for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        ids = chat_to_ids(wants, HI, template=template)
        assert ids == [1, *wants.encode("hi", add_special_tokens=False)]
    no = gguf_tokenizer(sentencepiece_metadata(sp_file, add_bos_token=False))
    assert chat_to_ids(no, HI, template="{{ messages[0].content }}")[0] != 1


def test_special_tokens_are_given_to_the_template_as_text(small):
    assert render_chat(small, HI, template="{{ bos_token }}{{ eos_token }}{{ pad_token }}") == "<|im_start|><|im_end|>"


def test_parts_are_joined_in_order_with_nothing_between(small):
    def with_content(content):
        return chat_to_ids(small, [{"role": "user", "content": content}])

    a, b = {"type": "text", "text": "A"}, {"type": "text", "text": " B\n"}
    assert with_content([a, b]) == with_content("A B\n")
    assert with_content([b, a]) == with_content(" B\nA")
    assert with_content([a]) == with_content("A")
    assert with_content([]) == with_content("")
    assert with_content([{"type": "input_text", "text": "A"}, "B"]) == with_content("AB")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "whatever"])
def test_parts_that_are_not_text_are_refused_naming_the_type(small, kind):
    part = {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}
    error = refused(small, [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])
    assert repr(kind) in error.message and error.param == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([None], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "system", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": True}], "messages[0].content"),
        ([{"role": "user", "content": b"x"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([*HI, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=repr,
)
def test_malformed_messages_are_refused_naming_the_place(small, messages, param):
    assert refused(small, messages).param == param


def test_a_developer_is_a_system_to_a_template_that_does_not_know_it(small):
    messages = [{"role": "developer", "content": "D"}, *HI]
    assert render_chat(small, messages, template=ROLES) == "[system:D][user:hi]"
    knows = ROLES + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert render_chat(small, messages, template=knows) == "[developer:D][user:hi]!"


def test_system_messages_stay_where_they_are(small):
    messages = [*HI, {"role": "system", "content": "S"}, {"role": "system", "content": "T"}, *HI]
    assert render_chat(small, messages, template=ROLES) == "[user:hi][system:S][system:T][user:hi]"


def test_names_refusals_and_nulls(small):
    template = (
        "{% for m in messages %}[{{ m.role }}{{ ' ' + m.name if m.name is defined }}:{{ m.content }}]{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "hi", "name": "ann", "tool_calls": None, "audio": None},
        {"role": "assistant", "content": None, "refusal": "I may not.", "name": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "assistant"},
    ]
    expected = "[user ann:hi][assistant:I may not.][assistant:No.][assistant:][assistant:]"
    assert render_chat(small, messages, template=template) == expected
    assert render_chat(small, messages, template=ROLES) == expected.replace(" ann", "")


def test_the_callers_messages_are_left_alone(small):
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}], "name": None}]
    render_chat(small, messages, template=ROLES)
    assert messages == [{"role": "developer", "content": [{"type": "text", "text": "x"}], "name": None}]


def test_tool_calls_reach_the_template_as_objects(small):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2]}'}}]
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]
    template = "{{ messages[-1].tool_calls[0].function.arguments.x[1] }}{{ tools[0].function.name if tools }}"
    assert render_chat(small, messages, template=template) == "2"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render_chat(small, messages, template=template, tools=tools) == "2f"
    assert "tool_calls" not in prepare_messages([{"role": "assistant", "content": "x", "tool_calls": []}])[0]


def test_the_template_for_tools_is_used_with_tools():
    tokenizer = gguf_tokenizer(byte_level_metadata() | {"tokenizer.chat_template.tool_use": "with tools"})
    assert render_chat(tokenizer, HI, tools=[{"type": "function"}]) == "with tools"
    assert render_chat(tokenizer, HI) != "with tools"


def test_a_template_that_objects_speaks_for_itself(small):
    alternate = (
        "{% for m in messages %}{% if loop.index0 % 2 != (m.role != 'user')|int %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    assert render_chat(small, HI, template=alternate) == "hi"
    error = refused(small, [*HI, *HI], template=alternate)
    assert error.message == "Conversation roles must alternate user/assistant"
    assert error.param == "messages"


@pytest.mark.parametrize(
    "broken",
    [
        "SECRET {% if %}",
        "SECRET {% for m in messages %}",
        "SECRET {{ m | nofilter }}",
        "SECRET {{ messages[0].x.y }}",
        "SECRET {{ 'a' + 1 }}",
        "SECRET {{ 1 / 0 }}",
        "SECRET {% unknown %}",
        "SECRET {{ messages[0]() }}",
        "SECRET {{",
        "SECRET {% for a in 5 %}{% endfor %}",
        "{% for m in messages recursive %}SECRET{% endfor %}",
        "SECRET {{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "SECRET" * 100_000,
    ],
    ids=lambda s: s[:30],
)
def test_a_broken_template_is_a_client_error_that_shows_no_source(small, broken):
    error = refused(small, HI, template=broken)
    assert "SECRET" not in error.message and len(error.message) < 300
    assert error.param == "chat_template"


def test_a_broken_template_of_the_model_is_an_error_only_when_used():
    tokenizer = gguf_tokenizer(byte_level_metadata() | {"tokenizer.chat_template": "{% if %}"})
    assert render_chat(tokenizer, HI, template=ROLES) == "[user:hi]"
    assert tokenizer.encode("hi")
    assert "template" in refused(tokenizer, HI).message


def test_a_model_without_a_template_says_so():
    metadata = byte_level_metadata()
    del metadata["tokenizer.chat_template"]
    message = refused(gguf_tokenizer(metadata), HI).message
    assert "no chat template" in message and "/v1/completions" in message and "serve --chat-template" in message


def test_known_extensions_of_templates(small):
    assert render_chat(
        small, HI, template="{% generation %}{{ messages|tojson(indent=2) }}{% endgeneration %}"
    ).startswith("[\n  {")
    assert len(render_chat(small, HI, template="{{ strftime_now('%d %b %Y') }}")) == 11
    assert render_chat(small, HI * 3, template="{% for m in messages %}{% continue %}{% endfor %}x") == "x"


def test_keyword_arguments_reach_the_template(small):
    template = "{{ 'think' if enable_thinking else 'do not' }}{{ documents is none }}"
    assert render_chat(small, HI, template=template, enable_thinking=True) == "thinkTrue"
    assert render_chat(small, HI, template=template) == "do notTrue"
    for name in ("bos_token", "eos_token"):
        assert refused(small, HI, template=template, **{name: "x"}).param == "chat_template_kwargs"


def test_the_last_message_can_be_left_open(small):
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    text = render_chat(small, messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render_chat(small, messages, continue_final_message=True, template="{{ messages[0].content }}")


def test_content_that_spells_template_code_is_text(small):
    for content in ("{{7*7}}", "{% for x in y %}", "{{ messages }}"):
        assert content in render_chat(small, [{"role": "user", "content": content}])


def test_it_is_what_transformers_renders(smollm2, small):
    """Over templates of the kinds in use, the same text as apply_chat_template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = [
        smollm2.chat_template,
        small.chat_template,
        "{% for m in messages %}\n  {%- if m['role'] == 'user' %}\n{{ '[INST] ' + m.content.strip() + ' [/INST]' }}\n"
        "  {%- else %}{{ ' ' ~ m.content|trim ~ eos_token }}{% endif %}\n{%- endfor %}\n",
        "{%- set ns = namespace(last=-1) %}{%- for m in messages[::-1] %}"
        "{%- set i = (messages|length - 1) - loop.index0 %}"
        "{%- if m.role == 'user' and ns.last < 0 %}{%- set ns.last = i %}{%- endif %}{%- endfor %}{{ ns.last }}",
        "{% macro show(m, mark='|') -%}\n<{{ m.role }}>{{ mark }}{{ m.content | upper | replace('\\n', ' ') }}\n"
        "{%- endmacro %}"
        "{% for m in messages %}{{ show(m) }}{{ show(m, mark='!') }}{% endfor %}",
        "{{ messages|tojson }}{{ messages[0]|tojson(indent=4) }}",
        "{{ messages|selectattr('role', 'eq', 'user')|list|length }}",
    ]
    messages = [
        {"role": "system", "content": "Be é <b>brief</b>.\n"},
        {"role": "user", "content": " hi \n there "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "漢字 'quoted' \"twice\""},
    ]
    for template in templates:
        for generation in (True, False):
            [theirs], _ = render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=generation, **small.template_tokens
            )
            assert render_chat(small, messages, template=template, add_generation_prompt=generation) == theirs
