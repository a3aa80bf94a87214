"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request

from ...errors import ContextLengthExceeded, InvalidRequest
from ...text.chat import chat_to_ids
from ...text.output import ChoiceDelta
from ..generation import Generation, GenerationResponse, Prompt
from ..logprobs import chat_logprobs, prompt_logprobs
from ..protocol import (
    CHAT_DECODER,
    UNSET,
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessageBody,
    ChatRequest,
    check_messages,
)
from ..state import Serving, serving_of

# Names that mean something else to chat_to_ids, or that have a field of their own.
NOT_TEMPLATE_VARIABLES = (
    "tokenizer",
    "messages",
    "tools",
    "template",
    "chat_template",
    "max_model_len",
    "add_generation_prompt",
    "continue_final_message",
)


async def chat_completions(request: Request) -> GenerationResponse:
    serving = serving_of(request)
    body = await serving.bodies.read_json(request, CHAT_DECODER)
    body.check()
    model = serving.check_model(body.model)
    serving.check_ready()
    params = body.params()
    serving.engine.check_room(max(0, min(params.n, serving.config.max_n)))
    ids = await chat_prompt(serving, body)
    request_id = serving.new_id()
    prompt = Prompt(0, serving.make_add(request_id, ids, params, param="messages"), serving.tokenizer)
    return GenerationResponse(
        Generation(serving, [prompt]),
        ChatFormat(serving, body, f"chatcmpl-{request_id}", model),
        stream=bool(body.stream),
        usage=body.include_usage,
        usage_always=body.usage_in_every_chunk,
    )


async def chat_prompt(serving: Serving, body: ChatRequest) -> list[int]:
    """The messages through the template and the tokenizer. Raises InvalidRequest."""
    template = serving.chat_template
    if body.chat_template is not None:
        if not serving.config.trust_request_chat_template:
            raise InvalidRequest(
                "this server does not take templates from requests (--trust-request-chat-template)",
                param="chat_template",
            )
        template = body.chat_template
    messages = check_messages(body.messages)
    options = dict(body.chat_template_kwargs or {})
    for name in options:
        if name in NOT_TEMPLATE_VARIABLES:
            raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    info = serving.engine.info
    size = sum(len(str(message.get("content"))) for message in messages)
    try:
        return await serving.in_pool(
            size,
            chat_to_ids,
            serving.tokenizer,
            messages,
            template=template,
            max_model_len=info.max_model_len if info else None,
            **options,
        )
    except ContextLengthExceeded as error:
        error.param = "messages"
        raise


class ChatFormat:
    """chat.completion and chat.completion.chunk"""

    def __init__(self, serving: Serving, body: ChatRequest, answer_id: str, model: str):
        self.serving = serving
        self.body = body
        self.id = answer_id
        self.model = model
        self.created = int(time.time())
        self.text_only = not (body.logprobs or body.return_token_ids)
        self.told_role: set[int] = set()

    def chunks(self, prompt: Prompt, changed: ChoiceDelta) -> list[Any]:
        out, index = [], changed.index
        if index not in self.told_role:
            self.told_role.add(index)
            out.append(ChatChunkChoice(index, ChatDelta("assistant", "")))
        logprobs = chat_logprobs(changed.logprobs) if changed.logprobs else None
        ids = list(changed.token_ids) if self.body.return_token_ids else UNSET
        if changed.text or logprobs or ids:
            out.append(ChatChunkChoice(index, ChatDelta(content=changed.text), logprobs, token_ids=ids))
        if changed.finish_reason is not None:
            end = ChatChunkChoice(index, ChatDelta(), None, changed.finish_reason.value)
            end.stop_reason = changed.stop_reason
            out.append(end)
        return out

    def answer(self, choices: list[Any]) -> Answer:
        return self._answer("chat.completion.chunk", choices)

    def whole(self, generation: Generation) -> Answer:
        prompt = generation.prompts[0]
        choices = []
        for choice in prompt.choices:
            assert choice.finish_reason is not None
            logprobs = chat_logprobs(choice.logprobs or []) if self.body.logprobs else None
            message = ChatMessageBody("assistant", choice.text)
            made = ChatChoice(choice.index, message, logprobs, choice.finish_reason.value, choice.stop_reason)
            if self.body.return_token_ids:
                made.token_ids = choice.token_ids
            choices.append(made)
        answer = self._answer("chat.completion", choices)
        answer.usage = generation.usage()
        if self.body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(prompt.state.describe_prompt())
        if self.body.return_token_ids:
            answer.prompt_token_ids = prompt.add.prompt_token_ids
        return answer

    def _answer(self, kind: str, choices: list[Any]) -> Answer:
        return Answer(
            id=self.id,
            object=kind,
            created=self.created,
            model=self.model,
            choices=choices,
            system_fingerprint=self.serving.fingerprint,
        )
