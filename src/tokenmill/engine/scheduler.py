"""The scheduler: which tokens of which requests the next step computes, and what its result means for them.

There are no phases. Each step lets num_computed_tokens catch num_tokens within a token budget; a decode is a request
that lacks one token, a prefill one that lacks many (core.py has the picture). Two verbs: schedule() gives the next
StepPlan, commit() takes its StepResult. It knows counts, pages and gates; nothing of models, samplers or text.

One step may be in flight while the next is planned. A request in flight is then taken to be where it will be: its
position is known, its newest token is not, and no decision needs it. Should it finish instead, its row of the prepared
plan is dropped (the engine does that; rows of requests that are not running are void).

Why nothing deadlocks or storms:
  - A request whose tokens cannot fit in all pages together is refused by add().
  - Running requests are served in policy order and preempted from its end, so the first one can take every page there
    is and finishes. A preempted request gives its pages back, keeps its tokens and its place, and recomputes.
  - A request is admitted only if all its known tokens fit beside room to grow for everyone running: one page each at
    first, twice as many for each time it has been preempted. So each attempt goes at least twice as far as the one
    before, and a request is preempted at most 1 + log2(its pages) times by those before it.
  - Everyone running gets at least one token a step: no more run than the token budget has tokens.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter

from ..cache.pages import Lease, PagePool
from ..cache.prefix import PrefixTree
from ..core import FinishReason, Request, RequestStatus, RowResult, ScheduledRequest, StepPlan, StepResult
from ..errors import ContextLengthExceeded, TokenmillError
from .messages import EngineStats, TokenDelta
from .pace import Pace
from .policy import Policy, PriorityThenArrival

RUNNING, WAITING, FINISHED = RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.FINISHED
by_order = attrgetter("order")
PAGES_WORTH_WAITING = 4  # of a common prefix that another request is just computing


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        token_budget: int,
        max_running: int,
        max_model_len: int,
        max_score_rows: int = 64,
        enable_prefix_caching: bool = True,
        step_seconds: float = 0.05,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """max_score_rows: prompt positions that one step may score for prompt_logprobs.

        step_seconds: about how long a step may take while answers are being written; prompts are cut to that.
        """
        self.pool = pool
        self.tree = PrefixTree(pool)
        self.token_budget = token_budget
        self.max_running = min(max_running, token_budget)
        self.max_model_len = min(max_model_len, pool.num_pages * pool.page_size)
        self.max_score_rows = max_score_rows
        self.enable_prefix_caching = enable_prefix_caching
        self.policy = policy or PriorityThenArrival()
        self.pace = Pace(step_seconds)
        self.clock = clock
        self.waiting: list[Request] = []  # in policy order, as is running
        self.running: list[Request] = []
        self.gated: list[Request] = []
        self.stats = EngineStats(pages_total=pool.num_pages)
        self._plans: dict[int, StepPlan] = {}  # not yet committed
        self._step_id = 0
        self._deltas: list[TokenDelta] = []  # finished outside a step: aborts, gates that failed

    # ---- in and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises ContextLengthExceeded if it could never run, whatever else is running."""
        room = self.max_model_len - request.num_prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {request.num_prompt_tokens} tokens; with at least one token of output it must fit in "
                f"{self.max_model_len}",
                param="prompt",
            )
        request.max_tokens = min(request.max_tokens, room)
        request.order = self.policy.key(request)
        if request.gates:
            self.gated.append(request)
        else:
            insort(self.waiting, request, key=by_order)

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> None:
        """End a live request now. Its pages come back at once, those of a step in flight when that retires."""
        if request.status is RUNNING:
            self.running.remove(request)
        self._finish(request, reason)
        self._deltas.append(self._delta(request, error=error))

    def forget(self, namespace: str) -> None:
        """Drop a namespace that no live request uses."""
        self.tree.drop(namespace)

    def take_deltas(self) -> list[TokenDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.gated or self._plans or self._deltas)

    def check_idle(self) -> None:
        """With no live request, every page is free or idle in the tree. Raises RuntimeError if not."""
        self.pool.check((), (node.page for node in self.tree.nodes()))

    # ---- the first verb

    def schedule(self) -> StepPlan | None:
        """Plan a step, or None if nothing can run now."""
        if self.gated:
            self._open_gates()
        num_preemptions = self.stats.num_preemptions
        if self.waiting and self.running:
            self._make_way(self.waiting[0])
        rows: list[ScheduledRequest] = []
        spare = self.token_budget - len(self.running)
        if any(request.output_token_ids for request in self.running):
            spare = self.pace.limit(spare)
        score_rows = self.max_score_rows
        page_size = self.pool.page_size
        i = 0
        while i < len(self.running):  # preemption shortens it from the end
            request = self.running[i]
            i += 1
            start = request.num_computed_tokens + request.num_in_flight
            wanted = len(request.prompt_token_ids) + len(request.output_token_ids) - start
            if wanted == 0:  # the step in flight samples its newest token
                if request.num_output_tokens + 1 >= request.max_tokens:
                    continue
                count = 1
            elif wanted == 1:
                count = 1
            else:
                count = min(wanted, 1 + spare)
            if request.params.prompt_logprobs is not None and self._scores(request):
                count = min(count, score_rows)
                score_rows -= count
                if count == 0:
                    continue
            end = start + count
            if end > len(request.lease.pages) * page_size and not self._make_room(request, end):
                continue
            spare -= count - 1
            request.num_in_flight += count
            rows.append(ScheduledRequest(request, start, count, count >= wanted))
        plan = StepPlan(self._step_id + 1, rows)
        if self.waiting and num_preemptions == self.stats.num_preemptions:
            self._admit(plan, spare, score_rows)
        if not rows:
            return None
        self._step_id = plan.step_id
        self._plans[plan.step_id] = plan
        self.pool.begin_step(plan.step_id)
        return plan

    def _make_way(self, request: Request) -> None:
        """Priority is a class: where the first in the queue has no seat or no pages, the last of a lower class goes."""
        if self.running[-1].priority > request.priority and not request.num_in_flight:
            pages = -(-request.num_tokens // self.pool.page_size)
            if len(self.running) >= self.max_running or pages + self._headroom(request) > self.pool.num_available:
                self.preempt_last()

    def _headroom(self, request: Request) -> int:
        """Pages that must stay available for growth when `request` is admitted: never more than can be grown into."""
        if not self.running:
            return 0
        if request.num_preemptions == 0:
            return len(self.running) + 1
        growth, size = 1 << min(request.num_preemptions, 30), self.pool.page_size
        return sum(
            min(growth, (r.num_prompt_tokens + r.max_tokens) // size - r.num_tokens // size + 1)
            for r in (*self.running, request)
        )

    def _make_room(self, request: Request, end: int) -> bool:
        """Pages for positions up to `end`, preempting from the end of the order. False: not in this step."""
        while not request.lease.extend(end):
            if self.pool.returning or request.lease.source >= 0:
                return False  # what the step in flight gives back will do
            if self.preempt_last() is request:
                return False
        return True

    def preempt_last(self) -> Request:
        """Take its pages from the last of the running, which goes back to the queue. Only while nothing is planned."""
        request = self.running.pop()
        self.stats.num_preemptions += 1
        request.num_preemptions += 1
        self._give_back(request)
        request.status = WAITING
        request.num_computed_tokens = 0
        insort(self.waiting, request, key=by_order)
        return request

    def _admit(self, plan: StepPlan, budget: int, score_rows: int) -> None:
        """Start waiting requests, in order, while there are tokens, seats and pages for them."""
        at = 0  # before it stand those that wait for a prefix
        while at < len(self.waiting) and budget > 0 and len(self.running) + at < self.max_running:
            request = self.waiting[at]
            scores = self._scores(request)
            if request.num_in_flight or (scores and score_rows == 0):
                return
            if self.enable_prefix_caching and not scores and self._is_being_computed(request):
                at += 1
                continue
            cached = self._lease(request)
            if cached is None:
                return
            self.waiting.pop(at)
            insort(self.running, request, key=by_order)
            request.status = RUNNING
            request.num_computed_tokens = cached
            if request.num_cached_tokens < 0:
                self._first_admission(request, cached)
            count = min(request.num_tokens - cached, budget)
            if scores:
                count = min(count, score_rows)
                score_rows -= count
            budget -= count
            request.num_in_flight = count
            samples = cached + count == request.num_tokens
            plan.rows.append(ScheduledRequest(request, cached, count, samples))
            if request.lease.source >= 0:
                plan.page_copies.append((request.lease.source, request.lease.pages[cached // self.pool.page_size]))

    def _is_being_computed(self, request: Request) -> bool:
        """Whether a running request is about to compute pages that this one needs too: then it starts after them, so
        that requests which arrive together with one long prefix compute it once."""
        return any(
            other.num_computed_tokens < other.num_prompt_tokens
            and other.namespace == request.namespace
            and not self._scores(other)  # it gets on slowly
            and self.tree.lacks(other.lease, other.prompt_token_ids, request.prompt_token_ids, PAGES_WORTH_WAITING)
            for other in self.running
        )

    def _lease(self, request: Request) -> int | None:
        """Lease pages for all known tokens; gives how many are cached, or None if the request must go on waiting."""
        headroom = self._headroom(request)
        if self.pool.num_available <= headroom:
            return None
        lease, cached = Lease(self.pool, request.namespace), 0
        if self.enable_prefix_caching or request.params.n > 1:
            limit = request.num_tokens - 1
            if self._scores(request):
                limit = min(limit, request.num_scored_tokens)
            if limit > 0:
                tokens = request.prompt_token_ids + request.output_token_ids
                lease, cached = self.tree.match(request.namespace, tokens, limit)
        if not self._fits(request, lease, headroom):
            lease.give_up_copy()  # its source is a page more than the request needs: perhaps the one that is missing
            cached = lease.num_inserted
            if not self._fits(request, lease, headroom):
                lease.release()
                return None
        request.lease = lease
        return cached

    def _fits(self, request: Request, lease: Lease, headroom: int) -> bool:
        needed = -(-request.num_tokens // self.pool.page_size) - len(lease.pages)
        return needed + headroom <= self.pool.num_available and lease.extend(request.num_tokens)

    def _first_admission(self, request: Request, cached: int) -> None:
        request.num_cached_tokens = cached
        request.first_scheduled_time = self.clock()
        if request.index == 0:  # the prompt of n choices counts once
            self.stats.prompt_tokens += request.num_prompt_tokens
            if self.enable_prefix_caching and not self._scores(request):
                self.stats.prefix_cache_queries += request.num_prompt_tokens
                self.stats.prefix_cache_hits += cached

    @staticmethod
    def _scores(request: Request) -> bool:
        """Whether prompt positions of it still want logprobs: choice 0 reports them, once."""
        return (
            request.params.prompt_logprobs is not None
            and request.index == 0
            and request.num_scored_tokens < request.num_prompt_tokens - 1
        )

    def _open_gates(self) -> None:
        gated, self.gated = self.gated, []
        for request in gated:
            try:
                while request.gates and request.gates[0].ready():
                    request.gates.pop(0)
            except Exception as error:
                message = error.message if isinstance(error, TokenmillError) else "a condition of the request failed"
                self.abort(request, FinishReason.ERROR, message)
                continue
            if request.gates:
                self.gated.append(request)
            else:
                insort(self.waiting, request, key=by_order)

    # ---- the second verb

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take a step's result: append tokens, finish requests, remember prefixes. Gives all deltas not yet taken."""
        plan = self._plans.pop(result.step_id)
        self.pool.retire_step(result.step_id)
        self.stats.num_steps += 1
        self.stats.busy_seconds += result.finished - result.started
        self.pace.observe(plan.num_scheduled_tokens, len(plan.rows), result.finished - result.started)
        deltas = self._deltas
        for row, row_result in zip(plan.rows, result.rows):
            request = row.request
            request.num_in_flight -= row.num_scheduled_tokens
            if request.status is FINISHED:
                continue
            if request.status is RUNNING:
                self._advance(request, row.start + row.num_scheduled_tokens)
            delta = self._take(request, row, row_result)
            if delta is not None:
                deltas.append(delta)
        self.running = [request for request in self.running if request.status is RUNNING]
        return self.take_deltas()

    def void(self, plan: StepPlan) -> None:
        """A planned step will give no result. Whatever it had rows for must have finished."""
        del self._plans[plan.step_id]
        self.pool.retire_step(plan.step_id)

    def _advance(self, request: Request, end: int) -> None:
        """Positions before `end` are computed: insert what has become whole, and a prompt that siblings wait for."""
        lease = request.lease
        if lease.source >= 0:
            lease.copied()
        if (
            request.params.n > 1
            and request.index == 0
            and request.num_computed_tokens < request.num_prompt_tokens <= end
        ):
            self.tree.insert(lease, request.prompt_token_ids[lease.num_inserted :])
        request.num_computed_tokens = end
        size = self.pool.page_size
        if self.enable_prefix_caching and end - lease.num_inserted >= size:
            self.tree.insert(lease, self._tokens(request, lease.num_inserted, end // size * size))

    def _take(self, request: Request, row: ScheduledRequest, result: RowResult) -> TokenDelta | None:
        if result.prompt_logprobs:
            request.num_scored_tokens += len(result.prompt_logprobs)
        token = result.token_id
        if token is None:
            return self._delta(request, prompt_logprobs=result.prompt_logprobs) if result.prompt_logprobs else None
        error = None
        token_ids, logprobs = [token], None
        if token < 0:
            token_ids, error = [], "no token can be chosen: the logits are not finite, or every token is forbidden"
            self._finish(request, FinishReason.ERROR)
        elif request.max_tokens == 0:
            token_ids = []
            self._finish(request, FinishReason.LENGTH)
        else:
            request.output_token_ids.append(token)
            self.stats.generation_tokens += 1
            if result.logprobs is not None:
                logprobs = [result.logprobs]
            if token in request.eos_token_ids:
                self._finish(request, FinishReason.STOP)
            elif request.params.stop_token_ids and token in request.params.stop_token_ids:
                request.stop_reason = token
                self._finish(request, FinishReason.STOP)
            elif len(request.output_token_ids) >= request.max_tokens:
                self._finish(request, FinishReason.LENGTH)
        return self._delta(request, token_ids, logprobs, result.prompt_logprobs, error)

    # ---- endings

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and take it out of the queues; out of `running`, which may be being walked, the caller does."""
        if request.status is WAITING:
            for queue in (self.waiting, self.gated):
                if request in queue:
                    queue.remove(request)
        request.status, request.finish_reason = FINISHED, reason
        for gate in request.gates:
            with suppress(Exception):
                gate.cancel()
        request.gates = []
        if request.lease is not None:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """Insert what was computed, the page that is not full included, and release the lease."""
        lease = request.lease
        if self.enable_prefix_caching:
            self.tree.insert(lease, self._tokens(request, lease.num_inserted, request.num_computed_tokens))
        lease.release()
        request.lease = None

    @staticmethod
    def _tokens(request: Request, start: int, stop: int) -> list[int]:
        num_prompt = request.num_prompt_tokens
        if start >= num_prompt:
            return request.output_token_ids[start - num_prompt : stop - num_prompt]
        tokens = request.prompt_token_ids[start:stop]
        if stop > num_prompt:
            tokens = tokens + request.output_token_ids[: stop - num_prompt]
        return tokens

    @staticmethod
    def _delta(request: Request, token_ids=None, logprobs=None, prompt_logprobs=None, error=None) -> TokenDelta:
        return TokenDelta(
            request_id=request.request_id,
            index=request.index,
            token_ids=token_ids or [],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens if request.num_cached_tokens > 0 else 0,
            error=error,
            first_scheduled_time=request.first_scheduled_time,
        )
