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
import re
import threading
import time
import warnings
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from markupsafe import escape

# Python's remarks on the code a template compiles to are no news to whoever reads our log.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<template>")

MAX_STEPS = 2_000_000
MAX_WIDTH = 10_000  # of a padded or indented text
MAX_PATTERN = 256  # characters to strip or to search from the right: Python's ways take time by both lengths multiplied
MIN_CHARS = 1 << 21  # of one value, whatever little the template is given
_NESTED = re.compile(r"\{[^}]*\{")  # {:{}}, a width given as an argument
_WIDE = re.compile(r"[0-9]{5}|\*")  # a width or precision in a format string that is too large, or hidden


class TemplateTooExpensive(Exception):
    """The template asked for more than its budget; the message says of what."""


class TemplateComplaint(Exception):
    """The template called raise_exception; the message is its own."""


class Budget:
    """What one rendering of a template over `given` may use. chars: the largest single value, in characters."""

    def __init__(self, given: dict, seconds: float = 1.0):
        self._known: dict[int, int] = {}  # weights of the containers given, by id: nothing in a template changes them
        self.chars = MIN_CHARS + 4 * self._learn(given)
        self.written = 0
        self.steps = 0
        self.deadline = time.thread_time() + seconds

    def step(self, cost: int = 0) -> None:
        self.steps += 1
        self.written += cost
        if self.written > 8 * self.chars:
            raise TemplateTooExpensive("it writes too much text")
        if self.steps > MAX_STEPS or (self.steps & 31 == 0 and time.thread_time() > self.deadline):
            raise TemplateTooExpensive("it runs too long")

    def weigh(self, value):
        """Return value, whose parts, counted as often as they would be printed, must fit."""
        if type(value) is str:
            if len(value) > self.chars:
                raise TemplateTooExpensive("it makes a text that is too long")
            return value
        self.step()
        weight, left, known = 0, [value], self._known
        while left:
            one = left.pop()
            weight += known.get(id(one), 16)
            if isinstance(one, (str, bytes)):
                weight += len(one)
            elif id(one) in known:
                pass
            elif isinstance(one, dict):
                left.extend(one)
                left.extend(one.values())
            elif isinstance(one, (list, tuple, set, frozenset)):
                left.extend(one)
            elif isinstance(one, Namespace):
                left.extend(object.__getattribute__(one, "_Namespace__attrs").values())
            elif isinstance(one, int):
                weight += one.bit_length() >> 1
            if weight > self.chars:
                raise TemplateTooExpensive("it makes a value that is too large")
        return value

    def _learn(self, value) -> int:
        if isinstance(value, str):
            return 16 + len(value)
        if not isinstance(value, (dict, list, tuple)):
            return 16
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        weight = 16 + sum(map(self._learn, parts))
        self._known[id(value)] = weight
        return weight

    def fits(self, chars: int) -> None:
        if chars > self.chars:
            raise TemplateTooExpensive("it makes a text that is too long")


_active = threading.local()


def _budget() -> Budget:
    return _active.budget


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
        budget = _budget()
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
            _check_format(left if isinstance(left, str) else left.decode("latin-1"), "%", (right,))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            budget.fits(len(left) + len(right))
        return budget.weigh(super().call_binop(context, operator, left, right))

    def call(self, context, called, *args, **kwargs):
        budget = _budget()
        budget.step()
        if isinstance(called, BuiltinMethodType):
            if called.__name__ == "join" and args:
                args = (_gather(called.__self__, args[0]),)
            _check_method(called, args, kwargs)
        return budget.weigh(super().call(context, called, *args, **kwargs))

    def wrap_str_format(self, value):
        safe_format = super().wrap_str_format(value)
        if safe_format is None:
            return None

        def checked(*args, **kwargs):
            _check_format(value.__self__, "{", (*args, *kwargs.values()))
            return safe_format(*args, **kwargs)

        return checked


def render(template: jinja2.Template, variables: dict, budget: Budget) -> str:
    """Raises TemplateTooExpensive, TemplateComplaint, or whatever a faulty template raises."""
    _active.budget = budget
    try:
        written, size = [], 0
        for part in template.generate(variables):
            written.append(part)
            size += len(part)
            budget.fits(size)
        return "".join(written)
    finally:
        del _active.budget


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
    _budget().step(cost)


def _concat(values: list) -> str:
    budget = _budget()
    texts = [value if type(value) is str else str(budget.weigh(value)) for value in values]
    budget.fits(sum(map(len, texts)))
    return "".join(texts)


def _made(value):
    return _budget().weigh(value)


@pass_context  # keeps the compiler from calling it on constants
def _write(context, value):
    budget = _budget()
    if type(value) is not str:
        value = str(budget.weigh(value))
    budget.step(len(value))
    return value


# ---- filters, methods and globals

# Texts times texts (translate), codecs that take quadratic time (encode).
_NOT_FOR_TEMPLATES = frozenset({"translate", "maketrans", "encode"})

