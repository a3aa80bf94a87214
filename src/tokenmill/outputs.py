"""What LLM and AsyncLLM give back: RequestOutput and its parts, named as in vLLM, and how they are made of the engine's
deltas. Knows no engine and no thread.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace

from .engine.messages import AbortRequest, AddRequest, TokenDelta
from .text.output import Logprob as DescribedLogprob
from .text.output import RequestState
from .text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position. rank 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice. finish_reason: "stop", "length", "abort", "error", or None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one a token: the token itself first, then the best alternatives
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id; None for the model's own end token
    error: str | None = None  # with finish_reason "error"

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on time.monotonic(); 0.0 for what has not happened."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices. prompt is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # None at the first position, which nothing predicts
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class RequestOutputKind(enum.Enum):
    """What each RequestOutput of AsyncLLM.generate holds."""

    CUMULATIVE = 0  # all so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


def _logprob_dict(described: DescribedLogprob) -> dict[int, Logprob]:
    own = {described.token_id: Logprob(described.logprob, described.rank, described.text)}
    for rank, candidate in enumerate(described.top, 1):
        own.setdefault(candidate.token_id, Logprob(candidate.logprob, rank, candidate.text))
    return own


class Tracked:
    """One request in flight: its state, and RequestOutputs made of it."""

    def __init__(self, add: AddRequest, prompt: str | None, tokenizer: Tokenizer, request_id: str | None = None):
        self.add = add
        self.prompt = prompt
        self.request_id = request_id or add.request_id  # as the caller knows it
        self.state = RequestState(add, tokenizer)
        self.metrics = RequestMetrics(arrival_time=add.arrival_time)
        self._logprobs: list[list[dict[int, Logprob]]] = [[] for _ in range(add.params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def take(self, deltas: list[TokenDelta]) -> list[AbortRequest]:
        """Process the engine's deltas; gives what the engine must be told to stop."""
        aborts = []
        for delta in deltas:
            shown = self.state.process(delta)
            if shown is not None and shown.abort is not None:
                aborts.append(shown.abort)
            if delta.token_ids and not self.metrics.first_token_time:
                self.metrics.first_token_time = time.monotonic()
        self.metrics.first_scheduled_time = self.state.first_scheduled_time
        if self.state.finished and not self.metrics.finished_time:
            self.metrics.finished_time = time.monotonic()
        return aborts

    def output(self, shown: list[tuple[int, int]] | None = None) -> RequestOutput:
        """All so far, or with `shown`, what is new past those (characters, tokens) of each choice; updates it."""
        outputs = []
        for choice in self.state.choices:
            chars, tokens = shown[choice.index] if shown else (0, 0)
            if shown:
                shown[choice.index] = (len(choice.text), len(choice.token_ids))
            described = choice.logprobs
            if described is not None:
                made = self._logprobs[choice.index]
                made += map(_logprob_dict, described[len(made) :])
            outputs.append(
                CompletionOutput(
                    index=choice.index,
                    text=choice.text[chars:],
                    token_ids=choice.token_ids[tokens:],
                    cumulative_logprob=None if described is None else sum(p.logprob for p in described),
                    logprobs=None if described is None else made[tokens:],
                    finish_reason=None if choice.finish_reason is None else choice.finish_reason.value,
                    stop_reason=choice.stop_reason,
                    error=choice.error,
                )
            )
        prompt_logprobs = self.state.prompt_logprobs
        if self._prompt_logprobs is None and prompt_logprobs and len(prompt_logprobs) == len(self.add.prompt_token_ids):
            self._prompt_logprobs = [None if p is None else _logprob_dict(p) for p in self.state.describe_prompt()]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.add.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=outputs,
            finished=self.state.finished,
            num_cached_tokens=self.state.num_cached_tokens,
            metrics=replace(self.metrics),
        )
