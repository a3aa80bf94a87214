"""/metrics in Prometheus' text form, under vLLM's names, labelled model_name.

Everything is read when somebody scrapes, gauges and the engine's counters from the newest EngineStats, so that none can
freeze at an old value.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .client import EngineClient, EngineState
from .metrics import Metrics

__all__ = ["CONTENT_TYPE_LATEST", "render"]


def render(metrics: Metrics, client: EngineClient, model_name: str) -> bytes:
    registry = CollectorRegistry()
    registry.register(Collector(metrics, client, model_name))  # type: ignore[arg-type]
    return generate_latest(registry)


class Collector:
    """What one scrape shows."""

    def __init__(self, metrics: Metrics, client: EngineClient, model_name: str):
        self.metrics = metrics
        self.client = client
        self.model_name = model_name

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
            ("prompt_tokens", "Prompt tokens of requests that got an answer.", self.metrics.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.metrics.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Sequences preempted.", stats.num_preemptions),
            ("request_rejected", "Requests refused because the queue was full.", self.client.num_rejected),
            ("engine_steps", "Steps the engine ran.", stats.num_steps),
            ("engine_busy_seconds", "Seconds the engine spent in steps.", stats.busy_seconds),
            ("engine_host_cpu_seconds", "CPU seconds of the engine's loop outside steps.", stats.host_cpu_seconds),
            (
                "server_cpu_seconds",
                "CPU seconds of this process: HTTP, templates, tokens to text.",
                time.process_time(),
            ),
            ("engine_restarts", "Times the engine process was started again.", self.client.num_restarts),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self.model_name], value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished sequences.", labels=["finished_reason", "model_name"]
        )
        for reason, count in self.metrics.finished.items():
            finished.add_metric([reason.value, self.model_name], count)
        yield finished

    def _histograms(self) -> Iterator[Metric]:
        metrics = self.metrics
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", metrics.time_to_first_token),
            ("inter_token_latency_seconds", "Between tokens.", metrics.inter_token_latency),
            ("time_per_output_token_seconds", "Between tokens, by its older name.", metrics.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "Mean time between the tokens of a sequence.",
                metrics.request_time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "Arrival to last token.", metrics.e2e_latency),
            ("request_queue_time_seconds", "Arrival to first step.", metrics.queue_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a sequence.", metrics.request_generation_tokens),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self.model_name], buckets=histogram.buckets(), sum_value=histogram.sum)
            yield family
