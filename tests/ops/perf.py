"""How fast each op is, against what its flops and bytes allow: python -m tests.ops.perf [op ...] [--backend cpu/avx2].

Each case's `perf` shapes run as in the tests, on one thread, timed by the executor's own profile. GB/s and GFLOP/s
follow from the op table's formulas. Decode is 1 row, prefill 128; the fastest run counts, the rest were disturbed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from tests.support.steps import Driver
from tokenmill.program import OPS, StepShape

from .cases import CASES, OpCase, label
from .test_ops import BACKENDS

SECONDS = 0.3  # a shape is run for so long
CONTEXT = 256  # positions before an attention step
PROFILED = [name for name in BACKENDS if name != "reference"]


def timer(case: OpCase, shape: dict, rows: int, factory) -> tuple[Callable[[], float], float, float]:
    """(seconds of the op in a step of `rows` tokens, each time it is called; flops; bytes). Attention after CONTEXT."""
    program, op = case.program(shape, rows)
    num_pages = -(-(CONTEXT + rows) // 16)
    limits = dict(num_pages=num_pages, max_tokens=CONTEXT, max_requests=1, max_logit_rows=rows, num_threads=1)
    driver = Driver(factory(program, **limits), num_pages=num_pages)
    if case.op == "attention":
        driver.step({0: [0] * CONTEXT}, all_logits=False)
    step = driver.inputs({0: list(range(rows))}, all_logits=case.op == "select_rows")
    driver.executor.profile(True)

    def seconds() -> float:
        driver.executor.forward(step)
        return sum(s for name, where, s in driver.executor.op_seconds() if (name, where) == (op.name, op.where))

    size = StepShape(rows, len(step.logit_rows), int((step.positions + 1).sum()))
    return seconds, OPS[op.name].flops(op, size), OPS[op.name].bytes(op, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(OPS)}; all of them if none is named")
    parser.add_argument("--backend", choices=PROFILED, default=PROFILED[0])
    arguments = parser.parse_args()
    print(f"{arguments.backend}\n{'op':56} {'rows':>5} {'us':>9} {'GB/s':>7} {'GFLOP/s':>8}")
    for case in CASES:
        for shape in case.perf if not arguments.ops or case.op in arguments.ops else ():
            for rows in (1, 128):
                run, flops, moved = timer(case, shape, rows, BACKENDS[arguments.backend])
                seconds, stop = float("inf"), time.perf_counter() + SECONDS
                while time.perf_counter() < stop:
                    seconds = min(seconds, run())
                rates = f"{moved / seconds / 1e9:7.1f} {flops / seconds / 1e9:8.1f}"
                print(f"{label(case, shape):56} {rows:5} {seconds * 1e6:9.1f} {rates}", flush=True)


if __name__ == "__main__":
    main()
