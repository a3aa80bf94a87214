"""Real weights: SmolLM2 and Gemma 3 give Transformers' logits on the same file dequantised to float32."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import transformers_oracle
from tests.support.quality import english_tokens
from tests.support.steps import Driver
from tokenmill.backends.cpu.executor import CpuExecutor
from tokenmill.backends.reference import ReferenceExecutor
from tokenmill.models.registry import build_model
from tokenmill.program import Weight, Weights
from tokenmill.quant.formats import numbers
from tokenmill.weights.loader import open_checkpoint


def reference(checkpoint, num_pages: int):
    program = build_model(checkpoint.config, checkpoint.weights).program
    return ReferenceExecutor(program, num_pages=num_pages, kv_dtype=np.float32)


def native(checkpoint, num_pages: int):
    """The CPU backend on the file's numbers as F32 matrices, so that no activation is rounded to 8 bits."""
    plain = {
        name: Weight(name, w.shape, "F32", np.ascontiguousarray(numbers(w)).ravel().view(np.uint8))
        for name, w in ((name, checkpoint.weights[name]) for name in checkpoint.weights)
    }
    program = build_model(checkpoint.config, Weights(plain)).program
    return CpuExecutor(program, num_pages=num_pages, kv_dtype="float32", num_threads=2, max_tokens=1024)


def largest_difference(path, make_executor, num_tokens: int, last: int) -> float:
    """Max abs over the logits of the last tokens, fed as a second chunk; float32 KV on both sides."""
    checkpoint = open_checkpoint(path)
    bos = [checkpoint.config["bos_token_id"]]
    tokens = bos + english_tokens(path, num_tokens - 1)
    num_pages = -(-num_tokens // 16)
    driver = Driver(make_executor(checkpoint, num_pages), num_pages=num_pages)
    driver.step({0: tokens[:-last]}, all_logits=False)
    got = driver.step({0: tokens[-last:]})[0]
    wanted = transformers_oracle.logits(transformers_oracle.load(path), tokens, last=last)
    assert (wanted[:-1].argmax(axis=1) == tokens[1 - last :]).mean() > 0.3, "the oracle itself does not know English"
    return float(np.abs(got - wanted).max())


@pytest.mark.parametrize("make_executor", [reference, native])
def test_smollm2(smollm2_path, make_executor):
    assert largest_difference(smollm2_path, make_executor, 128, last=50) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("make_executor", [reference, native])
def test_gemma3_past_its_window(gemma3_path, make_executor):
    """600 tokens: the window is 512."""
    assert largest_difference(gemma3_path, make_executor, 600, last=60) <= 1e-3
