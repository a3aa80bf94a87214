"""Percentiles, medians, goodput and cost: checked against numpy and by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.bench.stats import Sample, cost_per_million, median, medians, percentile, summarise

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(values, st.floats(0, 100))
def test_percentile_is_numpys(numbers, percent):
    assert percentile(numbers, percent) == pytest.approx(np.percentile(numbers, percent), abs=1e-6)


def test_nothing_has_no_percentile():
    assert percentile([], 50) is None
    assert median([None, None]) is None
    assert median([None, 3.0, 5.0]) == 4.0


def sample(sent=0.0, times=(1.0, 1.5, 2.5), output=3, **kwargs):
    return Sample(sent=sent, token_times=list(times), finished=times[-1], output_tokens=output, **kwargs)


def test_latencies_of_one_request():
    s = sample(sent=0.25)
    assert s.ttft == 0.75
    assert s.gaps == [0.5, 1.0]
    assert s.tpot == 0.75  # (2.5 - 1.0) over the two tokens after the first


def test_tpot_counts_tokens_not_chunks():
    """A server may send several tokens in one chunk."""
    assert sample(output=7).tpot == 0.25


def test_a_request_meets_its_slo_only_when_every_limit_holds():
    s = sample()
    assert s.meets(None, None) and s.meets(1.0, 1.0)
    assert not s.meets(0.9, None)
    assert not s.meets(None, 0.9)
    assert not sample(error="HTTP 500").meets(None, None)
    assert not Sample(sent=0.0).meets(None, None)


def test_summary_of_a_round():
    figures = summarise(
        [sample(prompt_tokens=10, cached_tokens=4), sample(times=(3.0, 4.0), output=2), sample(error="HTTP 500: no")],
        wall=10.0,
        slo_ttft=2.0,
        price_per_hour=3.6,
    )
    assert figures["requests"] == 3 and figures["errors"] == 1
    assert figures["output_tokens"] == 5 and figures["output_tokens_per_s"] == 0.5
    assert figures["total_tokens_per_s"] == 1.5
    assert figures["ttft_p50_ms"] == 2000.0
    assert figures["goodput_requests_per_s"] == 0.1 and figures["goodput_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert figures["goodput_tokens_per_s"] == 0.3
    assert figures["cost_per_million_output_tokens"] == 2000.0  # 0.001 a second, half a token a second
    assert figures["cached_tokens"] == 4
    assert figures["error_samples"] == ["HTTP 500: no"]


def test_a_round_of_failures_divides_by_nothing():
    figures = summarise([sample(error="refused")], wall=1.0, slo_itl=0.1, price_per_hour=1.0)
    assert figures["output_tokens_per_s"] == 0 and figures["goodput_share"] == 0
    assert figures["cost_per_million_output_tokens"] is None and figures["ttft_p50_ms"] is None


def test_cost():
    assert cost_per_million(1_000_000, 3600, 0.5) == 0.5
    assert cost_per_million(0, 3600, 0.5) is None


def test_medians_over_rounds():
    rows = [{"a": 1, "t": [1.0, 9.0], "e": ["x"]}, {"a": 5, "t": [3.0, 7.0]}, {"a": 2, "t": [2.0, 8.0], "n": None}]
    assert medians(rows) == {"a": 2, "t": [2.0, 8.0], "e": ["x"], "n": None}
    assert isinstance(medians(rows)["a"], int) and medians([{"a": 1}, {"a": 2}]) == {"a": 1.5}
