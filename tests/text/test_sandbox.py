"""A chat template from a model file is hostile until it has ended: bounded in time and size, and shut in."""

from __future__ import annotations

import threading
import time

import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.text.chat import render_chat
from tokenmill.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hello"}]


class NoWords:
    size = 0
    special: frozenset[int] = frozenset()
    strips_leading_space = False


def render(template: str, messages=USER, **kwargs) -> str:
    return render_chat(Tokenizer(NoWords()), messages, template=template, **kwargs)


def doubling(line: str, times: int = 60) -> str:
    return "{% set a = 'A' %}" + line * times


TOO_EXPENSIVE = {
    "text times a number": "{{ 'A' * 10**9 }}",
    "a number times text": "{{ 10**9 * 'A' }}",
    "text times a variable": "{% set n = 1000000000 %}{{ 'A' * n }}",
    "list times a number": "{{ [1] * 10**9 }}",
    "tuple times a number": "{{ ((1,) * 10**9)|length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of power": "{% set n = 9 %}{{ n ** (n ** n) ** n }}",
    "two loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "two loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "two loops with a filter": "{% for i in range(99999) %}{% for j in range(99999) if 0 %}{% endfor %}{% endfor %}",
    "a loop that writes much": "{% for i in range(99999) %}" + "x" * 10000 + "{% endfor %}",
    "much in a set block": "{% set t %}{% for i in range(99999) %}"
    + "x" * 10000
    + "{% endfor %}{% endset %}{{ t|length }}",
    "doubling by +": doubling("{% set a = a + a %}") + "{{ a|length }}",
    "doubling by ~": doubling("{% set a = a ~ a %}") + "{{ a|length }}",
    "doubling in a set block": doubling("{% set a %}{{ a }}{{ a }}{% endset %}"),
    "doubling by replace": doubling("{% set a = a|replace('A', 'AAAAAAAA') %}") + "{{ a|length }}",
    "doubling by the method": doubling("{% set a = a.replace('A', 'AAAAAAAA') %}") + "{{ a|length }}",
    "doubling by join": doubling("{% set a = [a, a]|join %}") + "{{ a|length }}",
    "doubling by the join method": doubling("{% set a = ''.join([a, a]) %}") + "{{ a|length }}",
    "doubling by format": doubling("{% set a = '%s%s' % (a, a) %}") + "{{ a|length }}",
    "doubling by the format filter": doubling("{% set a = '%s%s'|format(a, a) %}") + "{{ a|length }}",
    "doubling by the format method": doubling("{% set a = '{0}{0}{0}'.format(a) %}") + "{{ a|length }}",
    "doubling by escape": doubling("{% set a = ('&' ~ a)|e|string %}{% set a = a ~ a %}"),
    "a list of lists": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "a list of lists as text": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a|string|length }}",
    "a list of lists as JSON": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a|tojson|length }}",
    "two lists of lists compared": "{% set a = [1] %}{% set b = [1] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ a == b }}",
    "a dict of dicts": "{% set a = {} %}" + "{% set a = {'x': a, 'y': a} %}" * 60 + "{{ a }}",
    "dicts by call": "{% set a = {} %}" + "{% set a = dict(x=a, y=a) %}" * 60 + "{{ a }}",
    "namespaces": "{% set a = namespace(x=1) %}" + "{% set a = namespace(x=a, y=a) %}" * 60 + "{{ a }}",
    "a namespace assigned": "{% set n = namespace(x=[1]) %}" + "{% set n.x = [n.x, n.x] %}" * 60 + "{{ n.x }}",
    "doubling a list by +": "{% set a = [1] %}" + "{% set a = a + a %}" * 60,
    "a macro that calls itself": "{% macro f() %}x{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "a caller that calls itself": "{% macro f(n) %}{{ caller() }}{% if n %}{% call f(n - 1) %}x{% endcall %}"
    "{% call f(n - 1) %}x{% endcall %}{% endif %}{% endmacro %}{% call f(90) %}x{% endcall %}",
    "center": "{{ 'a'|center(10**9) }}",
    "center with a literal": "{{ 'a'|center(1000000000) }}",
    "indent": "{{ 'a\nb'|indent(1000000000) }}",
    "indent by a text": "{{ ('a\n' * 100000)|indent('x' * 100000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "rjust": "{{ 'a'.rjust(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ 'a\tb'.expandtabs(1000000000) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide format by star": "{{ '%*d' % (1000000000, 1) }}",
    "a wide format filter": "{{ '%1000000000d'|format(1) }}",
    "a wide format method": "{{ '{:1000000000}'.format(1) }}",
    "a nested wide format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a precise format": "{{ '%.1000000000f' % 1.5 }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(1000000000, 'x')|list }}",
    "JSON indent": "{{ [1]|tojson(indent=1000000000) }}",
    "JSON separators": "{{ range(99999)|list|tojson(separators=('x' * 100000, ':')) }}",
    "join with a long separator": "{{ range(99999)|join('x' * 100000) }}",
    "join of many long texts": "{% set a = 'x' * 100000 %}{{ range(99999)|map('replace', '1', a)|join }}",
    "the join method of lazy texts": "{% set a = 'x' * 100000 %}{{ ''.join(range(99999)|map('replace', '1', a)) }}",
    "sum of lists": "{{ range(99999)|map('string')|map('list')|sum(start=[])|length }}",
    "a range past the sandbox's": "{{ range(1000000000)|list }}",
    "a list of a long text": "{{ ('x' * 2000000)|list|length }}",
    "a search from the right": "{{ ('a' * 2000000).rfind('ab' + 'a' * 999998) }}",
    "a split from the right": "{{ ('a' * 2000000).rsplit('ab' + 'a' * 999998)|length }}",
    "stripping many characters": "{{ ('a' * 2000000).strip('b' * 999999 + 'a') }}",
    "the trim filter with many": "{{ ('a' * 2000000)|trim('b' * 999999 + 'a') }}",
    "a lazy filter run twice": "{{ range(99999)|map('center', 9999)|join|length }}",
}


@pytest.mark.parametrize("name", TOO_EXPENSIVE)
def test_a_template_that_asks_for_too_much_is_stopped(name):
    started = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        render(TOO_EXPENSIVE[name])
    assert caught.value.status == 400
    assert caught.value.param == "chat_template"
    assert len(caught.value.message) < 300
    assert time.process_time() - started < 3


ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by item": "{{ ''['__class__'] }}{{ ''['__class__'].mro() }}",
    "class by filter": "{{ ''|attr('__class__')|attr('mro') }}",
    "class by format": "{{ '{0.__class__}'.format(1) }}",
    "class by format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a class": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of the namespace": "{{ namespace.__init__.__globals__ }}",
    "the dict type": "{{ dict.mro() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends 'x' %}",
    "lipsum": "{{ lipsum.__globals__ }}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
    "a planted name": "{% set n = namespace(__class__='x') %}",
    "a planted name, assigned": "{% set n = namespace() %}{% set n.__class__ = 'x' %}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "a slow codec": "{{ ('é' * 2000000).encode('punycode') }}",
    "translating": "{{ ('a' * 2000000).translate({97: 'x' * 2000000}) }}",
    "a frame": "{{ (messages|map('upper')).gi_frame.f_back.f_globals }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_of_python_can_be_reached(name):
    try:
        shown = render(ESCAPES[name])
    except InvalidRequest as error:
        assert error.status == 400
        shown = error.message
    else:
        assert shown == ""  # what may not be touched is undefined, and undefined prints nothing
    assert "<class" not in shown and "root:" not in shown and "uid=" not in shown


def test_a_template_cannot_change_what_the_next_one_sees():
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(InvalidRequest):
        render("{{ messages[0].pop('role') }}", messages)
    assert messages == [{"role": "user", "content": "hello"}]


def test_content_is_never_evaluated():
    for text in ("{{7*7}}", "{% raw %}", "{{ raise_exception('x') }}", "{# c #}", "%s %d {0} {a}"):
        assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_a_long_conversation_is_not_too_much():
    template = "{% for m in messages %}{{ '<|' ~ m.role + '|>' + m.content|trim }}\n{% endfor %}"
    messages = [{"role": "user", "content": "word " * 200} for _ in range(5000)]
    assert len(render(template, messages)) > 5_000_000


def test_messages_gathered_one_by_one_are_not_too_much():
    """A list that grows by a message each turn is looked at again each time; the messages in it are not."""
    template = (
        "{% set ns = namespace(kept=[]) %}{% for m in messages %}{% set ns.kept = ns.kept + [m] %}{% endfor %}"
        "{{ ns.kept|length }}"
    )
    calls = [{"function": {"name": "f", "arguments": {str(i): i for i in range(20)}}}]
    messages = [{"role": "assistant", "content": "x", "tool_calls": calls} for _ in range(500)]
    assert render(template, messages) == "500"


def test_text_grows_with_what_is_given():
    """A quoted copy of a long content is no attack."""
    content = "x" * 3_000_000
    assert (
        len(render("{{ messages[0].content + messages[0].content }}", [{"role": "user", "content": content}]))
        == 6_000_000
    )


def test_other_threads_render_while_one_is_stopped():
    done = []

    def hostile():
        with pytest.raises(InvalidRequest):
            render(TOO_EXPENSIVE["two loops"])
        done.append("hostile")

    thread = threading.Thread(target=hostile)
    thread.start()
    for _ in range(20):
        assert render("{{ messages[0].content }}") == "hello"
    assert "hostile" not in done
    thread.join()
    assert done == ["hostile"]


def test_what_templates_really_use():
    assert render("{{ messages|tojson(indent=2) }}") == '[\n  {\n    "role": "user",\n    "content": "hello"\n  }\n]'
    assert render("{{ {'a': '<é>'}|tojson }}") == '{"a": "<é>"}'
    assert render("{% for m in messages[::-1] %}{{ loop.index0 }}{% break %}{% endfor %}") == "0"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert render("{{ messages|map(attribute='role')|join(', ') }}") == "user"
    assert render("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}") == "1"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{{ 'a, b'.split(', ')[-1].upper() }}{{ '%s-%d' % ('x', 3) }}{{ '{}'.format(4) }}") == "Bx-34"
    assert render("{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, b=3) }}") == "1213"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hello!"
    assert render("a{# note #}\n{%- if true -%}\n b {%- endif %}") == "ab"
    assert (
        render("{{ messages[0].missing is defined }}{{ messages[0].get('x', 'd') }}{{ messages[0].missing or '' }}")
        == "Falsed"
    )
    assert render("{{ dict(a=1)|items|list }}{{ {'b': 1}.items()|list }}") == "[('a', 1)][('b', 1)]"
    assert render("{{ 'x' * 3 ~ 4 ~ none ~ [1] }}") == "xxx4None[1]"
    assert render("{% filter upper %}abc{% endfilter %}{% set x %}y{% endset %}{{ x }}") == "ABCy"
    assert (
        render("{{ ['a', 'b']|join('-') }}{{ '-'.join(['c', 'd']) }}{{ [1, 2]|sum }}{{ '<'|e }}{{ 'q'|safe }}")
        == "a-bc-d3&lt;q"
    )


def test_the_templates_own_words_are_the_message():
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('Conversation roles must alternate') }}")
    assert caught.value.message == "Conversation roles must alternate"
    assert caught.value.param == "messages"


def test_an_ordinary_prompt_takes_a_fraction_of_a_millisecond():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    render(template)
    started = time.process_time()
    for _ in range(200):
        render(template)
    assert (time.process_time() - started) / 200 < 0.001
