"""`--check`: a prompt run op by op against the reference, before anything else is done with the model.

Each op's result on the executor is compared with numpy's on the same inputs; the first that differs is named with its
layer and line. Slow: every op runs twice, and once in numpy.
"""

from __future__ import annotations

from typing import Any

import click

from ..config import PAGE_SIZE, EngineConfig, Machine
from ..errors import ConfigError

TEXT = "The quick brown fox jumps over the lazy dog. " * 3
MAX_PROMPT_TOKENS = 256
DECODE_STEPS = 2


def check_model(config: EngineConfig, checkpoint: Any, program: Any, prompt: str | None = None) -> None:
    """A prefill of the prompt (its first 256 tokens; a sentence of ours if None), then two decodes; says what it found.

    Raises CheckFailed at the first op that differs.
    """
    import numpy as np

    from ..backends.check import CheckedExecutor, Difference
    from ..backends.cpu.executor import CpuExecutor
    from ..program import StepInputs
    from ..text.tokenizer import load_tokenizer

    if config.backend != "cpu":
        raise ConfigError(f"--check compares the cpu backend with the reference; backend is {config.backend!r}")
    ids = load_tokenizer(checkpoint).encode(TEXT if prompt is None else prompt)[:MAX_PROMPT_TOKENS]
    num_pages = -(-(len(ids) + DECODE_STEPS) // PAGE_SIZE)
    executor = CheckedExecutor(
        program,
        CpuExecutor(
            program,
            num_pages=num_pages,
            num_threads=config.num_threads or Machine.detect().cores,
            max_tokens=MAX_PROMPT_TOKENS,
            max_requests=1,
            max_logit_rows=1,
            isa=config.isa,
            keep_values=True,
        ),
        num_pages=num_pages,
        page_size=PAGE_SIZE,
    )

    def int32(values: Any) -> Any:
        return np.array(values, np.int32)

    worst: dict[str, Difference] = {}
    done = 0
    for _ in range(1 + DECODE_STEPS):
        places = range(done, len(ids))
        step = StepInputs(
            token_ids=int32(ids[done:]),
            positions=int32(places),
            slot_mapping=int32(places),
            q_start=int32([0, len(places)]),
            kv_len=int32([len(ids)]),
            page_table=int32([range(num_pages)]),
            logit_rows=int32([len(places) - 1]),
        )
        logits = executor.forward(step)
        for op, found in executor.report.worst.items():
            worst[op] = max(worst.get(op, found), found, key=lambda difference: difference.strain)
        done = len(ids)
        ids.append(int(logits[0].argmax()))
    kernels = dict(executor.executor.decisions)["kernels"]
    steps = 1 + DECODE_STEPS
    click.echo(f"check: {len(program.ops)} ops x {steps} steps on {kernels} agree with the reference", err=True)
    for op, found in worst.items():
        allowed = "" if found.rounding is None else f", 8-bit rounding makes {found.rounding:.2e}"
        click.echo(f"  {op:<12} off by {found.error:.2e} of its size (limit {found.limit:.2e}{allowed})", err=True)
