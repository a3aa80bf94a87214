"""Every stored format through every instruction set this machine runs: packing loses nothing, products are right.

A one-matrix program: embed (rows looked up from the packed table), then the head. The product is compared with float64
arithmetic on the same quantised activations, so what is left is the rounding of float32 sums.
"""

import numpy as np
import pytest

from tests.support.blocks import random_blocks
from tokenmill.backends.cpu import _native
from tokenmill.backends.cpu.executor import BY_16, FLOAT_FORMATS, CpuExecutor
from tokenmill.program import RecordingBuilder, StepInputs, Weight
from tokenmill.quant.formats import BLOCKS, numbers

FORMATS = list(BLOCKS)
ISAS = _native.instruction_sets()
VOCAB, COLS, ROWS = 37, 512, 83  # rows: five panels and a ragged one


def make_weight(name: str, format: str, rows: int, cols: int, seed: int, bias: Weight | None = None) -> Weight:
    block = BLOCKS[format].block_size
    return Weight(name, (rows, cols), format, random_blocks(format, rows * cols // block, seed), bias)


def step_of(token_ids) -> StepInputs:
    n = len(token_ids)
    at = np.arange(n, dtype=np.int32)
    pages = np.arange(-(-n // 16), dtype=np.int32)[None]
    return StepInputs(
        np.array(token_ids, np.int32), at, at, np.array([0, n], np.int32), np.array([n], np.int32), pages, at
    )


def products(format: str, isa: str, tokens, middle: bool = False):
    """Logits of embed -> (a square matrix ->) head in `format`, and the weights."""
    table = make_weight("embed_tokens", "F32", VOCAB, COLS, 1)
    bias = Weight("lm_head.bias", (ROWS,), "F32", random_blocks("F32", ROWS, 3))
    head = make_weight("lm_head", format, ROWS, COLS, 2, bias)
    square = make_weight("square", format, COLS, COLS, 4)
    b = RecordingBuilder()
    x = b.embed(table)
    if middle:
        x = b.linear(x, square, residual=x)
    program = b.finish(b.linear(b.select_rows(x), head))
    executor = CpuExecutor(program, num_pages=8, isa=isa, num_threads=2)
    return executor.forward(step_of(tokens)), table, square, head


def round_activations(x: np.ndarray, format: str, group: int) -> np.ndarray:
    """x as the kernels see it: 8 bits by groups, scale and reciprocal in float32; float formats see x itself."""
    if format in FLOAT_FORMATS:
        return x.astype(np.float64)
    groups = x.reshape(len(x), -1, group)
    top = np.abs(groups).max(-1, keepdims=True)
    q = np.rint(groups * np.where(top > 0, np.float32(127) / top, np.float32(0)))
    return (q.astype(np.float64) * (top / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("middle", [False, True], ids=["by 16", "by 32 then 16"])
def test_product_is_exact_but_for_float32_sums(format, isa, middle):
    tokens = [t % VOCAB for t in range(19)]  # two whole tiles and a ragged one
    logits, table, square, head = products(format, isa, tokens, middle)
    x = numbers(table)[tokens]
    if middle:
        x = (
            x + round_activations(x, format, 16 if format in BY_16 else 32) @ numbers(square).astype(np.float64).T
        ).astype(np.float32)
    seen = round_activations(x, format, 16)
    exact = seen @ numbers(head).astype(np.float64).T + numbers(head.bias)
    size = np.abs(seen) @ np.abs(numbers(head).astype(np.float64)).T
    # With a matrix before it, a float32 rounding may tip an activation over to the next of 127 steps.
    limit = (3e-6 if not middle or format in FLOAT_FORMATS else 1e-3) * size + 1e-7
    assert (np.abs(logits - exact) <= limit).all(), np.max(np.abs(logits - exact) / size)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_the_same_alone_and_in_any_tile(format):
    tokens = list(range(33))
    for isa in ISAS:
        whole = products(format, isa, tokens, middle=True)[0]
        for n in (1, 2, 3, 5, 8, 13):
            part = products(format, isa, tokens[:n], middle=True)[0]
            np.testing.assert_array_equal(part, whole[:n])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_embedding_rows_are_the_files_numbers(format, isa):
    table = make_weight("embed_tokens", format, VOCAB, COLS, 5)
    b = RecordingBuilder()
    program = b.finish(b.select_rows(b.embed(table)))
    executor = CpuExecutor(program, num_pages=8, isa=isa)
    tokens = list(range(VOCAB))
    np.testing.assert_array_equal(executor.forward(step_of(tokens)), numbers(table)[tokens])


def test_instruction_sets_with_fused_multiply_add_agree_to_the_bit():
    fused = [isa for isa in ISAS if isa != "plain"]
    for format in FORMATS:
        results = [products(format, isa, range(9), middle=True)[0] for isa in fused]
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0], err_msg=format)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", ["Q4_1", "Q8_0", "Q6_K", "F16"])
def test_what_is_not_finite_reaches_the_answer_of_its_row_alone(format, poison, isa):
    """Rounding to 8 bits must not launder it: the sampler refuses such a row, and only that one."""
    table = np.random.default_rng(0).standard_normal((VOCAB, COLS)).astype(np.float32)
    table[5, 77] = poison
    b = RecordingBuilder()
    x = b.embed(Weight("embed_tokens", table.shape, "F32", table.ravel().view(np.uint8)))
    x = b.linear(x, make_weight("square", format, COLS, COLS, 4))
    program = b.finish(b.linear(b.select_rows(x), make_weight("lm_head", format, ROWS, COLS, 2)))
    logits = CpuExecutor(program, num_pages=8, isa=isa).forward(step_of([3, 5, 7]))
    assert np.isfinite(logits[[0, 2]]).all() and not np.isfinite(logits[1]).any()
