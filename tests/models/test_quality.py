"""Quantised arithmetic costs no more than it may: KL divergence and top-1 agreement with Transformers on SmolLM2.

The bounds are llama.cpp's own figures for this file on such text: 0.0030 nats and 97.1%.
"""

from __future__ import annotations

import pytest

from tests.support.executors import FACTORIES
from tests.support.quality import measure

QUANTISED = [name for name in FACTORIES if name != "reference"]  # the reference computes in float32


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_quality_over_4000_tokens(smollm2_path, name):
    kl, top1 = measure(FACTORIES[name], smollm2_path)
    assert kl <= 0.0030
    assert top1 >= 0.97


@pytest.mark.parametrize("name", QUANTISED)
def test_quality_over_a_few_tokens(smollm2_path, name):
    kl, top1 = measure(FACTORIES[name], smollm2_path, num_tokens=256, window=256)
    assert kl <= 0.0060
    assert top1 >= 0.94
