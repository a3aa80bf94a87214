"""What the engine asks of a backend: the Executor protocol and the arrays that cross it.

One execute() is one step: run the Program for all rows, then choose (or score) a token for each logit row. Arrays are
allocated once by the runner; a step passes views of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..program import StepInputs

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
MAX_LOGPROBS = 20  # alternatives a row can report


@dataclass(slots=True)
class SamplingInputs:
    """How to treat each of the step's L logit rows. CSR lists: row i owns ids[start[i]:start[i + 1]].

    The rule, in this order (backends/reference_sampler.py is the specification):
      1. logprobs are reported from the model's own logits, before anything below.
      2. + bias (a bias of -inf forbids a token); tokens outside a non-empty `allowed` list are forbidden.
      3. repetition_penalty over every history token; frequency * count + presence over the output part of the history.
      4. temperature < GREEDY_BELOW: the highest logit, the lowest id among equals. Otherwise divide by temperature, and
         keep in turn top_k, top_p, min_p, typical_p of the renormalised survivors (ties broken by lower id).
      5. u = philox(seed, counter) in [0, 1): the first survivor, by ascending id, whose cumulative probability > u.
    A row with target >= 0 samples nothing: it reports the logprob of `target` (a prompt token).
    A row whose logits are not finite numbers gives token -1.
    """

    temperature: np.ndarray  # f32 (L,)
    top_k: np.ndarray  # i32 (L,); 0: off
    top_p: np.ndarray  # f32 (L,)
    min_p: np.ndarray  # f32 (L,)
    typical_p: np.ndarray  # f32 (L,)
    repetition_penalty: np.ndarray  # f32 (L,)
    presence_penalty: np.ndarray  # f32 (L,)
    frequency_penalty: np.ndarray  # f32 (L,)
    seed: np.ndarray  # u64 (L,)
    counter: np.ndarray  # u32 (L,): number of output tokens before this one
    num_logprobs: np.ndarray  # i32 (L,); -1: none, 0: the chosen token only, else the best N as well (<= MAX_LOGPROBS)
    target: np.ndarray  # i32 (L,); -1: sample
    bias_start: np.ndarray  # i32 (L+1,)
    bias_ids: np.ndarray  # i32
    bias_values: np.ndarray  # f32
    allowed_start: np.ndarray  # i32 (L+1,)
    allowed_ids: np.ndarray  # i32; an empty list allows every token
    history_start: np.ndarray  # i32 (L+1,); empty for rows without penalties
    history_ids: np.ndarray  # i32: prompt tokens, then output tokens
    history_prompt_len: np.ndarray  # i32 (L,): how many of them are prompt


@dataclass(slots=True)
class SamplingOutputs:
    """Written by execute(), row by row. logprob, rank and top_* are only written where num_logprobs >= 0."""

    token_ids: np.ndarray  # i32 (L,); target where scoring
    logprobs: np.ndarray  # f32 (L,)
    ranks: np.ndarray  # i32 (L,): 1 + the number of tokens with a higher logit
    top_ids: np.ndarray  # i32 (L, MAX_LOGPROBS), best first
    top_logprobs: np.ndarray  # f32 (L, MAX_LOGPROBS)


class Executor(Protocol):
    """A Program made ready on one device: weights packed, KV pages and workspace allocated.

    Not re-entrant: one execute() or copy_pages() at a time. execute() releases the GIL and allocates nothing.
    """

    def execute(self, step: StepInputs, sampling: SamplingInputs, out: SamplingOutputs) -> None: ...

    def forward(self, step: StepInputs) -> np.ndarray:
        """Run a step without sampling; a copy of the logits, float32 (L, vocab). For tests and quality measures."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in every layer, keys and values."""
        ...

    @property
    def decisions(self) -> list[tuple[str, str]]:
        """What was chosen at load: (what, which), for the start-up log and `tokenmill plan`."""
        ...
