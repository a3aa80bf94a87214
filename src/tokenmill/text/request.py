"""From a prompt and SamplingParams to the AddRequest the engine takes: everything is checked and resolved here.

The length rule, for chat and completions alike: a prompt must leave room for one token, else ContextLengthExceeded
with both numbers. max_tokens absent means up to the edge of the context, and one larger than the room is cut to it; the
reply then ends there with finish_reason "length". So prompt + completion <= max_model_len, always, and nothing is
shifted or truncated silently.

Knows nothing of HTTP bodies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace

from ..core import SamplingParams
from ..engine.messages import AddRequest
from ..errors import ContextLengthExceeded, InvalidRequest
from .tokenizer import Tokenizer

_PROBE_CHARS_PER_TOKEN = 8  # a text longer than this much of the context is tried on its beginning first
_PROBE_SLACK = 256  # tokens by which the beginning must exceed the context: cutting may split its last word


def encode_prompt(
    tokenizer: Tokenizer,
    text: str,
    *,
    max_model_len: int | None = None,
    add_special_tokens: bool = True,
    param: str = "prompt",
) -> list[int]:
    """Tokenise; with max_model_len, refuse what cannot fit after tokenising only its beginning.

    Raises ContextLengthExceeded, or InvalidRequest for text that is not Unicode.
    """
    if max_model_len is not None:
        probe = _PROBE_CHARS_PER_TOKEN * (max_model_len + _PROBE_SLACK)
        if len(text) > 2 * probe:
            # Normalising may shorten text threefold (jamo to syllables), never more.
            least = len(text) // (3 * tokenizer.max_token_bytes)
            if least <= max_model_len:
                least = len(tokenizer.encode(text[:probe], add_special_tokens)) - _PROBE_SLACK
            if least > max_model_len:
                raise _too_long(max_model_len, f"at least {least}", param)
    return tokenizer.encode(text, add_special_tokens)


def make_request(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    max_model_len: int,
    vocab_size: int | None = None,
    max_n: int = 128,
    namespace: str = "",
    tenant: str = "default",
    weight: float = 1.0,
    priority: int = 0,
    arrival_time: float | None = None,
    param: str = "prompt",
) -> AddRequest:
    """vocab_size: the model's, where it is smaller than the tokenizer's. param: the field errors of the prompt name.

    Raises InvalidRequest or ContextLengthExceeded; params.seed None stays None (the engine draws one).
    """
    from ..sampling.validate import validate

    vocab = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)
    ids = [_plain(i) for i in prompt_token_ids]
    if not ids:
        raise InvalidRequest("the prompt is empty: it has no tokens", param=param)
    if len(ids) >= max_model_len:
        raise _too_long(max_model_len, str(len(ids)), param)
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab:
            raise InvalidRequest(
                f"token id {i!r} is not in the vocabulary of {vocab} tokens (0 to {vocab - 1})", param=param
            )
    validate(params, vocab_size=vocab, max_model_len=max_model_len, num_prompt_tokens=len(ids), max_n=max_n)
    priority = _plain(priority)
    if type(priority) is not int:
        raise InvalidRequest(f"priority is {priority!r}; it must be an integer", param="priority")
    room = max_model_len - len(ids)
    params = replace(params, **{f.name: _plain(getattr(params, f.name)) for f in fields(params)})
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
    ends = [] if params.ignore_eos else sorted(tokenizer.eos_token_ids)
    bad_words = _bad_words(tokenizer, params.bad_words)
    _check_something_is_left(params, ends, bad_words)
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=ids,
        params=params,
        eos_token_ids=ends,
        bad_words_ids=bad_words,
        tenant=tenant,
        weight=weight,
        priority=priority,
        namespace=namespace,
        arrival_time=time.monotonic() if arrival_time is None else arrival_time,
    )


def _bad_words(tokenizer: Tokenizer, words: Sequence[str] | None) -> list[list[int]]:
    """Each word as it is spelled inside a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words or ():
        bare = word.lstrip()
        if not bare:
            raise InvalidRequest("bad_words must not hold an empty word", param="bad_words")
        for text in (bare, " " + bare):
            found[tuple(tokenizer.encode_continuation(text))] = None
    return [list(ids) for ids in found if ids]


def _check_something_is_left(params: SamplingParams, ends: list[int], bad_words: list[list[int]]) -> None:
    """Raises InvalidRequest where the first token could be none, whatever the model says."""
    if params.allowed_token_ids is None:
        return
    forbidden = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens > 0:
        forbidden.update(ends, params.stop_token_ids or ())
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids holds no token that bad_words and min_tokens (no end before it) leave",
            param="allowed_token_ids",
        )


def _plain(value):
    """numpy's numbers and arrays as Python's own, also inside: what crosses to the engine is plain."""
    if value is None or type(value) in (int, float, bool, str):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _too_long(limit: int, count: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens. However, your prompt has {count} tokens; "
        f"shorten it so that at least one token can be generated.",
        param=param,
    )
