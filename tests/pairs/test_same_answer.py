"""Rule 1: a request's tokens and logprobs are the same to the bit, whatever the company it keeps.

Seven requests that use the engine in seven ways, first each alone in an engine of its own; then again under every
circumstance of the table, all compared with `==`. Models: tiny random ones whose matrices cover the packed layouts and
whose attention covers window, q/k norms and ragged head sizes; and SmolLM2.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support import checkpoints
from tests.support.drive import Ask, drive
from tokenmill.backends.cpu.executor import CpuExecutor
from tokenmill.core import SamplingParams
from tokenmill.models.registry import build_model
from tokenmill.weights.loader import open_checkpoint

NUM_PAGES = 96
LIMITS = dict(num_pages=NUM_PAGES, max_tokens=512, max_requests=40, max_logit_rows=104)
MODELS = {
    "llama Q4_1 head Q8_0": ("llama", lambda name: "Q8_0" if "output.w" in name else "Q4_1", {}),
    "qwen3 Q4_K": ("qwen3", "Q4_K", dict(hidden_size=256, intermediate_size=256, num_attention_heads=8)),
    "gemma3 F16 windowed": ("gemma3", "F16", {}),
    "qwen2 Q6_K and Q5_0": (
        "qwen2",
        lambda name: "Q5_0" if "ffn" in name else "Q6_K",
        dict(hidden_size=256, intermediate_size=256, num_attention_heads=16, num_key_value_heads=1),
    ),
}


def asks(vocab: int, scale: int = 1) -> list[Ask]:
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab) for _ in range(40 * scale)]

    def prompt(n: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(n)]

    return [
        Ask(prompt(1), SamplingParams(temperature=0, max_tokens=20, logprobs=3)),
        Ask(shared + prompt(9), SamplingParams(temperature=0, max_tokens=12, logprobs=0)),
        Ask(shared + prompt(30 * scale), SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=16, logprobs=5)),
        Ask(prompt(17), SamplingParams(temperature=1.3, top_k=40, min_p=0.01, seed=2**40, max_tokens=24, n=3)),
        Ask(
            prompt(33),
            SamplingParams(
                temperature=0.7,
                repetition_penalty=1.2,
                frequency_penalty=0.5,
                presence_penalty=0.3,
                seed=1,
                max_tokens=20,
                logprobs=2,
            ),
        ),
        Ask(prompt(70 * scale), SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2, logprobs=1)),
        Ask(
            prompt(15),
            SamplingParams(
                temperature=1, typical_p=0.8, seed=3, max_tokens=18, min_tokens=4, logit_bias={5: 4.0, 6: -100.0}
            ),
            eos=[2],
            bad_words=[[7], [8, 9]],
        ),
    ]


def answers_of(run, which: int) -> dict:
    return {index: answer for (ask, index), answer in run.answers().items() if ask == which}


@pytest.fixture(scope="module", params=[*MODELS, "smollm2"])
def world(request, tmp_path_factory):
    """(factory of executors, the requests, the answer of each alone)."""
    if request.param == "smollm2":
        path, scale = request.getfixturevalue("smollm2_path"), 3
    else:
        family, format, overrides = MODELS[request.param]
        path, scale = tmp_path_factory.mktemp("model") / "m.gguf", 1
        checkpoints.gguf_file(path, family, format=format, **overrides)
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, checkpoint.weights)
    executors = {threads: CpuExecutor(model.program, num_threads=threads, **LIMITS) for threads in (1, 2)}
    requests = asks(model.vocab_size, scale)
    alone = [drive(executors[2], [ask], num_pages=NUM_PAGES, budget=512) for ask in requests]
    return executors, requests, [answers_of(run, 0) for run in alone]


CIRCUMSTANCES = {
    "alone, one thread": dict(threads=1, alone=True),
    "alone, chunks of 1": dict(budget=1, alone=True),
    "alone, chunks of 7": dict(budget=7, alone=True),
    "alone, chunks of 16": dict(budget=16, alone=True),
    "alone, chunks of 64": dict(budget=64, alone=True),
    "alone, not overlapped, no prefix cache": dict(overlap=False, caching=False, alone=True),
    "pairs": dict(max_num_seqs=2),
    "seven at once": dict(max_num_seqs=16),
    "seven at once, one thread": dict(max_num_seqs=16, threads=1),
    "seven at once, chunks of at most 7": dict(max_num_seqs=7, budget=7),
    "seven at once, chunks of at most 40": dict(max_num_seqs=16, budget=40),
    "seven at once, no prefix cache": dict(max_num_seqs=16, caching=False),
    "thirty-two at once": dict(max_num_seqs=32, copies=4),
    "thirty-two at once, chunks of at most 33": dict(max_num_seqs=32, copies=4, budget=33),
    "reversed": dict(max_num_seqs=16, order=lambda n: list(range(n))[::-1]),
    "one every third step": dict(max_num_seqs=16, every=3),
    "one every step, reversed": dict(max_num_seqs=16, every=1, order=lambda n: list(range(n))[::-1]),
    "warm": dict(max_num_seqs=16, rounds=2),
    "warm, chunks of 16": dict(max_num_seqs=16, rounds=2, budget=16),
    "preempted by higher classes": dict(max_num_seqs=16, copies=3, every=2, rising=True),
    "preempted, chunks of at most 16": dict(max_num_seqs=16, copies=3, every=2, budget=16, rising=True),
    "preempted, no prefix cache": dict(max_num_seqs=16, copies=3, every=2, rising=True, caching=False),
}


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_same_answer(world, name):
    executors, requests, expected = world
    how = dict(CIRCUMSTANCES[name])
    executor = executors[how.pop("threads", 2)]
    copies, rounds, every = how.pop("copies", 1), how.pop("rounds", 1), how.pop("every", 0)
    order = how.pop("order", lambda n: list(range(n)))(len(requests) * copies)
    rising = how.pop("rising", False)  # each newcomer outranks those before it, and pages are few
    longest = max(len(ask.prompt) + ask.params.max_tokens for ask in requests)
    num_pages = 2 * -(-longest // 16) if rising else NUM_PAGES
    settings = dict(num_pages=num_pages, budget=512, max_model_len=longest) | how
    if settings.pop("alone", False):
        for which, ask in enumerate(requests):
            assert answers_of(drive(executor, [ask], **settings), 0) == expected[which], f"request {which}"
        return
    many = [
        replace(requests[i % len(requests)], at_step=every * at, priority=-at if rising else 0)
        for at, i in enumerate(order)
    ]
    engine = None
    for _ in range(rounds):
        run = drive(executor, many, engine=engine, **settings)
        engine = run.engine
        for at, i in enumerate(order):
            assert answers_of(run, at) == expected[i % len(requests)], f"request {i % len(requests)}"
    if rising:
        assert run.stats.num_preemptions >= 3
    if rounds > 1:
        assert run[1].num_cached_tokens == len(requests[1].prompt) - 1
