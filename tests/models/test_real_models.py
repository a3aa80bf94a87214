"""Real weights: SmolLM2 and Gemma 3 give Transformers' logits on the same file dequantised to float32."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import transformers_oracle
from tests.support.quality import english_tokens
from tests.support.steps import Driver
from tokenmill.backends.reference import ReferenceExecutor
from tokenmill.models.registry import build_model
from tokenmill.weights.loader import open_checkpoint


def largest_difference(path, num_tokens: int, last: int) -> float:
    """Max abs over the logits of the last tokens, fed as a second chunk; float32 KV on both sides."""
    checkpoint = open_checkpoint(path)
    bos = [checkpoint.config["bos_token_id"]]
    tokens = bos + english_tokens(path, num_tokens - 1)
    model = build_model(checkpoint.config, checkpoint.weights)
    num_pages = -(-num_tokens // 16)
    executor = ReferenceExecutor(model.program, num_pages=num_pages, kv_dtype=np.float32)
    driver = Driver(executor, num_pages=num_pages)
    driver.step({0: tokens[:-last]}, all_logits=False)
    got = driver.step({0: tokens[-last:]})[0]
    wanted = transformers_oracle.logits(transformers_oracle.load(path), tokens, last=last)
    assert (wanted[:-1].argmax(axis=1) == tokens[1 - last :]).mean() > 0.3, "the oracle itself does not know English"
    return float(np.abs(got - wanted).max())


def test_smollm2(smollm2_path):
    assert largest_difference(smollm2_path, 128, last=50) <= 1e-3


@pytest.mark.slow
def test_gemma3_past_its_window(gemma3_path):
    """600 tokens: the window is 512."""
    assert largest_difference(gemma3_path, 600, last=60) <= 1e-3
