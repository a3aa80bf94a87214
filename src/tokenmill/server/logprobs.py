"""Log-probabilities in the API's three forms: chat's, the legacy completions', and vLLM's prompt_logprobs.

They are the model's own distribution, before temperature and filters, so they are finite. Should a value not be, it is
reported as FLOOR, so that every answer is strict JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..text.output import Candidate, Logprob
from .protocol import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

FLOOR = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def chat_logprobs(entries: Iterable[Logprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                entry.text,
                finite(entry.logprob),
                list(entry.bytes),
                [TopLogprob(other.text, finite(other.logprob), list(other.bytes)) for other in entry.top],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(entries: Sequence[Logprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: None for the first position, then {token id: {logprob, rank, decoded_token}}."""
    return [None if entry is None else _ranked(entry) for entry in entries]


def _ranked(entry: Logprob) -> dict[str, Any]:
    def one(token: Candidate, rank: int) -> dict[str, Any]:
        return {"logprob": finite(token.logprob), "rank": rank, "decoded_token": token.text}

    ranked = {str(other.token_id): one(other, rank) for rank, other in enumerate(entry.top, 1)}
    return ranked | {str(entry.token_id): one(entry, entry.rank)}


class LegacyLogprobs:
    """The four parallel lists, filled as tokens come. text_offset counts from the start of the returned text."""

    def __init__(self) -> None:
        self.base = 0  # characters of the echoed prompt
        self.lists = CompletionLogprobs()

    def add_prompt(self, text: str, first_token: str, entries: Sequence[Logprob | None]) -> None:
        """The echoed prompt: its first token has no probability."""
        self._add(first_token, None, None, 0)
        self.add(entry for entry in entries if entry is not None)
        self.base = len(text)

    def add(self, entries: Iterable[Logprob]) -> None:
        for entry in entries:
            top: dict[str, float] = {}
            for token in (*entry.top, entry):
                top.setdefault(token.text, finite(token.logprob))
            self._add(entry.text, finite(entry.logprob), top, self.base + entry.text_offset)

    def _add(self, text: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self.lists.tokens.append(text)
        self.lists.token_logprobs.append(logprob)
        self.lists.top_logprobs.append(top)
        self.lists.text_offset.append(offset)

    def take(self) -> CompletionLogprobs | None:
        """What was added since the last call; None if nothing was."""
        lists, self.lists = self.lists, CompletionLogprobs()
        return lists if lists.tokens else None
