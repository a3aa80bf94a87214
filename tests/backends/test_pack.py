"""Packing weights at load: rows in the weight's order, and no page of the file left in memory.

That every format is packed without loss is tests/backends/test_linear.py's business.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.blocks import random_blocks
from tests.support.steps import Driver
from tokenmill.backends.cpu import _native
from tokenmill.backends.cpu.executor import CpuExecutor
from tokenmill.program import RecordingBuilder, Weight
from tokenmill.quant.formats import BLOCKS, numbers

MIB = 1 << 20


def table(format: str, rows: int, cols: int, **fields) -> Weight:
    data = random_blocks(format, rows * cols // BLOCKS[format].block_size, 7)
    return Weight("embed_tokens", (rows, cols), format, data, **fields)


def packed_rows(weight: Weight, tokens: list[int]) -> np.ndarray:
    """The rows as the packed weight has them: an embedding is nothing else."""
    b = RecordingBuilder()
    program = b.finish(b.select_rows(b.embed(weight)))
    driver = Driver(CpuExecutor(program, num_pages=8, num_threads=2), num_pages=8)
    return driver.step({0: tokens})[0]


@pytest.mark.parametrize("format", ["F16", "F32", "Q4_1", "Q6_K"])
def test_rows_stand_in_the_weights_order(format):
    rows = 83
    order = np.random.default_rng(0).permutation(rows).astype(np.int32)
    weight = table(format, rows, 256, order=order)
    np.testing.assert_array_equal(packed_rows(weight, list(range(rows))), numbers(weight))


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 3], [0, 1, -1]], ids=["short", "beyond", "negative"])
def test_an_order_that_names_other_rows_is_refused(order):
    executor = _native.Executor("", 1, 1, 1, 1, 1, 1, False)
    with pytest.raises(ValueError, match="order of rows"):
        executor.add_weight("F32", 3, 4, np.zeros(48, np.uint8), -1, np.array(order, np.int32))


def resident_bytes(path: Path) -> int:
    """Of the file's mappings, in this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_mapped_file_leaves_memory_while_it_is_packed_and_stays_as_it_is(tmp_path):
    rows, cols = 1003, 2 * 9600  # of F16: 38 MB, more than is held at a time
    data = random_blocks("F16", rows * cols, 3)
    path = tmp_path / "weights"
    path.write_bytes(b"head" * 7 + data.tobytes() + b"tail")
    with open(path, "rb") as f:
        mapping = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapping, np.uint8, data.size, 28)
    assert int(view.sum(dtype=np.int64)) and resident_bytes(path) > 30 * MIB
    weight = Weight("embed_tokens", (rows, cols), "F16", view, mapped=True)
    wanted = [0, 1, rows // 2, rows - 2, rows - 1]
    np.testing.assert_array_equal(packed_rows(weight, wanted), data.view(np.float16).reshape(rows, cols)[wanted])
    assert resident_bytes(path) == 0
    np.testing.assert_array_equal(view, data)
