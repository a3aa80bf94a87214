"""Stop strings across token borders.

    text so far    ...released | held
                               ^ the first place where a stop string is found or may still become one

The match that begins first in the text wins, and of those that begin together the shortest, as a search over the whole
text would find; so the answer does not depend on how tokens cut the text. Held back is only what may still become a
match. Knows nothing of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class StopMatch:
    stop: str
    start: int  # in characters from the start of all text pushed
    end: int


class StopMatcher:
    """match is set once, and then nothing more is released."""

    __slots__ = ("_find", "_firsts", "_held", "_longest", "_offset", "_stops", "include_stop", "match")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False):
        self._stops = tuple(sorted({stop for stop in stops if stop}, key=len))
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._find = re.compile("|".join(map(re.escape, self._stops)) if self._stops else r"(?!)").search
        self._held = ""
        self._offset = 0  # characters before _held
        self.include_stop = include_stop
        self.match: StopMatch | None = None

    @property
    def complete_but_waiting(self) -> bool:
        """A stop string is complete in the held text, but an earlier one may still become so."""
        return self.match is None and self._find(self._held) is not None

    def push(self, text: str) -> str:
        """The text that is now safe to release."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found = self._find(held)
        limit = found.start() if found else len(held)
        start = self._open_from(held, limit)
        if found is not None and start == limit:
            return self._matched(held, found)
        self._held = held[start:]
        self._offset += start
        return held[:start]

    def flush(self) -> str:
        """The reply has ended: what was held is released, up to a match that was waiting for an earlier one."""
        if self.match is not None:
            return ""
        held, self._held = self._held, ""
        found = self._find(held)
        if found is not None:
            return self._matched(held, found)
        self._offset += len(held)
        return held

    def pass_through(self, text: str) -> str:
        """Text that may be no part of a match (min_tokens is not reached); what was held goes out with it."""
        out = self._held + text
        self._held = ""
        self._offset += len(out)
        return out

    def _open_from(self, held: str, limit: int) -> int:
        """The first position before limit from which held, to its end, is the beginning of a stop string; or limit."""
        for start in range(max(0, len(held) - self._longest + 1), limit):
            if held[start] in self._firsts:
                rest = held[start:]
                for stop in self._stops:
                    if stop.startswith(rest):
                        return start
        return limit

    def _matched(self, held: str, found: re.Match[str]) -> str:
        self.match = StopMatch(found.group(), self._offset + found.start(), self._offset + found.end())
        self._held = ""
        return held[: found.end() if self.include_stop else found.start()]
