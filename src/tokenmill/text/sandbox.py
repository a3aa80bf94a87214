"""A Jinja environment for chat templates that come with model files, and so are not trusted.

Jinja's immutable sandbox keeps a template away from Python's internals, but not from the machine: 'A' * 10**10, loops
in loops, a macro that calls itself twice, a list of a list of a list. So every value a template makes - by an operator,
a literal, a filter, a call - is weighed, and every turn of a loop and call of a macro is counted, against one Budget:

    value made     at most `chars` characters, weighed through shared parts    (so no single C call can run long)
    text written   at most 8 x chars, also inside macros and {% set %} blocks
    steps          2 million, and `seconds` of processor time

Knows nothing of messages or tokenizers; text/chat.py does.
"""

from __future__ import annotations

import json
import warnings
from datetime import datetime
from types import BuiltinMethodType

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from markupsafe import escape

from .budget import (
    Budget,
    TemplateComplaint,
    TemplateTooExpensive,
    active,
    check_filter,
    check_format,
    check_method,
    current,
    gather,
    is_wide,
)

# Python's remarks on the code a template compiles to are no news to whoever reads our log.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<template>")


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's part for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # nothing is evaluated while compiling
            finalize=_write,
        )
        self.filters = {name: _metered(name, self.filters[name]) for name in _FILTERS.split()}
        # Nothing is escaped here, so nothing is marked as safe either: prompts are no HTML.
        own = {"tojson": _tojson, "sum": _sum, "join": _join, "safe": str, "e": _escape, "escape": _escape}
        self.filters |= {name: _metered(name, function) for name, function in own.items()}
        self.filters |= {_STEP: _step, _CONCAT: _concat, _MADE: _made}
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, of at most 100,000
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "dict": _Dict(),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        return _Meter().visit(tree)

    def call_binop(self, context, operator, left, right):
        budget = current()
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(text, (str, bytes, list, tuple)):
                    budget.fits(len(text) * times)
            if isinstance(left, int) and isinstance(right, int):
                budget.fits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                budget.fits(left.bit_length() * abs(right) << 4)
        elif operator == "%" and isinstance(left, (str, bytes)):
            check_format(left if isinstance(left, str) else left.decode("latin-1"), "%", (right,))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            budget.fits(len(left) + len(right))
        return budget.weigh(super().call_binop(context, operator, left, right))

    def call(self, context, called, *args, **kwargs):
        budget = current()
        budget.step()
        if isinstance(called, BuiltinMethodType):
            if called.__name__ == "join" and args:
                args = (gather(called.__self__, args[0]),)
            check_method(called, args, kwargs)
        return budget.weigh(super().call(context, called, *args, **kwargs))

    def wrap_str_format(self, value):
        safe_format = super().wrap_str_format(value)
        if safe_format is None:
            return None

        def checked(*args, **kwargs):
            check_format(value.__self__, "{", (*args, *kwargs.values()))
            return safe_format(*args, **kwargs)

        return checked


def render(template: jinja2.Template, variables: dict, budget: Budget) -> str:
    """Raises TemplateTooExpensive, TemplateComplaint, or whatever a faulty template raises."""
    active.budget = budget
    try:
        written, size = [], 0
        for part in template.generate(variables):
            written.append(part)
            size += len(part)
            budget.fits(size)
        return "".join(written)
    finally:
        del active.budget


# ---- the hooks the parsed template is given

_STEP, _CONCAT, _MADE = "count a step", "join texts", "weigh a value"  # names no template can spell


