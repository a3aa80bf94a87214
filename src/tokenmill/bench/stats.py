"""The arithmetic of a benchmark: percentiles, medians, goodput, cost. Numbers in, numbers out; no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Linear between the two nearest ranks (numpy's default), a float; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (rank - low))


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    return percentile([v for v in values if v is not None], 50)


def cost_per_million(tokens: int, seconds: float, price_per_hour: float) -> float | None:
    """What a million tokens cost when `tokens` took `seconds` of a machine at `price_per_hour`; same currency."""
    return None if not tokens else price_per_hour * seconds / 3600 / tokens * 1e6


@dataclass(slots=True)
class Sample:
    """One request as the client saw it. Times are seconds on one monotonic clock."""

    sent: float
    token_times: list[float] = field(default_factory=list)  # when each content chunk arrived
    finished: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None
    turn: int = 0

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: the time between one content chunk and the next."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:])]

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first."""
        if self.output_tokens < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    def meets(self, slo_ttft: float | None, slo_itl: float | None) -> bool:
        """Whether it finished, its first token came in time and so did 99% of the others. Limits in seconds."""
        if self.error is not None or self.ttft is None:
            return False
        late = percentile(self.gaps, 99) or 0.0
        return (slo_ttft is None or self.ttft <= slo_ttft) and (slo_itl is None or late <= slo_itl)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


def summarise(
    samples: Sequence[Sample],
    wall: float,
    *,
    slo_ttft: float | None = None,
    slo_itl: float | None = None,
    price_per_hour: float | None = None,
) -> dict:
    """One round's figures: latencies in milliseconds, rates per second of `wall`."""
    done = [s for s in samples if s.error is None]
    output = sum(s.output_tokens for s in done)
    prompt = sum(s.prompt_tokens for s in done)
    gaps = [gap for s in done for gap in s.gaps]
    figures: dict = {
        "requests": len(samples),
        "errors": len(samples) - len(done),
        "wall_s": round(wall, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": round(output / wall, 2),
        "total_tokens_per_s": round((prompt + output) / wall, 2),
        "requests_per_s": round(len(done) / wall, 3),
    }
    for name, values in (
        ("ttft", [s.ttft for s in done]),
        ("itl", gaps),
        ("tpot", [s.tpot for s in done]),
        ("e2e", [s.finished - s.sent for s in done]),
    ):
        there = [v for v in values if v is not None]
        figures[f"{name}_p50_ms"] = _ms(percentile(there, 50))
        figures[f"{name}_p99_ms"] = _ms(percentile(there, 99))
    cached = [s.cached_tokens for s in done if s.cached_tokens is not None]
    if cached:
        figures["cached_tokens"] = sum(cached)
    if slo_ttft is not None or slo_itl is not None:
        good = [s for s in samples if s.meets(slo_ttft, slo_itl)]
        figures["goodput_requests_per_s"] = round(len(good) / wall, 3)
        figures["goodput_share"] = round(len(good) / len(samples), 4) if samples else None
        figures["goodput_tokens_per_s"] = round(sum(s.output_tokens for s in good) / wall, 2)
    if price_per_hour is not None:
        cost = cost_per_million(output, wall, price_per_hour)
        figures["cost_per_million_output_tokens"] = None if cost is None else round(cost, 4)
    turns = sorted({s.turn for s in done})
    if len(turns) > 1:
        figures["ttft_ms_by_turn"] = [_ms(median(s.ttft for s in done if s.turn == turn)) for turn in turns]
    errors = sorted({s.error for s in samples if s.error})
    if errors:
        figures["error_samples"] = errors[:3]
    return figures


def medians(rounds: Sequence[dict]) -> dict:
    """The median of every figure over rounds; lists element by element; texts of the first round that has them."""
    result: dict = {}
    for key in dict.fromkeys(key for figures in rounds for key in figures):
        values = [figures[key] for figures in rounds if figures.get(key) is not None]
        if not values:
            result[key] = None
        elif all(isinstance(v, int | float) for v in values):
            middle = median(values)
            whole = all(isinstance(v, int) for v in values) and middle is not None and middle.is_integer()
            result[key] = int(middle) if whole and middle is not None else middle
        elif all(isinstance(v, list) and v and isinstance(v[0], int | float | None) for v in values):
            result[key] = [median(column) for column in zip(*values)]
        else:
            result[key] = values[0]
    return result
