"""What is counted for /metrics as requests go, in plain numbers.

The event loop is the only writer, and every token is counted, so it must cost next to nothing. How it is shown, with
the engine's own figures, is server/exposition.py. Knows no text and no keys.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from ..core import FinishReason

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts of values at or under each bound."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus's form: (bound, how many at or under it)."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts))]


class Metrics:
    """One server's figures."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # of requests that got a first token
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.time_to_first_token = Histogram(FIRST_TOKEN)
        self.inter_token_latency = Histogram(PER_TOKEN)
        self.request_time_per_output_token = Histogram(PER_TOKEN)
        self.e2e_latency = Histogram(WHOLE)
        self.queue_time = Histogram(WHOLE)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
