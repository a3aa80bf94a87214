"""POST /v1/completions: texts or token ids to be continued, one or many; choice index is prompt * n + choice."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request

from ...errors import InvalidRequest
from ...text.output import ChoiceDelta, ChoiceState
from ...text.request import encode_prompt
from ..generation import Generation, GenerationResponse, Prompt
from ..logprobs import LegacyLogprobs, prompt_logprobs
from ..protocol import COMPLETION_DECODER, UNSET, Answer, CompletionChoice, CompletionRequest
from ..state import Serving, serving_of


async def completions(request: Request) -> GenerationResponse:
    serving = serving_of(request)
    body = await serving.bodies.read_json(request, COMPLETION_DECODER)
    body.check()
    model = serving.check_model(body.model)
    serving.check_ready()
    params = body.params()
    given = body.prompts()
    if len(given) * params.n > serving.config.max_n:
        raise InvalidRequest(
            f"{len(given)} prompts with {params.n} choices each; one request may have {serving.config.max_n} in all",
            param="n" if params.n > 1 else "prompt",
        )
    serving.engine.check_room(max(0, len(given) * params.n))
    request_id = serving.new_id()
    prompts = []
    for i, prompt in enumerate(given):
        where = "prompt" if len(given) == 1 else f"prompt[{i}]"
        ids = await prompt_ids(serving, body, prompt, where) if isinstance(prompt, str) else prompt
        add = serving.make_add(f"{request_id}-{i}", ids, params, param=where)
        text = None
        if body.echo:
            text = prompt if isinstance(prompt, str) else serving.tokenizer.decode(ids, skip_special_tokens=False)
        prompts.append(Prompt(i, add, serving.tokenizer, text))
    form = CompletionFormat(serving, body, f"cmpl-{request_id}", model)
    return GenerationResponse(
        Generation(serving, prompts, count_output=not form.prompt_only),
        form,
        stream=bool(body.stream),
        usage=body.include_usage,
        usage_always=body.usage_in_every_chunk,
    )


async def prompt_ids(serving: Serving, body: CompletionRequest, prompt: str, where: str) -> list[int]:
    """One prompt's ids. Raises InvalidRequest naming `where`."""
    info = serving.engine.info
    return await serving.in_pool(
        len(prompt),
        encode_prompt,
        serving.tokenizer,
        prompt,
        add_special_tokens=body.add_special_tokens is not False,
        max_model_len=info.max_model_len if info else None,
        param=where,
    )


class CompletionFormat:
    """text_completion, whole and in chunks"""

    def __init__(self, serving: Serving, body: CompletionRequest, answer_id: str, model: str):
        self.serving = serving
        self.body = body
        self.id = answer_id
        self.model = model
        self.created = int(time.time())
        self.n = body.n or 1
        self.text_only = body.logprobs is None and not body.return_token_ids
        self.prompt_only = bool(body.echo) and body.max_tokens == 0  # score the prompt, return no token
        self.legacy: dict[tuple[int, int], LegacyLogprobs] = {}  # by prompt and choice, of those that were begun

    def chunks(self, prompt: Prompt, changed: ChoiceDelta) -> list[Any]:
        out: list[Any] = []
        index = prompt.position * self.n + changed.index
        begins = (prompt.position, changed.index) not in self.legacy
        legacy = self.legacy.setdefault((prompt.position, changed.index), LegacyLogprobs())
        text = ""
        if begins and self.body.echo:
            text = prompt.text or ""
            if self.body.logprobs is not None:
                self._add_prompt(legacy, prompt)
        if not self.prompt_only:
            text += changed.text
            legacy.add(changed.logprobs or ())
        logprobs = legacy.take() if self.body.logprobs is not None else None
        ids = list(changed.token_ids) if self.body.return_token_ids and not self.prompt_only else UNSET
        if text or logprobs or ids:
            out.append(CompletionChoice(index, text, logprobs, token_ids=ids))
        if changed.finish_reason is not None:
            end = CompletionChoice(index, "", None, changed.finish_reason.value)
            end.stop_reason = changed.stop_reason
            out.append(end)
        return out

    def answer(self, choices: list[Any]) -> Answer:
        return Answer(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            system_fingerprint=self.serving.fingerprint,
        )

    def whole(self, generation: Generation) -> Answer:
        choices = []
        for prompt in generation.prompts:
            best = prompt.choices
            if len(best) > self.n:
                best = sorted(best, key=mean_logprob, reverse=True)[: self.n]
            choices += [self._whole(prompt, choice, prompt.position * self.n + i) for i, choice in enumerate(best)]
        answer = self.answer(choices)
        answer.usage = generation.usage()
        return answer

    def _whole(self, prompt: Prompt, choice: ChoiceState, index: int) -> CompletionChoice:
        assert choice.finish_reason is not None
        body = self.body
        text = (prompt.text or "") + ("" if self.prompt_only else choice.text)
        made = CompletionChoice(index, text, None, choice.finish_reason.value, choice.stop_reason)
        if body.logprobs is not None:
            legacy = LegacyLogprobs()
            if body.echo:
                self._add_prompt(legacy, prompt)
            if not self.prompt_only:
                legacy.add(choice.logprobs or ())
            made.logprobs = legacy.take()
        if body.prompt_logprobs is not None:
            made.prompt_logprobs = prompt_logprobs(prompt.state.describe_prompt())
        if body.return_token_ids:
            made.token_ids = [] if self.prompt_only else choice.token_ids
            made.prompt_token_ids = prompt.add.prompt_token_ids
        return made

    def _add_prompt(self, legacy: LegacyLogprobs, prompt: Prompt) -> None:
        first = self.serving.tokenizer.token_bytes(prompt.add.prompt_token_ids[0]).decode("utf-8", "replace")
        legacy.add_prompt(prompt.text or "", first, prompt.state.describe_prompt())


def mean_logprob(choice: ChoiceState) -> float:
    entries = choice.logprobs or ()
    return sum(entry.logprob for entry in entries) / max(1, len(entries))
