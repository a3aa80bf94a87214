"""What is not finite spoils the rows that see it, and no other: whatever the chunk, the window or the company.

One token's values overflow the f16 cache. A row that is masked from it, or for which it has left the window, must not
meet it even with probability 0, though the kernel works rows of several tokens together.
"""

import random

import pytest
import torch

from tests.support import checkpoints
from tests.support.drive import Ask, drive
from tokenmill.backends.cpu import _native
from tokenmill.backends.cpu.executor import CpuExecutor
from tokenmill.core import SamplingParams
from tokenmill.models.registry import build_model
from tokenmill.weights.loader import open_checkpoint

LOUD = 300  # the token
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
WORDS = random.Random(0)
PROMPT = [WORDS.randrange(3, 290) for _ in range(48)]


def executor(folder, family: str, isa: str) -> CpuExecutor:
    model = checkpoints.make_model(family)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = 0
        embeddings[LOUD] = 0
        embeddings[LOUD, 0] = 5
        model.model.layers[0].self_attn.v_proj.weight[:, 0] = 2e4
    path = folder / f"{family}.gguf"
    checkpoints.gguf_file(path, family, model=model, format="F32")
    checkpoint = open_checkpoint(path)
    program = build_model(checkpoint.config, checkpoint.weights).program
    return CpuExecutor(
        program, num_threads=1, isa=isa, num_pages=64, max_tokens=256, max_requests=8, max_logit_rows=256
    )


@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_rows_before_it_are_untouched(tmp_path, isa):
    ex = executor(tmp_path, "llama", isa)
    scored = Ask([*PROMPT, LOUD, 7], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    runs = [drive(ex, [scored], num_pages=64, budget=budget)[0] for budget in (1, 7, 256)]
    assert {len(run.prompt_logprobs) for run in runs} == {len(PROMPT)}
    other = Ask([*PROMPT, 5], GREEDY)
    cold = drive(ex, [other], num_pages=64, budget=256)[0]
    loud = drive(ex, [Ask([*PROMPT, LOUD, 7], GREEDY)], num_pages=64, budget=256)
    assert loud[0].error
    warm = drive(ex, [other], num_pages=64, budget=256, engine=loud.engine)[0]
    assert warm.num_cached_tokens and warm.tokens == cold.tokens and warm.logprobs == cold.logprobs


@pytest.mark.parametrize("isa", _native.instruction_sets())
@pytest.mark.parametrize("after", [25, 47, 60])
def test_it_leaves_the_window_for_each_row_alone(tmp_path, isa, after):
    ex = executor(tmp_path, "mistral", isa)
    ask = Ask([LOUD, *PROMPT, *PROMPT][: 1 + after], GREEDY)
    runs = [drive(ex, [ask], num_pages=64, budget=budget)[0] for budget in (1, 7, 256)]
    assert len({str((run.tokens, run.logprobs, run.error)) for run in runs}) == 1
