"""What /metrics shows, under vLLM's names, labelled model_name.

Per-request figures are observed here as requests go; gauges and the engine's counters are read from the newest
EngineStats when somebody scrapes, so that none can freeze at an old value. Knows no text and no keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..core import FinishReason
from .client import EngineClient, EngineState

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class EngineCollector:
    """Gauges and counters of the engine, as they are at the scrape."""

    def __init__(self, client: EngineClient, model_name: str):
        self.client = client
        self.model_name = model_name

    def collect(self) -> Iterator[Metric]:
        client, stats = self.client, self.client.stats
        # Sequences the engine has not told of yet count as waiting, so that the sum is what is really there.
        running = min(stats.num_running, client.num_live)
        gauges = {
            "num_requests_running": ("Sequences in the engine's batch.", running),
            "num_requests_waiting": ("Sequences waiting to be scheduled.", client.num_live - running),
            "kv_cache_usage_perc": (
                "KV pages leased by live requests, 0 to 1.",
                stats.pages_used / stats.pages_total if stats.pages_total and client.num_live else 0.0,
            ),
            "engine_ready": ("1 while the engine takes requests.", int(client.state is EngineState.READY)),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            "num_preemptions": ("Sequences preempted.", stats.num_preemptions),
            "engine_steps": ("Steps the engine ran.", stats.num_steps),
            "engine_busy_seconds": ("Seconds the engine spent in steps.", stats.busy_seconds),
            "engine_restarts": ("Times the engine process was started again.", client.num_restarts),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self.model_name], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self.model_name], value)
            yield counter


class Renamed:
    """A metric under a second name: vLLM's dashboards know the time between tokens by two."""

    def __init__(self, metric: Any, name: str):
        self.metric = metric
        self.name = name

    def collect(self) -> Iterator[Metric]:
        for found in self.metric.collect():
            copy = Metric(self.name, found.documentation, found.type)
            for sample in found.samples:
                copy.samples.append(sample._replace(name=self.name + sample.name.removeprefix(found.name)))
            yield copy


class Metrics:
    """One server's. Observing is cheap: the labelled children are made once."""

    def __init__(self, client: EngineClient, model_name: str):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(client, model_name))  # type: ignore[arg-type]

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name"], registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *, also: str | None = None) -> Histogram:
            made = Histogram(f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            if also is not None:
                self.registry.register(Renamed(made, f"vllm:{also}"))  # type: ignore[arg-type]
            return made.labels(model_name)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got an answer.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.rejected = counter("request_rejected", "Requests refused because the queue was full.")
        finished = Counter(
            "vllm:request_success", "Finished sequences.", ["model_name", "finished_reason"], registry=self.registry
        )
        self.finished = {reason: finished.labels(model_name, reason.value) for reason in FinishReason}
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN)
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between tokens.", PER_TOKEN, also="time_per_output_token_seconds"
        )
        self.request_time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between a sequence's tokens.", PER_TOKEN
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to last token.", WHOLE)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to first step.", WHOLE)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a sequence.", TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens it generated.", TOKENS)

    def render(self) -> bytes:
        return generate_latest(self.registry)
