"""The specification itself: each reference op, in float64, is torch's function of the same name or composition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.steps import Driver
from tokenmill.backends.reference import ReferenceExecutor

from .cases import SHAPES, label, tensor

LENGTHS = {0: 25, 1: 1, 2: 18}


@pytest.mark.parametrize(
    ("case", "shape"),
    [s for s in SHAPES if not s[1].get("softcap")],
    ids=[label(*s) for s in SHAPES if not s[1].get("softcap")],
)
def test_reference_is_torch(case, shape):
    total = sum(LENGTHS.values())
    program, op = case.program(shape, total)
    executor = ReferenceExecutor(program, num_pages=8, dtype=np.float64, keep_values=True)
    ids = iter(range(total))
    step = Driver(executor, num_pages=8).inputs({key: [next(ids) for _ in range(n)] for key, n in LENGTHS.items()})
    executor.forward(step)
    inputs = tuple(torch.from_numpy(executor.value(v.id)) for v in op.inputs)
    wanted = case.torch(op, inputs, tuple(tensor(w) for w in op.weights), step)
    assert len(wanted) == len(op.outputs)
    for value, expected in zip(op.outputs, wanted):
        np.testing.assert_allclose(executor.value(value.id), expected.numpy(), rtol=1e-9, atol=1e-9)


def test_softcap_is_tanh_of_the_scores():
    """One query, two positions: by hand."""
    from .cases import Attention

    program, op = Attention().program(dict(heads=1, kv_heads=1, head_dim=16, softcap=2.0, scale=1.0), 2)
    executor = ReferenceExecutor(program, num_pages=1, dtype=np.float64, keep_values=True)
    executor.forward(Driver(executor, num_pages=1).inputs({0: [0, 1]}))
    q, k, v = (executor.value(x.id) for x in op.inputs)
    k, v = k.astype(np.float16).astype(np.float64), v.astype(np.float16).astype(np.float64)
    scores = 2.0 * np.tanh(k @ q[1] / 2.0)
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(executor.value(op.outputs[0].id)[1], weights @ v, rtol=1e-12)
