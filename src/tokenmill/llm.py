"""The engine in your own process: LLM for scripts, AsyncLLM for services. In the shape that vLLM's users know.

    llm = LLM("smollm2-135m-instruct")
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)

Both sit on one engine thread. Prompts are checked before the first is queued; text is made on the caller's side. The
keywords of LLM are EngineConfig's fields.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import queue
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from .config import EngineConfig, from_environment
from .core import FinishReason, SamplingParams
from .engine.load import load_engine
from .engine.messages import AbortRequest, EngineStats, TokenDelta
from .engine.thread import EngineThread
from .errors import ConfigError, InvalidRequest, TokenmillError
from .outputs import RequestOutput, RequestOutputKind, Tracked
from .text.chat import chat_to_ids
from .text.request import encode_prompt, make_request
from .text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]  # text, {"prompt": text}, {"prompt_token_ids": [...]} or token ids
Message = Mapping[str, Any]

ALIASES = {"kv_cache_memory_bytes": "kv_cache_bytes"}  # other engines' names of our settings


class _Front:
    """What LLM and AsyncLLM share: the loaded engine and its thread, and requests made of prompts."""

    def __init__(self, model: str | None = None, *, progress: Any = None, **settings: Any):
        config = engine_config(model, settings)
        self._loaded = load_engine(config, progress=progress)
        self.config = config
        self.tokenizer: Tokenizer = load_tokenizer(self._loaded.checkpoint)
        self.max_model_len: int = self._loaded.resolved.max_model_len
        self.decisions: list[tuple[str, str]] = self._loaded.decisions
        self._thread = EngineThread(self._loaded.engine)
        self._ids = itertools.count()
        # Ends the thread when this object goes or the interpreter exits, whichever is first.
        self._finalizer = weakref.finalize(self, self._thread.close)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    @property
    def stats(self) -> EngineStats:
        return self._thread.stats

    def close(self) -> None:
        """End the engine's thread; running requests get EngineUnavailable. Idempotent."""
        self._finalizer()

    shutdown = close

    def _make(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, request_id: str | None = None
    ) -> Tracked:
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {kind}", param="sampling_params")
        text, ids = self._read_prompt(prompt)
        add = make_request(
            self.tokenizer,
            ids,
            params,
            request_id=f"{request_id or 'request'}-{next(self._ids)}",
            max_model_len=self.max_model_len,
            vocab_size=self._loaded.model.vocab_size,
            namespace=self._loaded.checkpoint.digest,
            priority=priority,
        )
        return Tracked(add, text, self.tokenizer, request_id)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidRequest(
                    f"a prompt has the keys 'prompt' or 'prompt_token_ids'; got {sorted(prompt)}", param="prompt"
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None:
            if not isinstance(text, str):
                raise InvalidRequest(f"prompt must be a string, not {type(text).__name__}", param="prompt")
            return text, encode_prompt(self.tokenizer, text, max_model_len=self.max_model_len)
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise InvalidRequest("prompt_token_ids must be a list of token ids", param="prompt_token_ids")
        return text, list(ids)


def engine_config(model: str | None, settings: dict[str, Any]) -> EngineConfig:
    """EngineConfig of a model and keywords, over the environment's. Raises ConfigError naming the wrong one."""
    known = {f.name: str(f.type) for f in fields(EngineConfig)}
    given: dict[str, Any] = {} if model is None else {"model": str(model)}
    for name, value in settings.items():
        real = ALIASES.get(name, name)
        if real not in known:
            close = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {close[0]}?" if close else f"; known settings: {', '.join(sorted(known))}"
            raise ConfigError(f"setting {name!r} is not understood{hint}")
        if not _is_a(known[real], value):
            raise ConfigError(f"{name} is {value!r}; expected {known[real]}")
        given[real] = value
    return replace(from_environment(EngineConfig()), **given)


def _is_a(kind: str, value: Any) -> bool:
    """Whether a value is what a field's annotation says, for instance "int | None"."""
    base, optional = kind.removesuffix(" | None"), kind.endswith(" | None")
    if value is None or isinstance(value, bool):
        return optional if value is None else base == "bool"
    return isinstance(value, {"str": str, "int": Integral, "float": Real, "bool": bool}[base])


class _Room:
    """How many more sequences the engine's queue takes, shared by all threads that generate."""

    def __init__(self, config: EngineConfig):
        self.size = self._left = config.max_num_seqs + min(config.max_num_seqs, config.max_waiting)
        self._changed = threading.Condition()

    def take(self, count: int, *, wait: bool) -> bool:
        """Whether there is room for `count`. With `wait`, when there is; more than it can ever hold takes it all."""
        count = min(count, self.size)
        with self._changed:
            while self._left < count:
                if not wait:
                    return False
                self._changed.wait()
            self._left -= count
            return True

    def give(self, count: int) -> None:
        with self._changed:
            self._left += min(count, self.size)
            self._changed.notify_all()


class LLM(_Front):
    """Generate for many prompts at once; they are batched by the engine. Usable as a context manager.

    Any number of threads may generate. Raises SetupError where the model cannot be had or a setting not met.
    """

    def __init__(self, model: str | None = None, *, progress: Any = None, **settings: Any):
        super().__init__(model, progress=progress, **settings)
        self._room = _Room(self.config)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in their order. use_tqdm: show progress on a terminal.

        priority: one number a prompt, lower runs first. Raises InvalidRequest before anything runs.
        """
        many = _as_list(prompts)
        params = _one_each("sampling_params", sampling_params or self.get_default_sampling_params(), len(many))
        order = _one_each("priority", 0 if priority is None else priority, len(many))
        tracked = [self._make(prompt, p, priority=rank) for prompt, p, rank in zip(many, params, order)]
        return self._run(tracked, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """generate() for one conversation or a list of them, through the model's chat template."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidRequest("messages must be a list of messages, or of conversations", param="messages")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            chat_to_ids(
                self.tokenizer,
                conversation,
                max_model_len=self.max_model_len,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate([{"prompt_token_ids": ids} for ids in prompts], sampling_params, use_tqdm=use_tqdm)

    def _run(self, tracked: list[Tracked], show_progress: bool) -> list[RequestOutput]:
        """Feed the engine so that its queue never overflows, until all are finished. Any exception aborts the rest."""
        self._thread.check_process()  # before waiting for room that its threads would give
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        waiting = iter(sorted(tracked, key=lambda t: t.add.priority))
        live: dict[str, Tracked] = {}
        upcoming = next(waiting, None)
        try:
            with _progress_bar(len(tracked), show_progress) as advance:
                while upcoming is not None or live:
                    while upcoming is not None and self._room.take(upcoming.add.params.n, wait=not live):
                        request_id = upcoming.add.request_id
                        live[request_id] = upcoming
                        self._thread.submit(upcoming.add, partial(_put, inbox, request_id))
                        upcoming = next(waiting, None)
                    request_id, what = inbox.get()
                    if isinstance(what, TokenmillError):
                        raise what
                    one = live[request_id]
                    for abort in one.take(what):
                        self._thread.abort(abort)
                    if one.state.finished:
                        self._room.give(live.pop(request_id).add.params.n)
                        advance()
        except BaseException:
            for request_id, one in live.items():
                self._thread.abort(AbortRequest(request_id, None, FinishReason.ABORT))
                self._room.give(one.add.params.n)
            raise
        return [one.output() for one in tracked]


class AsyncLLM(_Front):
    """The same engine for asyncio: generate() streams. Usable from any event loop, and as an async context manager."""

    def __init__(self, model: str | None = None, *, progress: Any = None, **settings: Any):
        super().__init__(model, progress=progress, **settings)
        self._running: dict[str, str] = {}  # the caller's request id -> the engine's

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> AsyncIterator[RequestOutput]:
        """RequestOutputs as tokens come; a slow reader gets several tokens at once. Leaving the iteration aborts.

        Raises InvalidRequest at the call; iterating raises Overloaded where the engine's queue is full, and
        EngineUnavailable after close().
        """
        params = sampling_params or self.get_default_sampling_params()
        return self._stream(self._make(prompt, params, priority=priority, request_id=request_id), output_kind)

    async def _stream(self, one: Tracked, kind: RequestOutputKind) -> AsyncIterator[RequestOutput]:
        if one.request_id in self._running:
            raise InvalidRequest(f"request_id {one.request_id!r} is already running", param="request_id")
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue = asyncio.Queue()
        shown = [(0, 0)] * one.add.params.n if kind is RequestOutputKind.DELTA else None
        engine_id = self._running[one.request_id] = one.add.request_id
        try:
            self._thread.submit(one.add, lambda what: loop.call_soon_threadsafe(inbox.put_nowait, what))
            while not one.state.finished:
                for what in [await inbox.get(), *_drain(inbox)]:
                    if isinstance(what, TokenmillError):
                        raise what
                    for abort in one.take(what):
                        self._thread.abort(abort)
                if kind is not RequestOutputKind.FINAL_ONLY or one.state.finished:
                    yield one.output(shown)
        finally:
            del self._running[one.request_id]
            if not one.state.finished:
                self._thread.abort(AbortRequest(engine_id, None, FinishReason.ABORT))

    def chat(
        self, messages: Sequence[Message], *args: Any, chat_template: str | None = None, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """generate() for one conversation, through the model's chat template or the one given."""
        ids = chat_to_ids(self.tokenizer, messages, max_model_len=self.max_model_len, template=chat_template)
        return self.generate({"prompt_token_ids": ids}, *args, **kwargs)

    async def abort(self, request_id: str) -> None:
        """Its stream ends with finish_reason "abort". Unknown ids are ignored: it may have just finished."""
        if request_id in self._running:
            self._thread.abort(AbortRequest(self._running[request_id], None, FinishReason.ABORT))


def _put(inbox: queue.SimpleQueue, request_id: str, what: list[TokenDelta] | TokenmillError) -> None:
    inbox.put((request_id, what))


def _drain(inbox: asyncio.Queue) -> Iterator[Any]:
    while not inbox.empty():
        yield inbox.get_nowait()


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts must be a prompt or a list of them, not {type(prompts).__name__}", param="prompts"
        )
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)  # type: ignore[list-item]


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return list(value)


@contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Any]:
    """Something to call once a finished prompt."""
    if not wanted or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
