"""Pace: how many prompt tokens a step may take while answers are being written, so that they do not wait long for it.

A chunk of a prompt costs little more in small pieces than in large ones once it is some hundred tokens, but everyone
who is being answered waits for the whole step. Steps are measured; the next chunk is what fits into `step_seconds`.
Knows times and counts, nothing of requests.
"""

from __future__ import annotations

SMALLEST_CHUNK = 64  # tokens; below it the weights, which each step reads once, cost too much a token
NEWEST = 0.25  # what the newest step weighs in the average


class Pace:
    def __init__(self, step_seconds: float):
        self.step_seconds = step_seconds
        self._token_seconds = 0.0  # of steps that were mostly prompt; 0 until there was one

    def observe(self, tokens: int, rows: int, seconds: float) -> None:
        """A step of so many tokens for so many requests took so long."""
        if tokens >= max(SMALLEST_CHUNK, 4 * rows):  # else mostly answers: they say nothing of prompts
            newest = seconds / tokens
            self._token_seconds += (newest - self._token_seconds) * (NEWEST if self._token_seconds else 1.0)

    def limit(self, tokens: int) -> int:
        """At most `tokens`, and about what takes step_seconds."""
        if tokens <= SMALLEST_CHUNK or not self._token_seconds:
            return tokens
        return min(tokens, max(SMALLEST_CHUNK, int(self.step_seconds / self._token_seconds)))
