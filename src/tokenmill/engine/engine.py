"""The engine's loop: requests in, steps run, deltas out. Synchronous, owned by one thread.

It fans a request of n choices out into n sequences, drives Scheduler and Runner, and keeps the two ways to run a step
side by side: plain (plan, run, commit) and overlapped (the next step is planned while the native call runs). Both give
the same tokens. It knows no text, no server and no model.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..backends.interface import Executor
from ..backends.select import SCORING_ROWS, max_logit_rows
from ..cache.pages import PagePool
from ..config import ResolvedEngine
from ..core import FinishReason, Request, RequestStatus, StepPlan
from ..errors import InvalidRequest, Overloaded
from ..sampling.seeds import choice_seed
from .messages import AbortRequest, AddRequest, EngineStats, TokenDelta
from .policy import Policy
from .runner import Clock, Flight, Runner
from .scheduler import Scheduler
from .step_report import Observer, report

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then the executor is taken to be broken


class SiblingGate:
    """Choices 1.. of a request wait for choice 0 to compute the prompt; then they find it in the prefix tree."""

    def __init__(self, leader: Request):
        self.leader = leader

    def ready(self) -> bool:
        leader = self.leader
        return (
            leader.num_output_tokens > 0
            or leader.num_computed_tokens >= leader.num_prompt_tokens
            or leader.status is RequestStatus.FINISHED
        )

    def cancel(self) -> None:
        pass


@dataclass(slots=True)
class Group:
    """The live choices of one AddRequest."""

    requests: list[Request]
    num_live: int
    private_namespace: str | None  # shared by the choices alone, when prefixes are not cached


class Engine:
    def __init__(
        self,
        executor: Executor,
        resolved: ResolvedEngine,
        *,
        overlap: bool = True,
        policy: Policy | None = None,
        clock: Clock = time.monotonic,
        observers: Iterable[Observer] = (),
    ):
        config = resolved.config
        self.resolved = resolved
        self.clock = clock
        self.overlap = overlap
        self.observers = list(observers)
        self.pool = PagePool(resolved.num_pages, resolved.page_size)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=config.max_num_batched_tokens,
            max_running=config.max_num_seqs,
            max_model_len=resolved.max_model_len,
            max_score_rows=SCORING_ROWS,
            enable_prefix_caching=config.enable_prefix_caching,
            step_seconds=config.step_seconds,
            policy=policy,
            clock=clock,
        )
        self.runner = Runner(
            executor,
            page_size=resolved.page_size,
            max_tokens=config.max_num_batched_tokens,
            max_requests=config.max_num_seqs,
            max_logit_rows=max_logit_rows(resolved),
            max_pages_per_request=-(-self.scheduler.max_model_len // resolved.page_size),
            clock=clock,
        )
        self._groups: dict[str, Group] = {}
        self._flight: Flight | None = None
        self._failed_steps = 0
        self._num_added = 0
        self._last_check = float("-inf")

    # ---- requests

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises InvalidRequest (it could never run) or Overloaded (the queue is full)."""
        n, config = message.params.n, self.resolved.config
        live = len(self.scheduler.waiting) + len(self.scheduler.gated) + len(self.scheduler.running)
        limit = config.max_num_seqs + config.max_waiting  # a burst counts before a step has admitted any of it
        if message.request_id in self._groups:
            raise InvalidRequest(f"request id {message.request_id!r} is in use", param="request_id")
        if n > limit:
            raise InvalidRequest(f"n is {n}; this engine takes at most {limit} sequences", param="n")
        if live + n > limit:
            raise Overloaded(
                f"{live} sequences run and wait; {config.max_num_seqs} may run (max_num_seqs) and "
                f"{config.max_waiting} wait (max_waiting)"
            )
        private = None
        if n > 1 and not self.resolved.config.enable_prefix_caching:
            private = f"\0{message.request_id}"
        requests = self._fan_out(message, private)
        for request in requests:
            self.scheduler.add(request)
        self._groups[message.request_id] = Group(requests, n, private)

    def _fan_out(self, message: AddRequest, private: str | None) -> list[Request]:
        params = message.params
        seed = params.seed
        if seed is None:
            seed = self.resolved.config.seed
            seed = int.from_bytes(os.urandom(8), "little") if seed is None else choice_seed(seed, self._num_added)
        self._num_added += 1
        requests: list[Request] = []
        for index in range(params.n):
            request = Request(
                request_id=message.request_id,
                prompt_token_ids=message.prompt_token_ids,
                params=params,
                index=index,
                seed=choice_seed(seed, index),
                max_tokens=self.scheduler.max_model_len if params.max_tokens is None else params.max_tokens,
                eos_token_ids=frozenset(() if params.ignore_eos else message.eos_token_ids),
                bad_words_ids=tuple(tuple(word) for word in message.bad_words_ids if word),
                tenant=message.tenant,
                weight=message.weight,
                priority=message.priority,
                namespace=message.namespace if private is None else private,
                arrival_time=message.arrival_time or self.clock(),
            )
            if index:
                request.gates.append(SiblingGate(requests[0]))
            requests.append(request)
        return requests

    def abort(self, message: AbortRequest) -> None:
        """End a request's live choices, or one of them. Their last deltas come with the next step()."""
        group = self._groups.get(message.request_id)
        for request in group.requests if group else ():
            if request.status is not RequestStatus.FINISHED and message.index in (None, request.index):
                self.scheduler.abort(request, message.finish_reason)

    # ---- steps

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenDelta]:
        """Run a step and give what it added to each request. Returns at once if there is nothing to run."""
        deltas = self._step_overlapped() if self.overlap else self._step_plain()
        for delta in deltas:
            if delta.finish_reason is not None:
                self._ended(delta.request_id)
        if not self.scheduler.has_work:
            self._check()
        return deltas

    def _step_plain(self) -> list[TokenDelta]:
        plan = self.scheduler.schedule()
        if plan is None:
            return self._nothing_to_run()
        flight = self._launch(plan)
        return self._land(flight) if flight else self._nothing_to_run()

    def _step_overlapped(self) -> list[TokenDelta]:
        flight = self._flight
        if flight is None:
            plan = self.scheduler.schedule()
            flight = self._launch(plan) if plan else None
        if flight is None:
            return self._nothing_to_run()
        prepared = self.scheduler.schedule()  # while the native call runs
        deltas = self._land(flight)
        self._flight = self._launch(prepared) if prepared else None
        return deltas

    def _launch(self, plan: StepPlan) -> Flight | None:
        """Start a step without the rows of requests that have finished since it was planned. None: nothing was left."""
        plan.rows = [row for row in plan.rows if row.request.status is RequestStatus.RUNNING]
        if not plan.rows:
            self.scheduler.void(plan)
            return None
        try:
            return self.runner.launch(plan, background=self.overlap)
        except Exception as error:
            self._fail(plan, error)
            return None

    def _land(self, flight: Flight) -> list[TokenDelta]:
        try:
            result = flight.wait()
        except Exception as error:
            self._fail(flight.plan, error)
            return self.scheduler.take_deltas()
        self._failed_steps = 0
        deltas = self.scheduler.commit(result)
        if self.observers:
            running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
            step_report = report(flight.plan, result, num_running=running, num_waiting=waiting)
            for observer in self.observers:
                try:
                    observer(step_report)
                except Exception:  # who watches may not stop the work
                    log.exception("an observer of the engine failed")
        return deltas

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """A step that could not run ends its requests, and theirs alone; an executor that keeps failing is broken."""
        log.error("step %d failed: %s", plan.step_id, error, exc_info=error)
        self._failed_steps += 1
        for row in plan.rows:
            if row.request.status is not RequestStatus.FINISHED:
                self.scheduler.abort(row.request, FinishReason.ERROR, "the engine failed to compute this request")
        self.scheduler.void(plan)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _nothing_to_run(self) -> list[TokenDelta]:
        deltas = self.scheduler.take_deltas()
        if self.scheduler.gated and not deltas:
            time.sleep(0.0005)  # only gates to wait for: let those who open them run
        return deltas

    def _ended(self, request_id: str) -> None:
        group = self._groups[request_id]
        group.num_live -= 1
        if group.num_live == 0:
            del self._groups[request_id]
            if group.private_namespace is not None:
                self.scheduler.forget(group.private_namespace)

    # ---- for those who watch

    def stats(self) -> EngineStats:
        """Gauges now and counters since start; a copy. To be called on the thread that steps."""
        stats = copy.copy(self.scheduler.stats)
        stats.host_cpu_seconds = time.thread_time() - self.runner.cpu_seconds
        stats.num_running = len(self.scheduler.running)
        stats.num_waiting = len(self.scheduler.waiting)
        stats.num_gated = len(self.scheduler.gated)
        stats.pages_used = self.pool.num_leased
        stats.pages_cached = self.pool.num_idle
        return stats

    def _check(self) -> None:
        """The engine has fallen idle: is every page accounted for? Raises RuntimeError. At most once a second."""
        now = time.monotonic()
        if now - self._last_check >= 1:
            self._last_check = now
            self.scheduler.check_idle()

    def close(self) -> None:
        """Wait for the step in flight, if any, and stop the worker thread."""
        if self._flight is not None:
            self._land(self._flight)
            self._flight = None
        self.runner.close()
