"""The scenario driver of engine and matrix tests: runs requests through a real Engine, collects what each choice got.

    asks = [Ask([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, logprobs=3)), ...]
    run = drive(executor, asks, num_pages=64, budget=16, max_num_seqs=4, overlap=False)
    run[0].tokens, run[0].logprobs, run[2, 1].finish_reason, run.stats.num_preemptions

Every engine is checked for lost pages when it has fallen idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill.config import EngineConfig, ResolvedEngine
from tokenmill.core import FinishReason, SamplingParams, TokenLogprobs
from tokenmill.engine.engine import Engine
from tokenmill.engine.messages import AbortRequest, AddRequest, EngineStats, TokenDelta

MAX_STEPS = 200_000
FORCED_PREEMPTIONS = 40  # of one drive(); without an end, short chunks would never get through a prompt


@dataclass
class Ask:
    prompt: list[int]
    params: SamplingParams
    eos: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    namespace: str = ""
    priority: int = 0
    at_step: int = 0  # added once so many steps have run
    abort_at_step: int | None = None


@dataclass
class Reply:
    """What one choice got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    deltas: list[TokenDelta] = field(default_factory=list)

    def take(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        self.deltas.append(delta)
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs += delta.prompt_logprobs or []
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error
        self.num_cached_tokens = delta.num_cached_tokens


@dataclass
class Run:
    replies: dict[tuple[int, int], Reply]
    stats: EngineStats
    num_steps: int
    engine: Engine

    def __getitem__(self, key: int | tuple[int, int]) -> Reply:
        """run[ask] is its choice 0, run[ask, index] any."""
        return self.replies[key if isinstance(key, tuple) else (key, 0)]

    def answers(self) -> dict[tuple[int, int], tuple]:
        """All that must be the same whatever the company: tokens, logprobs, and why each ended."""
        return {
            key: (r.tokens, r.logprobs, r.prompt_logprobs, r.finish_reason, r.stop_reason)
            for key, r in self.replies.items()
        }


def make_engine(
    executor,
    *,
    num_pages: int,
    page_size: int = 16,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    budget: int = 256,
    max_waiting: int = 100_000,
    caching: bool = True,
    overlap: bool = True,
    seed: int | None = None,
    step_seconds: float = 60.0,
    **engine_options,
) -> Engine:
    """step_seconds: so long that prompts are cut by the budget alone, unless a test asks for less."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_waiting=max_waiting,
        enable_prefix_caching=caching,
        seed=seed,
        step_seconds=step_seconds,
    )
    resolved = ResolvedEngine(config, max_model_len or num_pages * page_size, num_pages, 1, page_size)
    return Engine(executor, resolved, overlap=overlap, **engine_options)


def drive(
    executor,
    asks: Sequence[Ask],
    *,
    engine: Engine | None = None,
    check_each_step: bool = False,
    preempt_every: int = 0,
    **settings,
) -> Run:
    """Run all asks to their end, in `engine` (of an earlier Run, with its cache) or in a new one made of settings.

    preempt_every: at each so-manieth step the last of the running requests is preempted (the cache must hold it alone).
    """
    engine = engine or make_engine(executor, **settings)
    replies: dict[tuple[int, int], Reply] = {}
    first = engine.scheduler.stats.num_steps
    names = {f"{id(replies)}-{i}": i for i in range(len(asks))}
    pending = sorted(zip(names, asks), key=lambda pair: pair[1].at_step)
    aborts = [(name, ask.abort_at_step) for name, ask in zip(names, asks) if ask.abort_at_step is not None]
    step = 0
    while pending or engine.has_work:
        while pending and pending[0][1].at_step <= step:
            name, ask = pending.pop(0)
            engine.add(
                AddRequest(
                    request_id=name,
                    prompt_token_ids=ask.prompt,
                    params=ask.params,
                    eos_token_ids=list(ask.eos),
                    bad_words_ids=[list(word) for word in ask.bad_words],
                    namespace=ask.namespace,
                    priority=ask.priority,
                )
            )
            replies.update({(names[name], k): Reply() for k in range(ask.params.n)})
        for name, when in aborts:
            if when == step:
                engine.abort(AbortRequest(name))
        forced = preempt_every and step % preempt_every == preempt_every - 1
        if forced and step < FORCED_PREEMPTIONS * preempt_every and engine.scheduler.running:
            engine.scheduler.preempt_last()
        for delta in engine.step():
            replies[names[delta.request_id], delta.index].take(delta)
        if check_each_step:
            engine.scheduler.tree.check([r.lease for r in engine.scheduler.running])
        step += 1
        assert step < MAX_STEPS, "the engine does not come to an end"
    assert all(r.finish_reason is not None for r in replies.values()), "a request was never answered"
    engine.scheduler.tree.check()
    stats = engine.stats()
    assert stats.pages_used == 0 and stats.num_running == stats.num_waiting == stats.num_gated == 0
    return Run(replies, stats, stats.num_steps - first, engine)
