"""`tokenmill generate`: complete one prompt, streamed to stdout, or as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any

import click

from ..config import EngineConfig
from ..core import SamplingParams
from ..errors import TokenmillError
from .options import config_from, given, options_of, sampling_from
from .progress import download_progress

DEFAULTS = {"max_tokens": 256}


@click.command()
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template, as a user's message.")
@click.option("--system", help="System message, with --chat.")
@click.option("--check", is_flag=True, help="First run the prompt op by op against the reference.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with texts, token ids and counts; no streaming.")
@options_of(SamplingParams, defaults=DEFAULTS)
@options_of(EngineConfig, skip=("seed",))
def generate(prompt: str | None, chat: bool, system: str | None, check: bool, as_json: bool, **values: Any) -> None:
    """Complete PROMPT, or what stdin holds (PROMPT absent or "-"), and exit."""
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if not as_json and any(values[name] is not None for name in ("logprobs", "prompt_logprobs")):
        raise click.UsageError("--logprobs and --prompt-logprobs need --json")
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise click.UsageError("give a PROMPT, or pipe one in")
        prompt = sys.stdin.read()
    params = sampling_from(values, **DEFAULTS)
    settings = given(EngineConfig, {k: v for k, v in values.items() if k != "seed"})
    from ..llm import AsyncLLM

    if check:
        _check(settings, prompt)
    with download_progress() as progress:
        llm = AsyncLLM(progress=progress, **settings)
    try:
        asyncio.run(_generate(llm, prompt, params, chat, system, as_json))
    finally:
        llm.close()


def _check(settings: dict[str, Any], prompt: str) -> None:
    from ..models.registry import build_model
    from ..weights.loader import open_checkpoint
    from ..weights.sources import resolve
    from .check import check_model

    config = config_from(EngineConfig, settings)
    with download_progress() as progress:
        checkpoint = open_checkpoint(resolve(config.model, revision=config.revision, progress=progress))
    check_model(config, checkpoint, build_model(checkpoint.config, checkpoint.weights).program, prompt)


async def _generate(
    llm: Any, prompt: str, params: SamplingParams, chat: bool, system: str | None, as_json: bool
) -> None:
    from ..outputs import RequestOutputKind

    stream = params.n == 1 and not as_json
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        outputs = llm.chat([*messages, {"role": "user", "content": prompt}], params, output_kind=kind)
    else:
        outputs = llm.generate(prompt, params, output_kind=kind)
    async for output in outputs:
        for choice in output.outputs:
            if choice.error is not None:
                raise TokenmillError(choice.error)
        if stream:
            click.echo(output.outputs[0].text, nl=output.finished)
        elif as_json:
            click.echo(json.dumps(_as_object(llm, output), ensure_ascii=False))
        else:
            for choice in output.outputs:
                click.echo(f"--- {choice.index}\n{choice.text}")


def _as_object(llm: Any, output: Any) -> dict[str, Any]:
    return {
        "model": llm.config.model,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "outputs": [{**asdict(choice), "logprobs": _logprobs(choice.logprobs)} for choice in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(choice.token_ids) for choice in output.outputs),
            "cached_tokens": output.num_cached_tokens,
        },
    }


def _logprobs(positions: list | None) -> list | None:
    """Token ids become strings in JSON."""
    if positions is None:
        return None
    return [p and {str(token): asdict(logprob) for token, logprob in p.items()} for p in positions]
