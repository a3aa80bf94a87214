"""Every op, in every backend and instruction set, against the reference computed in float64."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import numpy as np
import pytest

from tests.support.executors import NUM_PAGES, cpu, reference
from tests.support.steps import Driver
from tokenmill.backends.check import compare
from tokenmill.backends.reference import ReferenceBackend
from tokenmill.program import OPS

from .cases import CASES, SHAPES, label

BACKENDS = {"reference": reference}
if find_spec("tokenmill.backends.cpu.executor") is not None:
    from tokenmill.backends.cpu import _native

    BACKENDS |= {f"cpu/{isa}": functools.partial(cpu, isa=isa) for isa in _native.instruction_sets()}


def runs_of(case):
    """Token counts of each step, and the token ids: t is the t-th of the whole run."""
    total = sum(sum(step.values()) for step in case.steps)
    ids = iter(range(total))
    return total, [{key: [next(ids) for _ in range(count)] for key, count in step.items()} for step in case.steps]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "shape"), SHAPES, ids=[label(*s) for s in SHAPES])
def test_agrees_with_the_float64_reference(case, shape, backend):
    total, steps = runs_of(case)
    program, op = case.program(shape, total)
    limits = dict(num_pages=NUM_PAGES, max_tokens=total, max_requests=8, max_logit_rows=total)
    driver = Driver(BACKENDS[backend](program, keep_values=True, **limits), num_pages=NUM_PAGES)
    exact = ReferenceBackend(NUM_PAGES, dtype=np.float64)
    for chunks in steps:
        step = driver.inputs(chunks)
        driver.executor.forward(step)
        report = compare(program, driver.executor, step, exact)
        assert report.failure is None, report
        assert any(d.op is op for d in report.differences)


def test_every_op_of_the_table_has_a_case():
    assert {case.op for case in CASES} == set(OPS)
