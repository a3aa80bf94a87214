"""The bodies of the API: what a client may send, field by field, and what it gets back.

The rules, which tests/api holds:
  - null means absent, everywhere.
  - A wrong type is a 400 that names the field; nothing is coerced ("5" is not 5, 1.0 is not an integer). Of a key given
    twice the last counts.
  - A field nobody here knows, and one that changes nothing in the answer (user, store, metadata, service_tier,
    reasoning_effort, parallel_tool_calls, prompt_cache_key, safety_identifier ...), is accepted and ignored.
  - A field we know and cannot honour yet (REFUSED) is a 400 `unsupported_field`, unless its value is one that asks for
    nothing. It is never ignored.
  - max_tokens and max_completion_tokens are the same setting; given both, they must agree.

Field names and meanings are OpenAI's, with vLLM's and llama.cpp's sampling extensions. Knows no HTTP and no engine.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..backends.interface import MAX_LOGPROBS
from ..core import SamplingParams
from ..errors import InvalidRequest, UnsupportedField

# name -> values that ask for nothing
REFUSED: dict[str, tuple] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "json_schema": ({},),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "suffix": ("",),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "cache_salt": (),
    "kv_transfer_params": (),
    "lora": ([],),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "repeat_last_n": (-1,),  # penalties always see the whole context
    "mirostat": (0,),
    "dynatemp_range": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "samplers": (),
}


if TYPE_CHECKING:
    _Refused = Struct
else:
    _Refused = msgspec.defstruct("_Refused", [(name, Any, None) for name in REFUSED], kw_only=True)


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage so far in every chunk


class GenerationRequest(_Refused, kw_only=True):
    """What both endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # llama.cpp's name of the same
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None  # vLLM: the ids beside the text
    add_special_tokens: bool | None = None
    tools: Any = None
    tool_choice: Any = None

    def check(self) -> None:
        """The rules that no type can say. Raises InvalidRequest, UnsupportedField."""
        for name, harmless in REFUSED.items():
            value = getattr(self, name)
            # `in` alone would take False for 0
            if value is not None and not any(value == ok and type(value) is type(ok) for ok in harmless):
                raise UnsupportedField(f"{name} is not supported yet", param=name)
        if self.tools and self.tool_choice != "none":
            raise UnsupportedField("tools are not supported yet; send tool_choice 'none' or no tools", param="tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise UnsupportedField("tool_choice is not supported yet", param="tool_choice")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream true", param="stream_options")
        if None not in (self.repetition_penalty, self.repeat_penalty) and (
            self.repetition_penalty != self.repeat_penalty
        ):
            raise InvalidRequest("repeat_penalty and repetition_penalty are one setting", param="repeat_penalty")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, **settled: Any) -> SamplingParams:
        """SamplingParams of the fields given; `settled` are those each endpoint works out in its own way."""
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        return SamplingParams(**{**given, **settled})


_SAMPLING_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("max_tokens", "logprobs")  # each endpoint has its own rule
)


class CompletionRequest(GenerationRequest, kw_only=True):
    """/v1/completions"""

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or many prompts, each a text or token ids. Raises InvalidRequest."""
        prompt = self.prompt
        if prompt is None:
            raise InvalidRequest("prompt is required", param="prompt")
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is an empty list", param="prompt")
        if all(isinstance(item, int) for item in prompt):
            return [prompt]  # type: ignore[list-item]
        if any(isinstance(item, int) for item in prompt):
            raise InvalidRequest("prompt mixes token ids with prompts", param="prompt")
        return prompt  # type: ignore[return-value]

    def params(self) -> SamplingParams:
        """What the engine runs for each prompt: best_of sequences, of which n are returned."""
        n = 1 if self.n is None else self.n
        run = n if self.best_of is None else self.best_of
        if run < n:
            raise InvalidRequest(f"best_of is {run} and n is {n}; best_of must be at least n", param="best_of")
        if run > n and self.stream:
            raise InvalidRequest("best_of above n cannot be streamed", param="best_of")
        logprobs = self.logprobs
        if logprobs is None and run > n:
            logprobs = 0  # to choose by
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        settled: dict[str, Any] = {"n": run, "logprobs": logprobs, "max_tokens": max_tokens}
        if self.echo:
            if max_tokens == 0:
                settled["max_tokens"] = 1  # the prompt is scored by a step; its token is not returned
            if self.logprobs is not None and self.prompt_logprobs is None:
                settled["prompt_logprobs"] = self.logprobs
        return self.sampling(**settled)


ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages are there and each has a known role; their content is text.chat's to check. Raises InvalidRequest."""
    if messages is None:
        raise InvalidRequest("messages is required", param="messages")
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            given = "missing" if role is None else repr(role)[:50]
            raise InvalidRequest(f"role is {given}; one of {', '.join(ROLES)}", param=f"messages[{i}].role")
        if message.get("content") == []:
            raise InvalidRequest("content is an empty list", param=f"messages[{i}].content")
    return messages


class ChatRequest(GenerationRequest, kw_only=True):
    """/v1/chat/completions"""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    def params(self) -> SamplingParams:
        given = {value for value in (self.max_tokens, self.max_completion_tokens) if value is not None}
        if len(given) > 1:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; "
                "they are one setting",
                param="max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs true", param="top_logprobs")
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs is {top}; it must be 0 to {MAX_LOGPROBS}", param="top_logprobs")
        logprobs = top if self.logprobs else None
        return self.sampling(logprobs=logprobs, max_tokens=given.pop() if given else None)


class TokenizeRequest(Struct, kw_only=True):
    """/tokenize: a text, or the messages of a chat"""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """/detokenize"""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


# ---- answers. Fields in OpenAI's order; UNSET ones are not written.


class PromptTokensDetails(Struct):
    cached_tokens: int = 0


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """The legacy form: parallel lists."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class ChatMessageBody(Struct):
    role: str
    content: str
    refusal: None = None


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    """A whole completion, or one chunk of a streamed one."""

    id: str
    object: str
    created: int  # unix seconds
    model: str
    choices: list[Any]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


CHAT_DECODER = msgspec.json.Decoder(ChatRequest)
COMPLETION_DECODER = msgspec.json.Decoder(CompletionRequest)
TOKENIZE_DECODER = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE_DECODER = msgspec.json.Decoder(DetokenizeRequest)
