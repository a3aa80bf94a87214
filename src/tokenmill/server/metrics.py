"""What /metrics shows, under vLLM's names, labelled model_name.

Per-request figures are counted here as requests go, in plain numbers (the event loop is the only writer, and every
token is counted, so it must cost next to nothing); gauges and the engine's counters are read from the newest
EngineStats when somebody scrapes, so that none can freeze at an old value. Knows no text and no keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..core import FinishReason
from .client import EngineClient, EngineState

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
    """One server's figures, and their collector."""

    def __init__(self, client: EngineClient, model_name: str):
        self.client = client
        self.model_name = model_name
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
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        client, stats = self.client, self.client.stats
        # Sequences the engine has not told of yet count as waiting, so that the sum is what is really there.
        running = min(stats.num_running, client.num_live)
        busy_pages = stats.pages_used if client.num_live else 0
        for name, text, value in (
            ("num_requests_running", "Sequences in the engine's batch.", running),
            ("num_requests_waiting", "Sequences waiting to be scheduled.", client.num_live - running),
            ("kv_cache_usage_perc", "KV pages leased by requests, 0 to 1.", busy_pages / max(1, stats.pages_total)),
            ("engine_ready", "1 while the engine takes requests.", int(client.state is EngineState.READY)),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self.model_name], value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        stats = self.client.stats
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that got an answer.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Sequences preempted.", stats.num_preemptions),
            ("request_rejected", "Requests refused because the queue was full.", self.client.num_rejected),
            ("engine_steps", "Steps the engine ran.", stats.num_steps),
            ("engine_busy_seconds", "Seconds the engine spent in steps.", stats.busy_seconds),
            ("engine_restarts", "Times the engine process was started again.", self.client.num_restarts),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self.model_name], value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished sequences.", labels=["finished_reason", "model_name"]
        )
        for reason, count in self.finished.items():
            finished.add_metric([reason.value, self.model_name], count)
        yield finished

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between tokens.", self.inter_token_latency),
            ("time_per_output_token_seconds", "Between tokens, by its older name.", self.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "Mean time between the tokens of a sequence.",
                self.request_time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "Arrival to last token.", self.e2e_latency),
            ("request_queue_time_seconds", "Arrival to first step.", self.queue_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", self.request_prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a sequence.", self.request_generation_tokens),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model_name], buckets=histogram.buckets(), sum_value=histogram.sum)
            yield family
