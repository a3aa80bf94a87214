"""A fake device with a virtual clock: the real scheduler, pool, tree and runner at scale, with no model behind them.

FakeExecutor keeps what a model keeps, at one number a slot: each token writes a hash of itself and its position to its
slot; the next token is a hash of what all slots of the request's context hold. So a wrong page table, a lost copy, a
page reused too early or a missing position changes the tokens, and the right ones can be said beforehand (expected()).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..backends.interface import MAX_LOGPROBS, SamplingInputs, SamplingOutputs
from ..program import StepInputs
from ..sampling.seeds import MASK64, splitmix64


class VirtualClock:
    """Call it for the time in seconds; only a FakeExecutor (or a test) moves it."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a fixed part, one a token, one a position attended to."""

    step: float = 2e-3
    token: float = 2e-4
    context: float = 2e-8


def _kept(tokens, positions) -> np.ndarray:
    """What each token leaves in its slot: SplitMix64's finaliser of (token, position), uint64 (T,)."""
    x = np.array(tokens, np.uint64, ndmin=1) << np.uint64(32)
    x += np.asarray(positions, np.uint64) + np.uint64(1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _token(context: int, seed: int, counter: int, vocab_size: int) -> int:
    return splitmix64((context + seed + counter) & MASK64) % vocab_size


class FakeExecutor:
    """An Executor without a model. Allowed lists and biases of -inf are obeyed: the next token id is taken."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int = 16,
        vocab_size: int = 1000,
        clock: VirtualClock | None = None,
        cost: StepCost | None = None,
        broken_tokens: Iterable[int] = (),
    ):
        """broken_tokens: a context that ends in one of these gives logits that are not finite."""
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.clock = clock or VirtualClock()
        self.cost = cost or StepCost()
        self.broken_tokens = frozenset(broken_tokens)
        self.memory = np.zeros(num_pages * page_size, np.uint64)
        self.num_steps = 0
        self.num_tokens = 0

    @property
    def decisions(self) -> list[tuple[str, str]]:
        return [("device", "fake, virtual clock")]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        pages = self.memory.reshape(-1, self.page_size)
        for source, destination in pairs:
            pages[destination] = pages[source]

    def execute(self, step: StepInputs, sampling: SamplingInputs, out: SamplingOutputs) -> None:
        contexts = self._contexts(step)
        for i, context in enumerate(contexts):
            out.token_ids[i] = self._choose(context, i, sampling)
            if step.token_ids[step.logit_rows[i]] in self.broken_tokens:
                out.token_ids[i] = -1
            out.logprobs[i] = -1.0 - context % 97
            out.ranks[i] = 1
            count = min(max(int(sampling.num_logprobs[i]), 0), MAX_LOGPROBS, self.vocab_size)
            out.top_ids[i, :count] = np.arange(count)
            out.top_logprobs[i, :count] = out.logprobs[i]
        self.num_steps += 1
        self.num_tokens += step.num_tokens
        attended = int((step.positions + 1).sum())
        self.clock.now += self.cost.step + self.cost.token * step.num_tokens + self.cost.context * attended

    def forward(self, step: StepInputs) -> np.ndarray:
        logits = np.zeros((len(step.logit_rows), self.vocab_size), np.float32)
        for i, context in enumerate(self._contexts(step)):
            logits[i, _token(context, 0, 0, self.vocab_size)] = 1.0
        return logits

    def _contexts(self, step: StepInputs) -> list[int]:
        """For each logit row, the sum of what its context's slots hold."""
        self.memory[step.slot_mapping] = _kept(step.token_ids, step.positions)
        request_of = np.searchsorted(step.q_start, step.logit_rows, side="right") - 1
        contexts = []
        for row, r in zip(step.logit_rows, request_of):
            length = int(step.positions[row]) + 1
            pages = step.page_table[r, : -(-length // self.page_size)].astype(np.int64)
            slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()[:length]
            contexts.append(int(self.memory[slots].sum(dtype=np.uint64)))
        return contexts

    def _choose(self, context: int, i: int, s: SamplingInputs) -> int:
        if s.target[i] >= 0:
            return int(s.target[i])
        token = _token(context, int(s.seed[i]), int(s.counter[i]), self.vocab_size)
        allowed = s.allowed_ids[s.allowed_start[i] : s.allowed_start[i + 1]]
        if len(allowed):
            token = int(allowed[token % len(allowed)])
        lo, hi = s.bias_start[i], s.bias_start[i + 1]
        forbidden = set(s.bias_ids[lo:hi][np.isneginf(s.bias_values[lo:hi])].tolist())
        for _ in range(self.vocab_size):
            if token not in forbidden:
                return token
            token = (token + 1) % self.vocab_size
        return -1


def expected(prompt: Sequence[int], count: int, *, seed: int, vocab_size: int) -> list[int]:
    """The tokens that a FakeExecutor gives a request alone; `seed` is the sequence's (sampling.seeds.choice_seed)."""
    context = int(_kept(prompt, np.arange(len(prompt))).sum(dtype=np.uint64))
    tokens: list[int] = []
    for i in range(count):
        tokens.append(_token(context, seed, i, vocab_size))
        context += int(_kept(tokens[-1], len(prompt) + i)[0])
    return tokens
