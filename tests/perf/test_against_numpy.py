"""Native loops against numpy's, on the same work in the same process: products, sampling, packing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.cases import CASES
from tests.ops.perf import timer
from tests.sampling.samplers import empty_outputs, inputs, make_request
from tests.support.blocks import random_blocks
from tests.support.executors import cpu
from tokenmill.backends.cpu import _native
from tokenmill.core import SamplingParams
from tokenmill.quant.formats import BLOCKS

from .race import race, timed

ROWS, VOCAB = 16, 49152


def test_quantised_products_against_float32_ones():
    rows, dim, out = 128, 576, 1536
    x, w = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((rows, dim), (dim, 2 * out)))
    case = next(case for case in CASES if case.op == "linear")
    seconds, _, _ = timer(case, dict(dim=dim, out=(out, out), format="Q4_1"), rows, cpu)
    assert race(timed(lambda: x @ w), seconds, floor=1.1) >= 1.1


@pytest.mark.parametrize(
    ("params", "floor"),
    [
        (SamplingParams(temperature=0), 0.4),
        (SamplingParams(temperature=1.0), 0.1),
        (SamplingParams(temperature=0.8, top_k=40, top_p=0.9), 0.11),
        (SamplingParams(temperature=0.8, top_p=0.95), 0.07),
    ],
    ids=["greedy", "plain", "top-k", "top-p"],
)
def test_sampling_against_exponentials(params, floor):
    """Yardstick: exp() of every logit, once. Few tokens hold most of the probability, as a model has it."""
    logits = np.random.default_rng(0).standard_normal((ROWS, VOCAB), np.float32) * 6
    sampling, out = inputs([make_request(params, seed=i) for i in range(ROWS)]), empty_outputs(ROWS)
    ratio = race(timed(lambda: np.exp(logits)), timed(lambda: _native.sample("", logits, sampling, out)), floor=floor)
    assert ratio >= floor


@pytest.mark.parametrize(
    ("format", "floor"),
    [("F16", 0.27), ("Q4_0", 0.2), ("Q4_1", 0.22), ("Q8_0", 0.22), ("Q4_K", 0.18), ("Q6_K", 0.2)],
)
def test_packing_against_copying(format, floor):
    """Yardstick: the packed bytes written once more, into fresh memory, on one thread as the packing."""
    rows, cols = 4096, 2048
    file = random_blocks(format, rows * cols // BLOCKS[format].block_size, 0)

    def pack():
        executor = _native.Executor("", 1, 1, 1, 1, 1, 1, False)
        executor.add_weight(format, rows, cols, file, -1)
        return executor.weight_bytes

    packed = np.ones(pack(), np.uint8)
    assert race(timed(packed.copy), timed(pack), floor=floor) >= floor
