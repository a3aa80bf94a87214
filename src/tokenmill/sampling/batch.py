"""SamplingBatch: fills the SamplingInputs of a step from the requests' params, into arrays allocated once.

What a request's params say is worked out once, when the request first takes a row (RowConstants); a step only gathers
those columns and adds what changes from token to token: the counter, min_tokens, bad words, and the history that
penalties need. It knows nothing of logits.
"""

from __future__ import annotations

import numpy as np

from ..backends.interface import GREEDY_BELOW, MAX_LOGPROBS, SamplingInputs, SamplingOutputs
from ..core import Request

FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FORBIDDEN = -np.inf
EMPTY = np.zeros(0, np.int32)


class Bias:
    """What to add to some tokens' logits: ids i32 (N,), values f32 (N,)."""

    __slots__ = ("ids", "values")

    def __init__(self, pairs: list[tuple[int, float]]):
        self.ids = np.array([token for token, _ in pairs], np.int32)
        self.values = np.array([value for _, value in pairs], np.float32)

    def __add__(self, other: Bias) -> Bias:
        both = Bias([])
        both.ids = np.concatenate((self.ids, other.ids))
        both.values = np.concatenate((self.values, other.values))
        return both


NO_BIAS = Bias([])


class RowConstants:
    """What never changes about how one request samples."""

    __slots__ = ("allowed", "bias", "dynamic", "ends", "floats", "history", "num_logprobs", "phrases", "top_k")

    def __init__(self, request: Request):
        p = request.params
        self.floats = np.array([getattr(p, name) for name in FLOATS], np.float32)
        if p.temperature < GREEDY_BELOW:
            self.floats[0] = 0.0
        self.top_k = min(max(p.top_k, 0), 2**31 - 1)
        self.num_logprobs = -1 if p.logprobs is None else p.logprobs
        words = [word[0] for word in request.bad_words_ids if len(word) == 1]
        self.bias = Bias([*(p.logit_bias or {}).items(), *((token, FORBIDDEN) for token in words)])
        self.phrases: dict[int, list[tuple[int, ...]]] = {}  # bad words of several tokens, by their last but one
        for word in request.bad_words_ids:
            if len(word) > 1:
                self.phrases.setdefault(word[-2], []).append(word)
        ends = {*request.eos_token_ids, *(p.stop_token_ids or ())} if p.min_tokens > 0 else ()
        self.ends = Bias([(token, FORBIDDEN) for token in sorted(ends)])
        self.allowed = np.array(sorted(set(p.allowed_token_ids or ())), np.int32)
        penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        self.history = History(request) if penalised else None
        self.dynamic = bool(len(self.bias.ids) or len(self.allowed) or ends or self.phrases or penalised)

    def next_bias(self, request: Request) -> Bias:
        """The bias of the next token of `request`."""
        bias = self.bias
        if len(self.ends.ids) and request.num_output_tokens < request.params.min_tokens:
            bias = bias + self.ends
        if self.phrases:
            last = (request.output_token_ids or request.prompt_token_ids)[-1]
            phrases = self.phrases.get(last, ())
            forbidden = [(phrase[-1], FORBIDDEN) for phrase in phrases if ends_with(request, phrase[:-1])]
            if forbidden:
                bias = bias + Bias(forbidden)
        return bias


class History:
    """A request's tokens as an array that grows with them."""

    __slots__ = ("length", "tokens")

    def __init__(self, request: Request):
        self.tokens = np.empty(request.num_prompt_tokens + 64, np.int32)
        self.tokens[: request.num_prompt_tokens] = request.prompt_token_ids
        self.length = request.num_prompt_tokens

    def update(self, request: Request) -> np.ndarray:
        new = request.output_token_ids[self.length - request.num_prompt_tokens :]
        end = self.length + len(new)
        if end > len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.empty(len(self.tokens), np.int32)))
        self.tokens[self.length : end] = new
        self.length = end
        return self.tokens[:end]


def ends_with(request: Request, tokens: tuple[int, ...]) -> bool:
    """Whether the request's tokens, prompt included, end with `tokens`: one at least."""
    count = len(tokens)
    tail = request.output_token_ids[-count:]
    if len(tail) < count:
        tail = request.prompt_token_ids[len(tail) - count :] + tail
    return tuple(tail) == tokens


class GrowingArray:
    """A buffer that is only reallocated when a step needs more than any before."""

    def __init__(self, dtype):
        self.array = np.empty(256, dtype)

    def fill(self, parts: list[np.ndarray]) -> np.ndarray:
        size = sum(map(len, parts))
        if size > len(self.array):
            self.array = np.empty(max(size, 2 * len(self.array)), self.array.dtype)
        end = 0
        for part in parts:
            self.array[end : end + len(part)] = part
            end += len(part)
        return self.array[:end]


