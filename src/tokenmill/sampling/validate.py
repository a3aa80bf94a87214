"""validate(): every field of SamplingParams checked before anything is queued.

Each refusal is an InvalidRequest that names the field, the value and the limit, and fields are checked in the order of
SamplingParams, so the same request always gets the same answer. Nothing is coerced: strings are not numbers, booleans
are not integers, 5.0 is not an integer; numpy's integers and floats are taken for what they are.

field                               accepted
n                                   1 .. max_n
temperature                         0 .. 100; below 1e-5 (so -0.0 and denormals too) is greedy
top_k                               0 or -1: off; 1 .. 2^64 - 1, above the vocabulary as good as off
top_p, min_p, typical_p             0 .. 1; top_p 0 keeps the best token only
repetition_penalty                  0.01 .. 100
presence_, frequency_penalty        -2 .. 2
logit_bias                          token id -> -100 .. 100, at most 1024 entries
seed                                -2^63 .. 2^64 - 1; negative ones are two's complement: -1 is 2^64 - 1
max_tokens                          1 .. 2^63 - 1, None: to the context's edge; 0 only with prompt_logprobs: just score
min_tokens                          0 .. max_tokens
stop                                a string or at most 64 of 1 .. 1024 characters
stop_token_ids                      at most 128 token ids
bad_words                           at most 1024 strings of 1 .. 256 characters, not blank
allowed_token_ids                   token ids, at least one
logprobs, prompt_logprobs           0 .. max_logprobs
include_stop_str_in_output, ignore_eos, skip_special_tokens: true or false
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..core import SamplingParams
from ..errors import ContextLengthExceeded, InvalidRequest

INTEGER = (int, np.integer)
NUMBER = (int, float, np.integer, np.floating)
BOOLEAN = (bool, np.bool_)
MAX_BIASES = 1024
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 1024
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 1024, 256


def validate(
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    num_prompt_tokens: int,
    max_logprobs: int = 20,
    max_n: int = 128,
) -> None:
    """Raise InvalidRequest for the first wrong field, or ContextLengthExceeded if nothing fits after the prompt."""
    p = params
    _integer("n", p.n, 1, max_n)
    _number("temperature", p.temperature, 0, 100)
    _integer("top_k", p.top_k, -1, 2**64 - 1)
    _number("top_p", p.top_p, 0, 1)
    _number("min_p", p.min_p, 0, 1)
    _number("typical_p", p.typical_p, 0, 1)
    _number("repetition_penalty", p.repetition_penalty, 0.01, 100)
    _number("presence_penalty", p.presence_penalty, -2, 2)
    _number("frequency_penalty", p.frequency_penalty, -2, 2)
    if p.logit_bias is not None:
        if not isinstance(p.logit_bias, dict):
            _refuse("logit_bias", p.logit_bias, "a map from token ids to numbers")
        _at_most("logit_bias", len(p.logit_bias), MAX_BIASES, "entries")
        for token, value in p.logit_bias.items():
            _token("logit_bias", token, vocab_size)
            _number("logit_bias", value, -100, 100, f" for token {token}")
    if p.seed is not None:
        _integer("seed", p.seed, -(2**63), 2**64 - 1)
    _integer("min_tokens", p.min_tokens, 0, 2**63 - 1)
    if p.max_tokens is not None:
        _integer("max_tokens", p.max_tokens, 1 if p.prompt_logprobs is None else 0, 2**63 - 1)
        if p.min_tokens > p.max_tokens:
            _refuse("min_tokens", p.min_tokens, f"at most max_tokens, which is {p.max_tokens}")
    if p.stop is not None:
        _strings("stop", [p.stop] if isinstance(p.stop, str) else p.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
    if p.stop_token_ids is not None:
        _tokens("stop_token_ids", p.stop_token_ids, vocab_size, MAX_STOP_TOKENS)
    _boolean("include_stop_str_in_output", p.include_stop_str_in_output)
    _boolean("ignore_eos", p.ignore_eos)
    if p.bad_words is not None:
        _strings("bad_words", p.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
        for word in p.bad_words:
            if not word.strip():
                _refuse("bad_words", word, "words, not blanks")
    if p.allowed_token_ids is not None:
        _tokens("allowed_token_ids", p.allowed_token_ids, vocab_size, vocab_size)
        if len(p.allowed_token_ids) == 0:
            _refuse(
                "allowed_token_ids", p.allowed_token_ids, "at least one token id; leave it out to allow every token"
            )
    if p.logprobs is not None:
        _integer("logprobs", p.logprobs, 0, max_logprobs)
    if p.prompt_logprobs is not None:
        _integer("prompt_logprobs", p.prompt_logprobs, 0, max_logprobs)
    _boolean("skip_special_tokens", p.skip_special_tokens)
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; the context holds {max_model_len} and needs room for one more",
            param="prompt",
        )


def _refuse(field: str, value: Any, wanted: str, where: str = "") -> NoReturn:
    shown = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "a very large integer"
    if len(shown) > 64:
        shown = shown[:61] + "..."
    raise InvalidRequest(f"{field} is {shown}{where}; it must be {wanted}", param=field)


def _integer(field: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, INTEGER) or isinstance(value, BOOLEAN):
        _refuse(field, value, "an integer")
    if not low <= value <= high:
        unreachable = high >= 2**63 - 1 and value < low
        _refuse(field, value, f"at least {low}" if unreachable else f"between {low} and {high}")


def _number(field: str, value: Any, low: float, high: float, where: str = "") -> None:
    if not isinstance(value, NUMBER) or isinstance(value, BOOLEAN):
        _refuse(field, value, "a number", where)
    if not low <= value <= high:  # also refuses NaN
        _refuse(field, value, f"between {low} and {high}", where)


def _boolean(field: str, value: Any) -> None:
    if not isinstance(value, BOOLEAN):
        _refuse(field, value, "true or false")


def _token(field: str, value: Any, vocab_size: int) -> None:
    if not isinstance(value, INTEGER) or isinstance(value, BOOLEAN) or not 0 <= value < vocab_size:
        raise InvalidRequest(
            f"{field} holds {repr(value)[:64]}; the model's token ids are integers from 0 to {vocab_size - 1}",
            param=field,
        )


def _tokens(field: str, values: Any, vocab_size: int, limit: int) -> None:
    _list(field, values, "token ids")
    _at_most(field, len(values), limit, "token ids")
    for value in values:
        _token(field, value, vocab_size)


def _strings(field: str, values: Any, limit: int, max_characters: int) -> None:
    _list(field, values, "strings")
    _at_most(field, len(values), limit, "strings")
    for value in values:
        if not isinstance(value, str):
            _refuse(field, value, "strings only")
        if not 1 <= len(value) <= max_characters:
            raise InvalidRequest(
                f"{field} holds a string of {len(value)} characters; each must have 1 to {max_characters}", param=field
            )
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            _refuse(field, value, "valid Unicode, without lone surrogates")


def _list(field: str, values: Any, what: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        _refuse(field, values, f"a list of {what}")


def _at_most(field: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{field} has {count} {what}; at most {limit} are allowed", param=field)
