"""Chat messages to a prompt, by the model's own template.

Rules, the same in the server and in Python:
- content may be a string or a list of parts; the text of all parts is kept, in order, with nothing between them. Parts
  that are not text are refused, naming the type. A refusal counts as the text of its turn.
- a developer message is a system message to a template that does not know the role; a system message stays where it is.
- names and fields the template does not read are ignored; null is the same as absent.
- special tokens spelled in the rendered text are parsed, also those inside a message's content, as every engine does.
- the prompt has one BOS if the model wants one, whether the template writes it or not.
- a template that objects (raise_exception) gives InvalidRequest with its own sentence; its source is never shown.

Templates run in text/sandbox.py, bounded in time and size. Knows nothing of HTTP or sampling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

MAX_TEMPLATE_CHARS = 1 << 17
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_END_MARK = "\ue000\ue001end of the final message\ue001\ue000"


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt's text. template replaces the model's own; kwargs go to the template (enable_thinking and the like).

    continue_final_message leaves the last message open, so that the reply goes on with it.
    Raises InvalidRequest: messages malformed (param names the place), no template, or the template objects or fails.
    """
    source = template if template is not None else _own_template(tokenizer, tools)
    prepared = prepare_messages(messages, knows_developer="developer" in source)
    if continue_final_message:
        add_generation_prompt = False
        prepared[-1] = prepared[-1] | {"content": prepared[-1]["content"] + _END_MARK}
    variables: dict[str, Any] = dict(tokenizer.template_tokens)
    for name in kwargs:
        if name in ("messages", "tools", "add_generation_prompt") or name in variables:
            raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
    variables |= kwargs
    variables |= {
        "messages": prepared,
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": kwargs.get("documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    text = _run(source, variables)
    if continue_final_message:
        cut = text.rfind(_END_MARK)
        if cut < 0:
            raise InvalidRequest(
                "the chat template does not show the final message's content, so it cannot be continued"
            )
        text = text[:cut]
    return text


def chat_to_ids(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, max_model_len: int | None = None, **kwargs: Any
) -> list[int]:
    """render_chat, tokenised. With max_model_len, raises ContextLengthExceeded without tokenising what cannot fit."""
    from .request import encode_prompt

    text = render_chat(tokenizer, messages, **kwargs)
    return encode_prompt(tokenizer, text, max_model_len=max_model_len, param="messages")


def prepare_messages(messages: Any, *, knows_developer: bool = False) -> list[dict[str, Any]]:
    """Checked copies in the form templates expect: content a string, nulls gone, tool-call arguments parsed."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list", param="messages")
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", param="messages")
    return [_prepare(message, f"messages[{i}]", knows_developer) for i, message in enumerate(messages)]


def _prepare(message: Any, place: str, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{place} must be an object with role and content", param=place)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{place}.role must be a string such as 'user'", param=f"{place}.role")
    out = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and not knows_developer:
        out["role"] = "system"
    content = out.get("content")
    if content is None:
        content = out.get("refusal", "")
        if role != "assistant":
            raise InvalidRequest(f"{place}.content is missing", param=f"{place}.content")
    out["content"] = _join_parts(content, f"{place}.content")
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(out["tool_calls"], f"{place}.tool_calls")
        if not out["tool_calls"]:
            del out["tool_calls"]
    return out


def _join_parts(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{place} must be a string or a list of parts", param=place)
    texts = []
    for j, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"{place}[{j}] must be an object with a type", param=f"{place}[{j}]")
        if kind not in _TEXT_PARTS:
            raise InvalidRequest(
                f"{place}[{j}] has type {kind[:40]!r}; this model reads text only", param=f"{place}[{j}].type"
            )
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            field = f"{place}[{j}].{_TEXT_PARTS[kind]}"
            raise InvalidRequest(f"{field} must be a string", param=field)
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise InvalidRequest(f"{place} must be a list", param=place)
    out = []
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{place}[{j}].function.name must be a string", param=f"{place}[{j}].function.name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):  # the API's form; templates write the object
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                field = f"{place}[{j}].function.arguments"
                raise InvalidRequest(f"{field} is not valid JSON", param=field) from None
        out.append({**call, "function": {**function, "arguments": arguments}})
    return out


def _own_template(tokenizer: Tokenizer, tools) -> str:
    templates = tokenizer.chat_templates
    source = templates.get("tool_use") if tools and "tool_use" in templates else templates.get("default")
    if source is None:
        raise InvalidRequest(
            "this model has no chat template: it completes text (/v1/completions, LLM.generate, `tokenmill generate`); "
            "to chat all the same, give it one: serve --chat-template FILE, or chat_template in Python"
        )
    return source


def _run(source: str, variables: dict[str, Any]) -> str:
    from .budget import Budget, TemplateComplaint, TemplateTooExpensive
    from .sandbox import render

    try:
        template = _compile(source)
        if isinstance(template, Exception):
            raise template.with_traceback(None)
        return render(template, variables, Budget(variables))
    except TemplateComplaint as error:
        raise InvalidRequest(str(error)[:500], param="messages") from None
    except TemplateTooExpensive as error:
        raise InvalidRequest(f"the chat template was stopped: {error}", param="chat_template") from None
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest("the chat template was stopped: it calls itself too deep", param="chat_template") from None
    except Exception as error:  # whatever a faulty template makes Python say; never its source
        raise InvalidRequest(f"the chat template failed: {_say(error)}", param="chat_template") from None


def _say(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    text = (getattr(error, "message", None) or str(error) or type(error).__name__).splitlines()[0][:200]
    return f"{text} (line {line})" if line is not None else text


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template | Exception:
    """What is wrong with a template is remembered as well: a large one takes a second to find out."""
    if len(source) > MAX_TEMPLATE_CHARS:
        return InvalidRequest(
            f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters", param="chat_template"
        )
    try:
        return _environment().from_string(source)
    except Exception as error:
        return error.with_traceback(None)


@lru_cache(maxsize=1)
def _environment():
    from .sandbox import TemplateEnvironment

    return TemplateEnvironment()
