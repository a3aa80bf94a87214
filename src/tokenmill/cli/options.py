"""Command-line options made from the config dataclasses: one name for a setting everywhere.

A field `max_model_len` is `--max-model-len` here, TOKENMILL_MAX_MODEL_LEN in the environment and a keyword in Python.
An option not given leaves the field to the environment, then to the dataclass's default.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import click

from ..config import EngineConfig, ServerConfig, from_environment
from ..core import SamplingParams
from ..errors import InvalidRequest

T = TypeVar("T")

HELP: dict[type, dict[str, str]] = {
    EngineConfig: {
        "model": "Short name, path, hf:org/name[:file] or pypi:package#file.",
        "revision": "Branch, tag or commit of an hf: reference.",
        "max_model_len": "Longest prompt + output, in tokens. Default: what the model and the KV memory allow.",
        "kv_cache_bytes": "Memory for KV pages. Default: a quarter of free memory at most.",
        "max_num_seqs": "Sequences running at once.",
        "max_num_batched_tokens": "Token budget of one step.",
        "step_seconds": "How long a step may take while answers are written; prompts are cut to that.",
        "max_waiting": "Sequences that may queue; beyond it requests get 429.",
        "enable_prefix_caching": "Reuse the KV of prompts that begin alike.",
        "num_threads": "Compute threads. Default: the cores this process may use.",
        "backend": "cpu, or reference: the numpy specification, slow.",
        "kv_cache_dtype": "Numbers of the KV cache: float16, or float32 (twice the memory). Default: float16.",
        "isa": "Instruction set: plain, avx2, avx512 or neon. Default: the best this machine has.",
        "seed": "Seed of requests that bring none. Default: fresh each time.",
    },
    ServerConfig: {
        "host": "Address to listen on.",
        "port": "Port to listen on.",
        "api_key": "Key that clients must send; may be given more than once.",
        "served_model_name": "Name(s) of the model in the API. Default: the model's own.",
        "max_body_bytes": "Largest request body.",
        "max_n": "Most choices of one request.",
        "chat_template": "File with a Jinja chat template that replaces the model's own.",
        "trust_request_chat_template": "Let requests bring their own chat template.",
        "drain_seconds": "How long a stop waits for running requests.",
        "max_connections": "Open sockets; more are closed at once.",
        "max_header_bytes": "Largest headers of a request.",
        "header_seconds": "How long a client may take to send a request's headers, or leave a connection idle.",
        "body_seconds": "How long a client may take to send a request's body.",
        "write_seconds": "How long a client may leave its answer unread before it is cut off.",
    },
    SamplingParams: {
        "n": "Choices of one prompt.",
        "temperature": "0 is greedy.",
        "top_k": "Keep the k most likely tokens; 0 is off.",
        "top_p": "Keep the smallest set of tokens with this probability.",
        "min_p": "Drop tokens below this fraction of the most likely one.",
        "typical_p": "Keep the most typical tokens up to this probability.",
        "repetition_penalty": "Above 1 makes tokens already seen less likely.",
        "presence_penalty": "Taken from the logit of a token already written.",
        "frequency_penalty": "Taken from the logit once for each time a token was written.",
        "logit_bias": "JSON object of token id to bias, for instance '{\"42\": -100}'.",
        "seed": "Same seed, same answer.",
        "min_tokens": "No end token before this many.",
        "max_tokens": "Most tokens to write.",
        "stop": "Stop at this text; may be given more than once.",
        "stop_token_ids": "Stop at this token; may be given more than once.",
        "include_stop_str_in_output": "Keep the stop text in the output.",
        "ignore_eos": "Do not stop at the model's end token.",
        "bad_words": "Text never to write; may be given more than once.",
        "allowed_token_ids": "Only these tokens; may be given more than once.",
        "logprobs": "Report this many alternatives at each output token.",
        "prompt_logprobs": "Report this many alternatives at each prompt token.",
        "skip_special_tokens": "Leave special tokens out of the text.",
    },
}


def _parse_json_object(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[int, float] | None:
    if text is None:
        return None
    try:
        return {int(key): float(value) for key, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise click.BadParameter("expected a JSON object of token id to number") from None


def _option(cls: type, field: dataclasses.Field, default: Any) -> Callable:
    flag = "--" + field.name.replace("_", "-")
    kind = str(field.type)
    text = HELP[cls][field.name]
    if default not in (None, ()):
        text += f"  [default: {str(default).lower() if isinstance(default, bool) else default}]"
    if kind == "bool":
        return click.option(f"{flag}/--no-{flag[2:]}", default=None, help=text)
    if kind.startswith("dict"):
        return click.option(flag, default=None, metavar="JSON", callback=_parse_json_object, help=text)
    base = int if "int" in kind else float if "float" in kind else str
    many = kind.startswith(("list", "tuple"))
    return click.option(flag, type=base, default=None, multiple=many, help=text)


def options_of(
    cls: type, *, skip: Collection[str] = (), defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Callable], Callable]:
    """Decorator: one option for each field of a config dataclass, in the order of its fields.

    `defaults`: what the command itself takes where nothing is given, for the help; hand the same to sampling_from().
    """

    def add(function: Callable) -> Callable:
        for field in reversed(dataclasses.fields(cls)):
            if field.name not in skip:
                function = _option(cls, field, defaults.get(field.name, field.default))(function)
        return function

    return add


def given(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Those of a command's keyword arguments that are fields of `cls` and were given."""
    names = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    return {
        name: list(value) if names[name].startswith("list") else value
        for name, value in values.items()
        if name in names and value is not None and value != ()
    }


def config_from(cls: type[T], values: dict[str, Any]) -> T:
    """A config: what was given, else the environment, else the default. Raises ConfigError."""
    return dataclasses.replace(from_environment(cls()), **given(cls, values))  # type: ignore[type-var]


def sampling_from(values: dict[str, Any], **defaults: Any) -> SamplingParams:
    """SamplingParams of a command's keyword arguments; `defaults` where the command's differ from the class's."""
    try:
        return SamplingParams(**{**defaults, **given(SamplingParams, values)})
    except TypeError as error:
        raise InvalidRequest(str(error)) from None
