"""One API request on its way through the engine and back: submit, turn tokens into text, answer whole or as events.

    adds (one a prompt) -> EngineClient.submit -> TokenDelta -> text.RequestState -> ChoiceDelta -> Format -> JSON / SSE

Tokens come as calls, Generation.deliver() once a step, and go out in that call as events; the request's own task wakes
for the first of them, for the end, and where the client is behind. A watcher waits for the client's disconnect all the
while; it aborts the engine's sequences at once, also while they are queued. What the answer looks like is a Format's
business (routes/chat.py, routes/completions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..core import FinishReason
from ..engine.messages import AddRequest, TokenDelta
from ..errors import TokenmillError
from ..text.output import ChoiceDelta, ChoiceState, RequestState
from . import sse
from .errors import JSON, ClientDisconnected, error_object
from .protocol import Answer, PromptTokensDetails, UsageBody
from .state import Serving


class Prompt:
    """One prompt of an API request, with the state of its choices."""

    __slots__ = ("add", "first_token_times", "last_token_times", "num_cached_tokens", "position", "state", "text")

    def __init__(self, position: int, add: AddRequest, tokenizer: Any, text: str | None = None):
        self.position = position  # among the request's prompts
        self.add = add
        self.text = text  # where it is echoed
        self.state = RequestState(add, tokenizer)
        self.num_cached_tokens = 0  # of choice 0: its siblings share its pages, which is no hit
        self.first_token_times = [0.0] * add.params.n
        self.last_token_times = [0.0] * add.params.n

    @property
    def num_tokens(self) -> int:
        return len(self.add.prompt_token_ids)

    @property
    def choices(self) -> list[ChoiceState]:
        return self.state.choices


class Generation:
    """The sequences of one API request. Use as a context: leaving it aborts whatever still runs."""

    __slots__ = (
        "_by_id",
        "_unfinished",
        "arrival",
        "count_output",
        "error",
        "error_told",
        "on_changes",
        "on_end",
        "prompts",
        "serving",
        "stream",
    )

    def __init__(self, serving: Serving, prompts: list[Prompt], *, count_output: bool = True):
        self.serving = serving
        self.prompts = prompts
        self.count_output = count_output
        self.on_changes: Callable[[list[tuple[Prompt, ChoiceDelta]]], None] = lambda changes: None
        self.on_end: Callable[[], None] = lambda: None
        self.error: TokenmillError | None = None  # why there will be no more
        self.error_told = False  # inside the stream
        self.arrival = time.monotonic()
        for prompt in prompts:
            prompt.add.arrival_time = self.arrival
        self.stream = serving.engine.submit([prompt.add for prompt in prompts], self)
        self._by_id = {prompt.add.request_id: prompt for prompt in prompts}
        self._unfinished = sum(len(prompt.choices) for prompt in prompts)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.stream.close()
        left = not self.error_told and (
            error is None or isinstance(error, (ClientDisconnected, asyncio.CancelledError))
        )
        self.serving.metrics.finished[FinishReason.ABORT if left else FinishReason.ERROR] += self._unfinished
        self._unfinished = 0

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """client.Sink: what a step gave becomes text, and goes to on_changes."""
        if self.error is not None:
            return
        now = time.monotonic()
        changes: list[tuple[Prompt, ChoiceDelta]] = []
        for delta in deltas:
            prompt = self._by_id[delta.request_id]
            changed = prompt.state.process(delta)
            if delta.token_ids:
                self._observe_tokens(prompt, delta, now)
            if changed is None:
                continue
            if changed.finish_reason is not None:
                if changed.finish_reason is FinishReason.ERROR:
                    return self.fail(TokenmillError(changed.error or "the engine could not go on with this request"))
                if changed.abort is not None:
                    self.stream.stop_choice(changed.abort)
                self._observe_end(prompt, changed, now)
            changes.append((prompt, changed))
        if changes:
            self.on_changes(changes)
        if self.finished:
            self.on_end()

    def fail(self, error: TokenmillError) -> None:
        """client.Sink"""
        if not self.finished:
            self.error = self.error or error
        self.on_end()

    def _observe_tokens(self, prompt: Prompt, delta: TokenDelta, now: float) -> None:
        new, i, metrics = len(delta.token_ids), delta.index, self.serving.metrics
        metrics.generation_tokens += new
        last = prompt.last_token_times[i]
        prompt.last_token_times[i] = now
        if last:
            metrics.inter_token_latency.observe((now - last) / new, new)
            return
        prompt.first_token_times[i] = now
        metrics.time_to_first_token.observe(now - self.arrival)
        if delta.first_scheduled_time:
            metrics.queue_time.observe(max(0.0, delta.first_scheduled_time - self.arrival))
        if i == 0:
            prompt.num_cached_tokens = delta.num_cached_tokens
            metrics.prompt_tokens += prompt.num_tokens
            metrics.request_prompt_tokens.observe(prompt.num_tokens)

    def _observe_end(self, prompt: Prompt, changed: ChoiceDelta, now: float) -> None:
        metrics, i = self.serving.metrics, changed.index
        count = len(prompt.choices[i].token_ids)
        assert changed.finish_reason is not None
        self._unfinished -= 1
        metrics.finished[changed.finish_reason] += 1
        metrics.e2e_latency.observe(now - self.arrival)
        metrics.request_generation_tokens.observe(count)
        if count > 1:
            span = prompt.last_token_times[i] - prompt.first_token_times[i]
            metrics.request_time_per_output_token.observe(span / (count - 1))

    def usage(self) -> UsageBody:
        """Prompts count once each, whatever their number of choices; every sampled token counts, end tokens too."""
        prompt_tokens = sum(prompt.num_tokens for prompt in self.prompts)
        output = sum(prompt.state.usage.completion_tokens for prompt in self.prompts) if self.count_output else 0
        cached = sum(prompt.num_cached_tokens for prompt in self.prompts)
        return UsageBody(prompt_tokens, output, prompt_tokens + output, PromptTokensDetails(cached))


class Format(Protocol):
    """How one endpoint says it."""

    text_only: bool  # no logprobs and no token ids are asked for: chunks differ in their text

    def chunks(self, prompt: Prompt, changed: ChoiceDelta) -> list[Any]:
        """The chunk choices one delta makes, in order."""
        ...

    def answer(self, choices: list[Any]) -> Answer:
        """A chunk of a stream around chunk choices."""
        ...

    def whole(self, generation: Generation) -> Answer: ...


class GenerationResponse:
    """The ASGI answer: whole or streamed, ended by the client's leaving as well as by the engine's finishing."""

    __slots__ = ("_templates", "events", "form", "generation", "streamed", "usage", "usage_always")

    def __init__(self, generation: Generation, form: Format, *, stream: bool, usage: bool, usage_always: bool = False):
        self.generation = generation
        self.form = form
        self.usage = usage
        self.usage_always = usage_always
        self.events = sse.EventStream()
        self.streamed = stream
        self._templates: dict[tuple[int, int], sse.Template] = {}  # by prompt and choice, of those that have begun
        if stream:
            generation.on_changes = self._put
        generation.on_end = self.events.wake

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        generation = self.generation
        try:
            with contextlib.suppress(ClientDisconnected), generation:
                if self.streamed:
                    return await self._stream(scope, send)
                await self.events.wait()
                if generation.error is not None:
                    raise generation.error
                await JSON(self.form.whole(generation))(scope, receive, send)
        finally:
            watcher.cancel()

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.generation.stream.cancel(ClientDisconnected("the client left"))

    async def _stream(self, scope: Any, send: Any) -> None:
        generation, events = self.generation, self.events
        last = False
        while not last:
            await events.wait()
            last = generation.finished
            if (error := generation.error) is not None:
                if not events.started or isinstance(error, ClientDisconnected):
                    raise error  # with a status, or to nobody
                generation.error_told = last = True
                events.hold(sse.event(error_object(error)))
            await events.flush(scope, send, last=last)

    def _put(self, changes: list[tuple[Prompt, ChoiceDelta]]) -> None:
        """Everything that one step of the engine gave goes out in one write; the last one with the end of the answer,
        which is for the task to send."""
        if len(changes) == 1:
            data = self._encode(*changes[0])
        else:
            data = b"".join([self._encode(prompt, changed) for prompt, changed in changes])
        if not self.generation.finished:
            if data:
                self.events.put(data)
            return
        if self.usage:
            data += self._event([], self.generation.usage())
        self.events.hold(data + sse.DONE)

    def _encode(self, prompt: Prompt, changed: ChoiceDelta) -> bytes:
        """The events of one delta. All but the first and the last of a choice come from a template."""
        key = prompt.position, changed.index
        template = self._templates.get(key)
        if template is not None and changed.finish_reason is None:
            return template.fill(changed.text) if changed.text else b""
        data = b"".join([self._event([choice], None) for choice in self.form.chunks(prompt, changed)])
        if self.form.text_only and not self.usage_always and changed.finish_reason is None:
            pattern = self.form.chunks(prompt, ChoiceDelta(changed.index, sse.PLACE))
            self._templates[key] = sse.Template(self._event(pattern, None))
        return data

    def _event(self, choices: list[Any], usage: UsageBody | None) -> bytes:
        answer = self.form.answer(choices)
        if self.usage or self.usage_always:
            answer.usage = self.generation.usage() if self.usage_always else usage
        return sse.event(answer)
