"""Each kernel reaches its share of what this processor can do, in every instruction set, on one thread.

The yardstick is a loop of nothing but multiply-adds in the same instruction set (csrc/ceilings.inl.h), int8 for
quantised products and float32 for the rest, measured in turn with the kernel.
"""

from __future__ import annotations

import pytest

from tests.ops.cases import CASES, label
from tests.ops.perf import timer
from tests.ops.test_ops import BACKENDS
from tokenmill.backends.cpu import _native

from .race import race

CEILING_BYTES = 1 << 20  # memory is not what is measured here
SECONDS = 0.01  # of the yardstick
RUNS = 3  # of the kernel
INT8, FLOAT = 2, 1  # places in measure_ceilings()

# (op, shape, rows, ceiling): share of the ceiling that each instruction set must reach
FLOORS: list[tuple[str, dict, int, int, dict[str, float]]] = [
    ("linear", dict(dim=1536, out=(576,), format="Q4_1", residual=True), 128, INT8, dict(avx512=0.33, avx2=0.36)),
    ("linear", dict(dim=1536, out=(576,), format="Q4_1", residual=True), 1, INT8, dict(avx512=0.13, avx2=0.22)),
    ("linear", dict(dim=1024, out=(1024,), format="Q4_K"), 128, INT8, dict(avx512=0.33, avx2=0.36)),
    ("linear", dict(dim=1024, out=(1024,), format="Q6_K"), 128, INT8, dict(avx512=0.22, avx2=0.28)),
    ("linear", dict(dim=1024, out=(1024,), format="Q8_0"), 128, INT8, dict(avx512=0.3, avx2=0.22)),
    ("linear", dict(dim=1024, out=(1024,), format="F16"), 128, FLOAT, dict(avx512=0.42, avx2=0.44)),
    ("attention", dict(heads=9, kv_heads=3, head_dim=64), 128, FLOAT, dict(avx512=0.37, avx2=0.43)),
    ("attention", dict(heads=9, kv_heads=3, head_dim=64), 1, FLOAT, dict(avx512=0.22, avx2=0.28)),
    ("act_mul", dict(dim=1536, act="silu"), 128, FLOAT, dict(avx512=0.05, avx2=0.075)),
    ("rms_norm", dict(dim=576), 128, FLOAT, dict(avx512=0.065, avx2=0.085)),
]
CASES_HERE = [
    pytest.param(isa, op, shape, rows, ceiling, floors[isa], id=f"{isa}-{op}-{shape.get('format', 'F32')}-{rows}")
    for op, shape, rows, ceiling, floors in FLOORS
    for isa in _native.instruction_sets()
    if isa in floors
]


@pytest.mark.parametrize(("isa", "op", "shape", "rows", "ceiling", "floor"), CASES_HERE)
def test_reaches_its_share_of_the_ceiling(isa, op, shape, rows, ceiling, floor):
    case = next(case for case in CASES if case.op == op)
    seconds, operations, _ = timer(case, shape, rows, BACKENDS[f"cpu/{isa}"])

    def of_ceiling() -> float:
        return operations / _native.measure_ceilings(isa, 1, CEILING_BYTES, SECONDS)[ceiling]

    def of_kernel() -> float:
        return min(seconds() for _ in range(RUNS))

    assert race(of_ceiling, of_kernel, floor=floor) >= floor, label(case, shape)
