"""The runner: turns a StepPlan into the arrays of one execute() call, and what it wrote into a StepResult.

It knows the Executor and the step's inputs, not the model. All buffers are made once; a step fills views of them. Row i
of the buffers belongs to whoever sits there (`seats`): a decode that keeps its row from step to step costs one
comparison, only newcomers and new pages are written.

launch() fills and starts a step in a worker thread, where execute() runs with the GIL released; Flight.wait() gives the
result. The tokens of the step before must be known by then: penalties, bad words and the input itself need them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..backends.interface import Executor, SamplingInputs, SamplingOutputs
from ..cache.pages import Lease
from ..core import Request, RowResult, StepPlan, StepResult, TokenLogprobs
from ..program import StepInputs
from ..sampling.batch import SamplingBatch

Clock = Callable[[], float]


class Flight:
    """A step that has been launched. wait() once; it raises what execute() raised."""

    def __init__(self, plan: StepPlan, work: Future | tuple[float, float], finish: Callable[[], list[RowResult]]):
        self.plan = plan
        self._work = work
        self._finish = finish

    def wait(self) -> StepResult:
        started, finished = self._work.result() if isinstance(self._work, Future) else self._work
        return StepResult(self.plan.step_id, self._finish(), started, finished)


class Runner:
    def __init__(
        self,
        executor: Executor,
        *,
        page_size: int,
        max_tokens: int,
        max_requests: int,
        max_logit_rows: int,
        max_pages_per_request: int,
        clock: Clock = time.monotonic,
    ):
        self.executor = executor
        self.page_size = page_size
        self.clock = clock
        self.sampling = SamplingBatch(max_requests, max_logit_rows)
        self._seats: list[Lease | None] = [None] * max_requests
        self._token_ids = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._slots = np.zeros(max_tokens, np.int32)
        self._q_start = np.zeros(max_requests + 1, np.int32)
        self._kv_len = np.zeros(max_requests, np.int32)
        self._page_table = np.zeros((max_requests, max_pages_per_request), np.int32)
        self._logit_rows = np.zeros(max_logit_rows, np.int32)
        self._worker: ThreadPoolExecutor | None = None
        self.cpu_seconds = 0.0  # of execute(), where the caller's own thread ran it

    def launch(self, plan: StepPlan, *, background: bool) -> Flight:
        """Start the step. Without `background` it has run when this returns."""
        step, sampling, out, finish = self.prepare(plan)
        args = (plan.page_copies, step, sampling, out)
        if not background:
            began = time.thread_time()
            times = self._execute(*args)
            self.cpu_seconds += time.thread_time() - began
            return Flight(plan, times, finish)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-step")
        return Flight(plan, self._worker.submit(self._execute, *args), finish)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _execute(self, copies, step: StepInputs, sampling: SamplingInputs, out: SamplingOutputs) -> tuple[float, float]:
        started = self.clock()
        if copies:
            self.executor.copy_pages(copies)
        self.executor.execute(step, sampling, out)
        return started, self.clock()

    def prepare(self, plan: StepPlan):
        """Fill the buffers: (StepInputs, SamplingInputs, SamplingOutputs, a function that reads the outputs)."""
        size = self.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        q_start, kv_len = [0], []
        requests: list[Request] = []  # of each logit row, as are:
        seats: list[int] = []
        logit_rows: list[int] = []
        counters: list[int] = []
        scored: list[tuple[int, int, int]] = []
        first_score: list[int] = []  # of each row, where its logit rows begin
        for i, row in enumerate(plan.rows):
            request, start, count = row.request, row.start, row.num_scheduled_tokens
            lease = request.lease
            if self._seats[i] is not lease or lease.fresh < len(lease.pages):
                self._seat(i, request, lease)
            first_score.append(len(logit_rows))
            output = request.output_token_ids
            if count == 1 and row.samples and output:
                tokens.append(output[-1])
                positions.append(start)
                slots.append(lease.pages[start // size] * size + start % size)
            else:
                self._add_tokens(tokens, request, start, count)
                positions += range(start, start + count)
                slots += [lease.pages[p // size] * size + p % size for p in range(start, start + count)]
                if request.params.prompt_logprobs is not None and request.index == 0:
                    prompt = request.prompt_token_ids
                    offset = len(tokens) - count - start
                    for position in range(max(start, request.num_scored_tokens), min(start + count, len(prompt) - 1)):
                        scored.append((len(logit_rows), prompt[position + 1], request.params.prompt_logprobs))
                        logit_rows.append(position + offset)
                        seats.append(i)
                        requests.append(request)
                        counters.append(0)
            q_start.append(len(tokens))
            kv_len.append(start + count)
            if row.samples:
                logit_rows.append(len(tokens) - 1)
                seats.append(i)
                requests.append(request)
                counters.append(len(output))
        first_score.append(len(logit_rows))
        step = StepInputs(
            token_ids=_fill(self._token_ids, tokens),
            positions=_fill(self._positions, positions),
            slot_mapping=_fill(self._slots, slots),
            q_start=_fill(self._q_start, q_start),
            kv_len=_fill(self._kv_len, kv_len),
            page_table=self._page_table[: len(plan.rows)],
            logit_rows=_fill(self._logit_rows, logit_rows),
        )
        sampling = self.sampling.fill(seats, requests, counters, scored)
        out = self.sampling.outputs(len(logit_rows))
        return step, sampling, out, lambda: self._read(plan, first_score, sampling, out)

    def _seat(self, i: int, request: Request, lease: Lease) -> None:
        begin = lease.fresh
        if self._seats[i] is not lease:
            begin = 0
            self._seats[i] = lease
            self.sampling.seat(i, request)
        pages: array = lease.pages
        self._page_table[i, begin : len(pages)] = np.frombuffer(pages, np.int32)[begin:]
        lease.fresh = len(pages)

    @staticmethod
    def _add_tokens(tokens: list[int], request: Request, start: int, count: int) -> None:
        end, prompt = start + count, request.prompt_token_ids
        tokens += prompt[start:end]
        if end > len(prompt):
            tokens += request.output_token_ids[max(start - len(prompt), 0) : end - len(prompt)]

    @staticmethod
    def _read(plan: StepPlan, first: list[int], sampling: SamplingInputs, out: SamplingOutputs) -> list[RowResult]:
        """What execute() wrote, row by row. A scored position without finite logits gives its request token -1."""
        token_ids = out.token_ids.tolist()
        num_logprobs = sampling.num_logprobs.tolist()
        results = []
        for i, row in enumerate(plan.rows):
            begin, end = first[i], first[i + 1]
            results.append(result := RowResult(row.request))
            if row.samples:
                end -= 1
                result.token_id = token = token_ids[end]
                if num_logprobs[end] >= 0 and token >= 0:
                    result.logprobs = _logprobs(end, num_logprobs[end], out)
            if begin < end:
                result.prompt_logprobs = scores = []
                for k in range(begin, end):
                    if token_ids[k] < 0:
                        result.token_id = -1
                        break
                    scores.append(_logprobs(k, num_logprobs[k], out))
        return results


def _fill(buffer: np.ndarray, values: list[int]) -> np.ndarray:
    """The view of `buffer` that holds `values`. A step's arrays are made of lists: for some dozens of numbers that is
    several times faster than numpy's own ways to make them."""
    view = buffer[: len(values)]
    view[:] = values
    return view


def _logprobs(row: int, count: int, out: SamplingOutputs) -> TokenLogprobs:
    ids = [token for token in out.top_ids[row, :count].tolist() if token >= 0]
    return TokenLogprobs(
        int(out.token_ids[row]),
        float(out.logprobs[row]),
        int(out.ranks[row]),
        tuple(ids),
        tuple(out.top_logprobs[row, : len(ids)].tolist()),
    )
