"""What crosses the border between a front end (LLM, the server) and the engine. Plain structs, msgpack on the wire."""

from __future__ import annotations

import msgspec

from ..core import FinishReason, SamplingParams, TokenLogprobs


class AddRequest(msgspec.Struct, tag=True, kw_only=True):
    """A validated request, tokenised. The engine makes params.n sequences of it; choice i has the seed (seed, i)."""

    request_id: str  # unique among live requests; made by the front end, never by the client
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []  # [] with ignore_eos
    bad_words_ids: list[list[int]] = []
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    namespace: str = ""
    arrival_time: float = 0.0  # time.monotonic() of the same machine


class AbortRequest(msgspec.Struct, tag=True):
    """Stop all choices (index None) or one of a request. Unknown ids are ignored: it may have just finished."""

    request_id: str
    index: int | None = None
    finish_reason: FinishReason = FinishReason.ABORT  # STOP when the front end matched a stop string


class Drain(msgspec.Struct, tag=True):
    """Finish what is accepted, take nothing new, then exit."""


class TokenDelta(msgspec.Struct, array_like=True, kw_only=True):
    """What one step added to one choice. Deltas of a choice arrive in order; the last has finish_reason set."""

    request_id: str
    index: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # the next prompt positions, from position 1; choice 0 only
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id that ended it; None for an end token of the model
    num_cached_tokens: int = 0  # set on the first delta and after
    error: str | None = None  # with finish_reason ERROR: a message safe to show
    first_scheduled_time: float = 0.0  # time.monotonic()


class EngineStats(msgspec.Struct, tag=True, kw_only=True):
    """Gauges now and counters since start; sent after steps (at most some times a second) and whenever idle begins."""

    num_running: int = 0
    num_waiting: int = 0
    num_gated: int = 0
    pages_total: int = 0
    pages_used: int = 0  # leased by live requests
    pages_cached: int = 0  # held by the prefix tree only
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0  # computed, plus those found in the cache
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    busy_seconds: float = 0.0  # measured inside execute()
    host_cpu_seconds: float = 0.0  # CPU of the loop's thread outside execute(): messages, plans, arrays, commits


class OutputBatch(msgspec.Struct, tag=True):
    deltas: list[TokenDelta]
    stats: EngineStats | None = None


class EngineReady(msgspec.Struct, tag=True, kw_only=True):
    """The engine has loaded and can take requests."""

    model_name: str
    model_digest: str
    max_model_len: int
    vocab_size: int
    decisions: list[tuple[str, str]]


class EngineFailed(msgspec.Struct, tag=True, kw_only=True):
    """The engine could not start or cannot go on. One line, safe to show."""

    message: str


ToEngine = AddRequest | AbortRequest | Drain
FromEngine = OutputBatch | EngineReady | EngineFailed