_FILTERS = """
abs attr batch capitalize center count d default dictsort first float format groupby indent int items last length list
lower map max min reject rejectattr replace reverse round select selectattr slice sort string title trim truncate unique
upper urlencode wordcount
"""


def _metered(name: str, function):
    """The filter, with its arguments checked before and its result weighed after."""
    takes_context = getattr(function, "jinja_pass_arg", None) is not None

    def metered(*args, **kwargs):
        budget = _budget()
        budget.step()
        seen = args[1:] if takes_context else args
        _check_filter(name, seen, kwargs)
        result = function(*args, **kwargs)
        if name == "list":
            result = list(result)
        return budget.weigh(result)

    if takes_context:
        metered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    if getattr(function, "jinja_async_variant", False):
        metered.jinja_async_variant = function.jinja_async_variant  # type: ignore[attr-defined]
    return metered


def _check_filter(name: str, args: tuple, kwargs: dict) -> None:
    if name in ("center", "indent", "batch", "slice", "round"):
        _check_widths((*args[1:], *kwargs.values()))
    if name == "trim":
        _check_pattern((*args[1:], *kwargs.values()))
    elif name == "indent" and args:
        _budget().fits(len(str(args[0])) + str(args[0]).count("\n") * _width(args[1:], kwargs))
    elif name == "replace" and len(args) >= 3:
        _check_replace(str(args[0]), str(args[1]), str(args[2]))
    elif name == "format" and args:
        _check_format(str(args[0]), "%", (*args[1:], *kwargs.values()))
    elif name == "string" and args:
        _budget().weigh(args[0])


def _check_method(method, args: tuple, kwargs: dict) -> None:
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str):
        if name in _NOT_FOR_TEMPLATES:
            raise jinja2.exceptions.SecurityError(f"{name} is not available in chat templates")
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            _check_widths((*args, *kwargs.values()))
            if name == "expandtabs":
                _budget().fits(len(owner) + owner.count("\t") * max((a for a in args if isinstance(a, int)), default=8))
        elif name == "replace" and len(args) >= 2:
            _check_replace(owner, args[0], args[1])
        elif name.endswith("strip") or name in ("rfind", "rindex", "rsplit", "rpartition"):
            _check_pattern((*args, *kwargs.values()))
    elif isinstance(owner, (int, float, bytes)):
        raise jinja2.exceptions.SecurityError(f"{name} of a number is not available in chat templates")


def _width(args: tuple, kwargs: dict) -> int:
    values = [len(a) if isinstance(a, str) else a for a in (*args, *kwargs.values()) if isinstance(a, (int, str))]
    return max(values, default=4)


def _check_widths(values) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateTooExpensive(
                f"it asks for a width of {value}" if abs(value) < 10**12 else "it asks for a width"
            )


def _check_pattern(values) -> None:
    if any(isinstance(value, str) and len(value) > MAX_PATTERN for value in values):
        raise TemplateTooExpensive(f"it searches for more than {MAX_PATTERN} characters from the right")


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, (str, bytes)) and isinstance(old, type(text)) and isinstance(new, type(text)):
        _budget().fits(len(text) + text.count(old) * len(new))  # type: ignore[arg-type]


def _gather(separator, values) -> list:
    """What is to be joined, as a list, counted as it comes: it may be lazy."""
    budget = _budget()
    gathered, size, between = [], 0, len(separator)
    for value in values:
        size += between + (len(value) if isinstance(value, (str, bytes)) else len(str(budget.weigh(value))))
        budget.fits(size)
        gathered.append(value)
    return gathered


def _check_format(text: str, sign: str, args: tuple) -> None:
    if _WIDE.search(text) or (sign == "{" and _NESTED.search(text.replace("{{", "").replace("}}", ""))):
        raise TemplateTooExpensive("it formats with a width that is too large")
    budget = _budget()
    size = sum(len(one) if isinstance(one, (str, bytes)) else len(str(budget.weigh(one))) for one in args)
    budget.fits(len(text) + text.count(sign) * size)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Transformers' own: plain JSON, no HTML escapes."""
    for one in (indent, *(separators or ())):
        if (isinstance(one, int) and one > 64) or (isinstance(one, str) and len(one) > 64):
            raise TemplateTooExpensive("it writes JSON with an indent or separator that is too long")
    if isinstance(value, Undefined):
        raise jinja2.UndefinedError("tojson was given a value that is not defined")
    _budget().weigh(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _join(value, d="", attribute=None):
    d = str(d)
    if attribute is not None:
        value = [one[attribute] for one in value]
    return d.join(map(str, _gather(d, value)))


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
        Namespace.__setitem__(self, name, _budget().weigh(value))


def _check_name(name) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a namespace takes no names that begin with an underscore")


def _raise_exception(message):
    raise TemplateComplaint(str(message))


def _strftime_now(format):
    if not isinstance(format, str) or len(format) > 256 or _WIDE.search(format):
        raise TypeError("strftime_now takes a short format")
    return datetime.now().strftime(format)
