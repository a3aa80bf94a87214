"""What a chat template may use: weights of values, steps, and the operations that could run away checked beforehand.

text/sandbox.py calls these around everything a template does; they raise TemplateTooExpensive. The limits are chosen so
that any single operation on values that passed takes well under a second.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_STEPS = 2_000_000
MAX_WIDTH = 10_000  # of a padded or indented text
MAX_PATTERN = 256  # characters to strip or to search from the right: Python's ways take time by both lengths multiplied
MIN_CHARS = 1 << 21  # of one value, whatever little the template is given
_NESTED = re.compile(r"\{[^}]*\{")  # {:{}}, a width given as an argument
_WIDE = re.compile(r"[0-9]{5}|\*")  # a width or precision in a format string that is too large, or hidden

_NOT_FOR_TEMPLATES = frozenset({"translate", "maketrans", "encode"})  # texts times texts; codecs in quadratic time


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


active = threading.local()


def current() -> Budget:
    """The budget of the template that this thread renders."""
    return active.budget


def check_filter(name: str, args: tuple, kwargs: dict) -> None:
    if name in ("center", "indent", "batch", "slice", "round"):
        _check_widths((*args[1:], *kwargs.values()))
    if name == "trim":
        _check_pattern((*args[1:], *kwargs.values()))
    elif name == "indent" and args:
        current().fits(len(str(args[0])) + str(args[0]).count("\n") * _width(args[1:], kwargs))
    elif name == "replace" and len(args) >= 3:
        _check_replace(str(args[0]), str(args[1]), str(args[2]))
    elif name == "format" and args:
        check_format(str(args[0]), "%", (*args[1:], *kwargs.values()))
    elif name == "string" and args:
        current().weigh(args[0])


def check_method(method, args: tuple, kwargs: dict) -> None:
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str):
        if name in _NOT_FOR_TEMPLATES:
            raise SecurityError(f"{name} is not available in chat templates")
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            _check_widths((*args, *kwargs.values()))
            if name == "expandtabs":
                current().fits(len(owner) + owner.count("\t") * max((a for a in args if isinstance(a, int)), default=8))
        elif name == "replace" and len(args) >= 2:
            _check_replace(owner, args[0], args[1])
        elif name.endswith("strip") or name in ("rfind", "rindex", "rsplit", "rpartition"):
            _check_pattern((*args, *kwargs.values()))
    elif isinstance(owner, (int, float, bytes)):
        raise SecurityError(f"{name} of a number is not available in chat templates")


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
        current().fits(len(text) + text.count(old) * len(new))  # type: ignore[arg-type]


def gather(separator, values) -> list:
    """What is to be joined, as a list, counted as it comes: it may be lazy."""
    budget = current()
    gathered, size, between = [], 0, len(separator)
    for value in values:
        size += between + (len(value) if isinstance(value, (str, bytes)) else len(str(budget.weigh(value))))
        budget.fits(size)
        gathered.append(value)
    return gathered


def is_wide(text: str) -> bool:
    """Whether a format string asks for a width that is too large, or hides it."""
    return _WIDE.search(text) is not None


def check_format(text: str, sign: str, args: tuple) -> None:
    if is_wide(text) or (sign == "{" and _NESTED.search(text.replace("{{", "").replace("}}", ""))):
        raise TemplateTooExpensive("it formats with a width that is too large")
    budget = current()
    size = sum(len(one) if isinstance(one, (str, bytes)) else len(str(budget.weigh(one))) for one in args)
    budget.fits(len(text) + text.count(sign) * size)