class _Meter:
    """Rewrites a parsed template so that its loops, macros, joins and literals pass through the budget."""

    def visit(self, node):
        for child in list(node.iter_child_nodes()):
            self.visit(child)
        if isinstance(node, nodes.For):
            if node.recursive:
                raise jinja2.TemplateSyntaxError("recursive loops are not available in chat templates", node.lineno)
            node.body.insert(0, self._count(node.body))
        elif isinstance(node, (nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, self._count(node.body))
        for field, value in node.iter_fields():
            if isinstance(value, list):
                setattr(node, field, [self._metered(one) for one in value])
            else:
                setattr(node, field, self._metered(value))
        return node

    def _metered(self, node):
        if isinstance(node, nodes.Concat):
            return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
        if isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)) and getattr(node, "ctx", "load") == "load":
            return node if _is_constant(node) else _filter(node, _MADE)
        return node

    def _count(self, body) -> nodes.ExprStmt:
        """A statement charging the fixed text that one pass through body writes; inner loops count their own again."""
        size = sum(len(data.data) for one in body for data in one.find_all(nodes.TemplateData))
        size += sum(len(one.data) for one in body if isinstance(one, nodes.TemplateData))
        line = body[0].lineno if body else 1
        return nodes.ExprStmt(_filter(nodes.Const(size, lineno=line), _STEP), lineno=line)


def _filter(node, name):
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_constant(node) -> bool:
    return all(
        isinstance(child, (nodes.Const, nodes.TemplateData)) or (isinstance(child, nodes.Pair) and _is_constant(child))
        for child in node.iter_child_nodes()
    )


def _step(cost: int):
    current().step(cost)


def _concat(values: list) -> str:
    budget = current()
    texts = [value if type(value) is str else str(budget.weigh(value)) for value in values]
    budget.fits(sum(map(len, texts)))
    return "".join(texts)


def _made(value):
    return current().weigh(value)


@pass_context  # keeps the compiler from calling it on constants
def _write(context, value):
    budget = current()
    if type(value) is not str:
        value = str(budget.weigh(value))
    budget.step(len(value))
    return value


# ---- filters, methods and globals

_FILTERS = """
abs attr batch capitalize center count d default dictsort first float format groupby indent int items last length list
lower map max min reject rejectattr replace reverse round select selectattr slice sort string title trim truncate unique
upper urlencode wordcount
"""


def _metered(name: str, function):
    """The filter, with its arguments checked before and its result weighed after."""
    takes_context = getattr(function, "jinja_pass_arg", None) is not None

    def metered(*args, **kwargs):
        budget = current()
        budget.step()
        seen = args[1:] if takes_context else args
        check_filter(name, seen, kwargs)
        result = function(*args, **kwargs)
        if name == "list":
            result = list(result)
        return budget.weigh(result)

    if takes_context:
        metered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    if getattr(function, "jinja_async_variant", False):
        metered.jinja_async_variant = function.jinja_async_variant  # type: ignore[attr-defined]
    return metered


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Transformers' own: plain JSON, no HTML escapes."""
    for one in (indent, *(separators or ())):
        if (isinstance(one, int) and one > 64) or (isinstance(one, str) and len(one) > 64):
            raise TemplateTooExpensive("it writes JSON with an indent or separator that is too long")
    if isinstance(value, Undefined):
        raise jinja2.UndefinedError("tojson was given a value that is not defined")
    current().weigh(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _join(value, d="", attribute=None):
    d = str(d)
    if attribute is not None:
        value = [one[attribute] for one in value]
    return d.join(map(str, gather(d, value)))


def _escape(value) -> str:
    return str(escape(str(value)))


def _sum(iterable, attribute=None, start=0):
    total = start
    for value in iterable:
        if attribute is not None:
            value = value[attribute]
        if not isinstance(value, (int, float)) or not isinstance(total, (int, float)):
            raise TypeError("sum adds numbers only")
        total += value
    return total


class _Dict:
    """dict(...) without the attributes of the type."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """A namespace that takes no underscore names, so that none of Python's own can be planted."""

    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _check_name(name)
        Namespace.__setitem__(self, name, current().weigh(value))


def _check_name(name) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a namespace takes no names that begin with an underscore")


def _raise_exception(message):
    raise TemplateComplaint(str(message))


def _strftime_now(format):
    if not isinstance(format, str) or len(format) > 256 or is_wide(format):
        raise TypeError("strftime_now takes a short format")
    return datetime.now().strftime(format)
