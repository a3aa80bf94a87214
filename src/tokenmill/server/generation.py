"""One API request on its way through the engine and back: submit, turn tokens into text, answer whole or as events.

    adds (one a prompt) -> EngineClient.submit -> TokenDelta -> text.RequestState -> ChoiceDelta -> Format -> JSON / SSE

A watcher waits for the client's disconnect all the while; it aborts the engine's sequences at once, also while they are
queued. What the answer looks like is a Format's business (routes/chat.py, routes/completions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
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

    def __init__(self, serving: Serving, prompts: list[Prompt], *, count_output: bool = True):
        self.serving = serving
        self.prompts = prompts
        self.count_output = count_output
        self.failed = False  # it ended with an error that was told inside the stream
        self.arrival = time.monotonic()
        for prompt in prompts:
            prompt.add.arrival_time = self.arrival
        self.stream = serving.engine.submit([prompt.add for prompt in prompts])
        self._by_id = {prompt.add.request_id: prompt for prompt in prompts}
        self._unfinished = sum(len(prompt.choices) for prompt in prompts)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.stream.close()
        left = not self.failed and (error is None or isinstance(error, (ClientDisconnected, asyncio.CancelledError)))
        self.serving.metrics.finished[FinishReason.ABORT if left else FinishReason.ERROR] += self._unfinished
        self._unfinished = 0

    @property
    def finished(self) -> bool:
        return not self._unfinished

    async def next(self) -> list[tuple[Prompt, ChoiceDelta]]:
        """What came since the last call; [] when every choice has finished. Raises TokenmillError."""
        out: list[tuple[Prompt, ChoiceDelta]] = []
        while not out and self._unfinished:
            deltas = await self.stream.next()
            if not deltas:
                raise TokenmillError("the engine ended this request without saying how")
            now = time.monotonic()
            for delta in deltas:
                prompt = self._by_id[delta.request_id]
                changed = prompt.state.process(delta)
                self._observe_tokens(prompt, delta, now)
                if changed is None:
                    continue
                if changed.finish_reason is FinishReason.ERROR:
                    raise TokenmillError(changed.error or "the engine could not go on with this request")
                if changed.abort is not None:
                    self.stream.stop_choice(changed.abort)
                if changed.finish_reason is not None:
                    self._observe_end(prompt, changed, now)
                out.append((prompt, changed))
        return out

    def _observe_tokens(self, prompt: Prompt, delta: TokenDelta, now: float) -> None:
        new, i, metrics = len(delta.token_ids), delta.index, self.serving.metrics
        if not new:
            return
        metrics.generation_tokens += new
        if prompt.first_token_times[i]:
            metrics.inter_token_latency.observe((now - prompt.last_token_times[i]) / new, new)
        else:
            prompt.first_token_times[i] = now
            metrics.time_to_first_token.observe(now - self.arrival)
            if delta.first_scheduled_time:
                metrics.queue_time.observe(max(0.0, delta.first_scheduled_time - self.arrival))
            if i == 0:
                prompt.num_cached_tokens = delta.num_cached_tokens
                metrics.prompt_tokens += prompt.num_tokens
                metrics.request_prompt_tokens.observe(prompt.num_tokens)
        prompt.last_token_times[i] = now

    def _observe_end(self, prompt: Prompt, changed: ChoiceDelta, now: float) -> None:
        metrics, i, count = self.serving.metrics, changed.index, changed.num_output_tokens
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

    def chunks(self, prompt: Prompt, changed: ChoiceDelta) -> list[Any]:
        """The chunk choices one delta makes, in order."""
        ...

    def answer(self, choices: list[Any]) -> Answer:
        """A chunk of a stream around chunk choices."""
        ...

    def whole(self, generation: Generation) -> Answer: ...


class GenerationResponse:
    """The ASGI answer: whole or streamed, ended by the client's leaving as well as by the engine's finishing."""

    def __init__(self, generation: Generation, form: Format, *, stream: bool, usage: bool, usage_always: bool = False):
        self.generation = generation
        self.form = form
        self.streamed = stream
        self.usage = usage
        self.usage_always = usage_always

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            with contextlib.suppress(ClientDisconnected), self.generation:
                if self.streamed:
                    await self._stream(send)
                else:
                    while await self.generation.next():
                        pass
                    await JSON(self.form.whole(self.generation))(scope, receive, send)
        finally:
            watcher.cancel()

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.generation.stream.cancel(ClientDisconnected("the client left"))

    async def _stream(self, send: Any) -> None:
        """Everything that one step of the engine gave goes out in one write."""
        writer = sse.EventWriter(send)
        generation = self.generation
        try:
            while changes := await generation.next():
                data = b"".join(
                    self._event([choice], None)
                    for prompt, changed in changes
                    for choice in self.form.chunks(prompt, changed)
                )
                if generation.finished:
                    data += self._event([], generation.usage()) if self.usage else b""
                    data += sse.DONE
                if data:
                    await writer.write(data, last=generation.finished)
        except ClientDisconnected:
            raise
        except TokenmillError as error:
            if not writer.started:
                raise  # still a plain answer with a status
            generation.failed = True
            await writer.write(sse.event(error_object(error)), last=True)

    def _event(self, choices: list[Any], usage: UsageBody | None) -> bytes:
        answer = self.form.answer(choices)
        if self.usage or self.usage_always:
            answer.usage = self.generation.usage() if self.usage_always else usage
        return sse.event(answer)
