"""Drives an executor by hand: sequences fed in chunks, pages dealt from a shuffled pack, logits collected.

What the scheduler and runner do in the engine, in the fewest lines, so that a backend can be tested without them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from tokenmill.program import StepInputs


@dataclass
class Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens in the cache


class Driver:
    """One executor and the sequences it holds, by any hashable key."""

    def __init__(self, executor, *, num_pages: int, page_size: int = 16, seed: int = 0):
        self.executor = executor
        self.page_size = page_size
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)
        self.sequences: dict[object, Sequence] = {}

    def inputs(self, chunks: dict, all_logits: bool = True) -> StepInputs:
        """The step that appends `chunks`, {key: token ids}. Logits of every row, or of each sequence's last."""
        rows, positions, slots, logit_rows, starts = [], [], [], [], [0]
        for key, tokens in chunks.items():
            s = self.sequences.setdefault(key, Sequence())
            while len(s.pages) * self.page_size < s.length + len(tokens):
                s.pages.append(self.free.pop())
            for position in range(s.length, s.length + len(tokens)):
                positions.append(position)
                slots.append(s.pages[position // self.page_size] * self.page_size + position % self.page_size)
            rows.extend(tokens)
            s.length += len(tokens)
            starts.append(len(rows))
            logit_rows.extend(range(starts[-2] if all_logits else starts[-1] - 1, starts[-1]))
        lengths = [self.sequences[key].length for key in chunks]
        table = np.full((len(chunks), max(len(self.sequences[key].pages) for key in chunks)), -1, np.int32)
        for row, key in zip(table, chunks):
            row[: len(self.sequences[key].pages)] = self.sequences[key].pages
        arrays = (np.array(a, np.int32) for a in (rows, positions, slots, starts, lengths))
        return StepInputs(*arrays, page_table=table, logit_rows=np.array(logit_rows, np.int32))

    def step(self, chunks: dict, all_logits: bool = True) -> dict:
        """Run one step; {key: logits f32 (its rows, vocab)}."""
        logits = self.executor.forward(self.inputs(chunks, all_logits))
        counts = np.cumsum([len(tokens) if all_logits else 1 for tokens in chunks.values()])[:-1]
        return dict(zip(chunks, np.split(logits, counts)))

    def run(self, tokens: list[int], chunk: int | None = None, key: object = None) -> np.ndarray:
        """Feed a whole sequence in chunks, then forget it; logits f32 (len(tokens), vocab)."""
        chunk = chunk or len(tokens)
        parts = [self.step({key: tokens[i : i + chunk]})[key] for i in range(0, len(tokens), chunk)]
        self.forget(key)
        return np.concatenate(parts)

    def forget(self, key: object) -> None:
        self.free.extend(self.sequences.pop(key).pages)
