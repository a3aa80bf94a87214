"""Speed that can be tested anywhere: what is compared runs in one process, in turn, and only ratios count.

A machine that is slow is slow for all contestants; one that is disturbed gets more rounds. The best of a contestant's
rounds is what it can do, the rest were disturbed. A floor stands at about six tenths of the ratio measured on a quiet
machine: losing half of it fails, another generation of processors does not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

ROUNDS = 5  # at least
SECONDS = 8.0  # of trying, where the floor is not reached


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """A contestant: seconds that `work` takes."""

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def race(
    yardstick: Callable[[], float], contestant: Callable[[], float], *, floor: float, rounds: int = ROUNDS
) -> float:
    """Best seconds of `yardstick` over those of `contestant`, as soon as that reaches `floor`, or after SECONDS."""
    best = [float("inf"), float("inf")]
    began = time.perf_counter()
    ran = 0
    while True:
        best = [min(best[0], yardstick()), min(best[1], contestant())]
        ran += 1
        ratio = best[0] / best[1]
        if ran >= rounds and (ratio >= floor or time.perf_counter() - began > SECONDS):
            print(f"{ratio:.3g} (floor {floor:g}, {ran} rounds)", end=" ")
            return ratio


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, Python's and C's, `work` calls: a count of instructions that no other process disturbs."""
    count = 0

    def on_event(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    work()  # what is only made once is made
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count - 1  # setprofile(None) itself
