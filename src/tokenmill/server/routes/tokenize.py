"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ...errors import InvalidRequest
from ...text.chat import chat_to_ids
from ..errors import JSON
from ..protocol import DETOKENIZE_DECODER, TOKENIZE_DECODER, check_messages
from ..state import serving_of

MAX_CHARS = 1 << 20  # of a text to tokenise: each token takes hundreds of bytes on the way


async def tokenize(request: Request) -> JSON:
    serving = serving_of(request)
    body = await serving.bodies.read_json(request, TOKENIZE_DECODER)
    if body.model is not None:
        serving.check_model(body.model)
    serving.check_ready()
    tokenizer, info = serving.tokenizer, serving.engine.info
    assert info is not None
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        check_size(len(body.prompt), "prompt")
        ids = await serving.in_pool(
            len(body.prompt), tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    else:
        messages = check_messages(body.messages)
        size = sum(len(str(message.get("content"))) for message in messages)
        check_size(size, "messages")
        ids = await serving.in_pool(
            size,
            chat_to_ids,
            tokenizer,
            messages,
            template=serving.chat_template,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await serving.in_pool(len(ids), list, map(tokenizer.token_text, ids))
    return JSON(answer)


def check_size(chars: int, param: str) -> None:
    if chars > MAX_CHARS:
        raise InvalidRequest(f"{param} has {chars} characters; at most {MAX_CHARS} are tokenised at once", param=param)


async def detokenize(request: Request) -> JSON:
    serving = serving_of(request)
    body = await serving.bodies.read_json(request, DETOKENIZE_DECODER)
    if body.model is not None:
        serving.check_model(body.model)
    serving.check_ready()
    skip = bool(body.skip_special_tokens)
    text = await serving.in_pool(len(body.tokens), decode, serving.tokenizer, body.tokens, skip_special_tokens=skip)
    return JSON({"prompt": text})


def decode(tokenizer: Any, token_ids: list[int], *, skip_special_tokens: bool) -> str:
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < tokenizer.vocab_size:
            raise InvalidRequest(f"{token_id} is no token; ids are below {tokenizer.vocab_size}", param=f"tokens[{i}]")
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
