"""The nouns every room shares: Request, SamplingParams, StepPlan, StepResult, Usage, FinishReason, the Gate protocol.

Plain data with arithmetic properties; verbs live elsewhere. Imports nothing of ours.

The one picture to keep in mind is a request's token line. Each step lets num_computed_tokens catch num_tokens:

    | cached prefix |   computed in earlier steps   |  this step's chunk  |  not yet  |
    0        num_cached_tokens            num_computed_tokens   +num_scheduled    num_tokens
    |<------------------- prompt ------------------->|<-------- output -------->|

There are no phases: prefill, chunked prefill, decode, a prefix hit and the resume after a preemption are all this line.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol


class FinishReason(str, enum.Enum):
    STOP = "stop"  # an end token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the edge of the context
    ABORT = "abort"  # the caller went away or asked for it
    ERROR = "error"  # the engine could not go on with it


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose each token. Field names and meanings are vLLM's; checked by sampling.validate before the queue.

    "off" values: top_k 0 or -1, top_p 1, min_p 0, typical_p 1, repetition_penalty 1, presence and frequency 0.
    temperature 0 (and anything below 1e-5) is greedy. seed None draws a fresh one for the request.
    logprobs/prompt_logprobs: how many alternatives to report besides the chosen token (0: only the chosen one), from
    the model's own distribution (before temperature, penalties, bias and filters), so always finite.
    max_tokens None means up to the context's edge.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class Gate(Protocol):
    """Something a request waits for before it may run: a grammar, an adapter, KV from a tier, a sibling's prefill.

    ready() is polled by the scheduler between steps and must return at once. It may raise a TokenmillError, which
    finishes the request with that error. cancel() is called exactly once if the request ends before ready() was true.
    """

    def ready(self) -> bool: ...

    def cancel(self) -> None: ...


@dataclass(eq=False, slots=True)
class Request:
    """One sequence being generated: choice `index` of the caller's request `request_id`.

    Immutable after admission: everything above the line in the class body. Only the scheduler writes below it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    index: int = 0
    seed: int = 0  # resolved and already mixed with `index`; unsigned 64-bit
    max_tokens: int = 16  # resolved: never past the context's edge
    eos_token_ids: frozenset[int] = frozenset()  # empty when ignore_eos
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0  # lower runs first and is preempted last
    namespace: str = ""  # what its cached prefix belongs to; set by the server, never by the client
    arrival_time: float = 0.0
    gates: list[Gate] = field(default_factory=list)
    # ---- written by the scheduler only
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = -1  # frozen at first admission
    num_in_flight: int = 0  # tokens scheduled in a step that has not retired
    num_preemptions: int = 0
    num_scored_tokens: int = 0  # prompt positions whose logprobs have been delivered
    first_scheduled_time: float = 0.0
    order: tuple = ()  # the policy's key: who goes first, who is preempted last
    lease: Any = None  # cache.pages.Lease while running
    sampling: Any = None  # sampling.batch.RowConstants, made once by the runner

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)


@dataclass(slots=True)
class ScheduledRequest:
    """One row of a step: `num_scheduled_tokens` tokens of `request`, from position `start`."""

    request: Request
    start: int
    num_scheduled_tokens: int
    samples: bool  # this row's last token is the request's newest one, so the step samples the next

    @property
    def end(self) -> int:
        return self.start + self.num_scheduled_tokens


@dataclass(slots=True)
class StepPlan:
    """What one step runs. Page copies (copy on write) happen before any row computes."""

    step_id: int
    rows: list[ScheduledRequest]
    page_copies: list[tuple[int, int]] = field(default_factory=list)  # (source page, destination page)

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.rows)


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class RowResult:
    """What a step gave one row. token_id is None where the row did not sample."""

    request: Request
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # where asked for: positions start+1 .. end of the prompt


@dataclass(slots=True)
class StepResult:
    step_id: int
    rows: list[RowResult]
    started: float  # time.monotonic(), seconds
    finished: float


@dataclass(slots=True, frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