class SamplingBatch:
    """Columns for `max_rows` logit rows. One step at a time: views of it are handed out and reused."""

    def __init__(self, max_seats: int, max_rows: int):
        self._seat_floats = np.empty((len(FLOATS), max_seats), np.float32)
        self._seat_ints = np.empty((2, max_seats), np.int32)  # top_k, num_logprobs
        self._seat_seeds = np.empty(max_seats, np.uint64)
        self._constants: list[RowConstants | None] = [None] * max_seats
        self._num_dynamic = 0
        self._filled: tuple[list[int], SamplingInputs] | None = None  # the last step's, if nothing but counters changed
        self._floats = np.empty((len(FLOATS), max_rows), np.float32)
        self._ints = np.empty((2, max_rows), np.int32)
        self._seeds = np.empty(max_rows, np.uint64)
        self._counters = np.empty(max_rows, np.uint32)
        self._targets = np.empty(max_rows, np.int32)
        self._history_prompt_len = np.zeros(max_rows, np.int32)
        self._starts = np.zeros((3, max_rows + 1), np.int32)  # bias, allowed, history
        self._bias_ids, self._bias_values = GrowingArray(np.int32), GrowingArray(np.float32)
        self._allowed, self._history = GrowingArray(np.int32), GrowingArray(np.int32)
        self._outputs = SamplingOutputs(
            token_ids=np.empty(max_rows, np.int32),
            logprobs=np.empty(max_rows, np.float32),
            ranks=np.empty(max_rows, np.int32),
            top_ids=np.empty((max_rows, MAX_LOGPROBS), np.int32),
            top_logprobs=np.empty((max_rows, MAX_LOGPROBS), np.float32),
        )

    def seat(self, seat: int, request: Request) -> None:
        """`request` takes row `seat` of the steps from now on."""
        constants = request.sampling
        if constants is None:
            constants = request.sampling = RowConstants(request)
        self._filled = None
        before = self._constants[seat]
        self._num_dynamic += constants.dynamic - (before is not None and before.dynamic)
        self._constants[seat] = constants
        self._seat_floats[:, seat] = constants.floats
        self._seat_ints[0, seat] = constants.top_k
        self._seat_ints[1, seat] = constants.num_logprobs
        self._seat_seeds[seat] = request.seed

    def fill(
        self, seats: list[int], requests: list[Request], counters: list[int], scored: list[tuple[int, int, int]]
    ) -> SamplingInputs:
        """SamplingInputs for L logit rows.

        seats (L): the seat of each; requests, counters: the request and its number of output tokens, for each;
        scored: (row, target token, number of logprobs) of the rows that score a prompt token instead of sampling.
        """
        count = len(seats)
        if self._filled is not None and self._filled[0] == seats and not scored:
            self._counters[:count] = counters
            return self._filled[1]
        floats, ints, seeds = self._floats[:, :count], self._ints[:, :count], self._seeds[:count]
        np.take(self._seat_floats, seats, axis=1, out=floats, mode="clip")
        np.take(self._seat_ints, seats, axis=1, out=ints, mode="clip")
        np.take(self._seat_seeds, seats, out=seeds, mode="clip")
        self._counters[:count] = counters
        targets = self._targets[:count]
        targets[:] = -1
        for row, target, num_logprobs in scored:
            targets[row] = target
            ints[1, row] = num_logprobs
        starts = self._starts[:, : count + 1]
        bias_ids = allowed_ids = history_ids = EMPTY
        bias_values = self._bias_values.array[:0]
        if self._num_dynamic:
            rows = [None if targets[i] >= 0 else self._constants[seat] for i, seat in enumerate(seats)]
            biases = [c.next_bias(r) if c is not None and c.dynamic else NO_BIAS for c, r in zip(rows, requests)]
            ids = [bias.ids for bias in biases]
            bias_ids = self._bias_ids.fill(ids)
            bias_values = self._bias_values.fill([bias.values for bias in biases])
            allowed = [c.allowed if c is not None else EMPTY for c in rows]
            allowed_ids = self._allowed.fill(allowed)
            history = [c.history.update(r) if c is not None and c.history else EMPTY for c, r in zip(rows, requests)]
            history_ids = self._history.fill(history)
            for start, parts in zip(starts, (ids, allowed, history)):
                np.cumsum([len(part) for part in parts], out=start[1:])
            self._history_prompt_len[:count] = [r.num_prompt_tokens if len(h) else 0 for r, h in zip(requests, history)]
        else:
            starts[:] = 0
            self._history_prompt_len[:count] = 0
        columns = {name: floats[i] for i, name in enumerate(FLOATS)}
        inputs = SamplingInputs(
            **columns,
            top_k=ints[0],
            num_logprobs=ints[1],
            seed=seeds,
            counter=self._counters[:count],
            target=targets,
            bias_start=starts[0],
            bias_ids=bias_ids,
            bias_values=bias_values,
            allowed_start=starts[1],
            allowed_ids=allowed_ids,
            history_start=starts[2],
            history_ids=history_ids,
            history_prompt_len=self._history_prompt_len[:count],
        )
        self._filled = None if self._num_dynamic or scored else (seats, inputs)
        return inputs

    def outputs(self, count: int) -> SamplingOutputs:
        """Where execute() writes. top_ids are -1 where nothing is written."""
        o = self._outputs
        o.top_ids[:count] = -1
        return SamplingOutputs(
            o.token_ids[:count], o.logprobs[:count], o.ranks[:count], o.top_ids[:count], o.top_logprobs[:count]
        )
