"""What Python does for each token, counted in function calls: the same number on every machine and every run."""

from __future__ import annotations

import numpy as np

from tests.perf.race import calls_of
from tests.support.drive import make_engine
from tokenmill.core import SamplingParams
from tokenmill.engine.fake import FakeExecutor
from tokenmill.engine.messages import AddRequest, TokenDelta
from tokenmill.text.output import RequestState
from tokenmill.text.tokenizer import load_tokenizer
from tokenmill.weights.loader import open_checkpoint

RUNNING = 64


class Instant(FakeExecutor):
    def execute(self, step, sampling, out):
        out.token_ids[:] = 7


def step_calls(running: int) -> int:
    """Of one engine step that gives each of `running` sequences a token."""
    engine = make_engine(
        Instant(num_pages=2048), num_pages=2048, max_num_seqs=running, budget=4096, overlap=False, seed=0
    )
    for i in range(running):
        prompt = np.random.default_rng(i).integers(0, 1000, 40).tolist()
        engine.add(AddRequest(request_id=str(i), prompt_token_ids=prompt, params=SamplingParams(max_tokens=100)))
    while len(engine.scheduler.running) < running:
        engine.step()
    return calls_of(engine.step)


def test_a_step_calls_so_many_functions_for_each_row():
    few, many = step_calls(RUNNING // 2), step_calls(RUNNING)
    a_row = (many - few) / (RUNNING // 2)
    print(f"{a_row:.1f} calls a row, {few - a_row * RUNNING / 2:.0f} a step", end=" ")
    assert a_row <= 36
    assert few - a_row * RUNNING / 2 <= 85


def test_a_token_becomes_text_in_so_many_calls(smollm2_path):
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    words = tokenizer.encode("A token's text is made of few calls, whatever came before it.")
    add = AddRequest(request_id="a", prompt_token_ids=words, params=SamplingParams(max_tokens=1000))
    state = RequestState(add, tokenizer)
    deltas = [TokenDelta(request_id="a", index=0, token_ids=[word]) for word in words]

    def pass_all():
        for delta in deltas:
            state.process(delta)

    a_token = calls_of(pass_all) / len(words)
    print(f"{a_token:.1f} calls a token", end=" ")
    assert a_token <= 9
