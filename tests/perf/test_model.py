"""A real model's steps against each other, on one thread: what batching, prompts and context cost beside one token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.steps import Driver
from tokenmill.backends.cpu.executor import CpuExecutor
from tokenmill.models.registry import build_model
from tokenmill.weights.loader import open_checkpoint

from .race import race, timed

NUM_PAGES = 400
STREAMS, PROMPT, LONG = 16, 256, 2048


@pytest.fixture(scope="module")
def driver(smollm2_path) -> Driver:
    checkpoint = open_checkpoint(smollm2_path)
    program = build_model(checkpoint.config, checkpoint.weights).program
    executor = CpuExecutor(program, num_pages=NUM_PAGES, num_threads=1, max_tokens=PROMPT, max_requests=STREAMS)
    return Driver(executor, num_pages=NUM_PAGES)


@pytest.fixture(scope="module")
def seconds(driver):
    """Contestants by name: each is one step, run again and again at the same positions."""
    words = np.random.default_rng(0).integers(0, driver.executor.program.vocab_size, LONG + 1).tolist()
    for stream in range(STREAMS):
        driver.step({stream: words[:128]}, all_logits=False)
    steps = {
        "decode": driver.inputs({0: words[:1]}),
        "decode of 16": driver.inputs({stream: words[:1] for stream in range(STREAMS)}),
        "prompt": driver.inputs({"long": words[:PROMPT]}, all_logits=False),
    }
    for start in range(0, LONG - PROMPT, PROMPT):
        if start:
            driver.step({"long": words[start : start + PROMPT]}, all_logits=False)
        else:
            driver.executor.forward(steps["prompt"])
    steps["prompt after 1792"] = driver.inputs({"long": words[LONG - PROMPT : LONG]}, all_logits=False)
    driver.executor.forward(steps["prompt after 1792"])
    steps["decode after 2048"] = driver.inputs({"long": words[LONG:]})
    return {name: timed(lambda step=step: driver.executor.forward(step)) for name, step in steps.items()}


def test_sixteen_streams_share_each_reading_of_the_weights(seconds):
    assert STREAMS * race(seconds["decode"], seconds["decode of 16"], floor=3 / STREAMS) >= 3


def test_a_prompts_tokens_are_cheaper_still(seconds):
    assert PROMPT * race(seconds["decode"], seconds["prompt"], floor=5 / PROMPT) >= 5


def test_decoding_after_2048_tokens_costs_the_reading_of_their_keys_and_values(seconds):
    """47 MB of them beside 97 MB of weights: 0.67 if each byte costs the same, 0.64 measured, 0.47 if twice as much."""
    assert race(seconds["decode"], seconds["decode after 2048"], floor=0.53) >= 0.53


def test_a_prompt_after_1792_tokens_costs_its_attention(seconds):
    """0.43 measured, 0.27 if attention cost twice as much."""
    assert race(seconds["prompt"], seconds["prompt after 1792"], floor=0.33) >= 0.33
