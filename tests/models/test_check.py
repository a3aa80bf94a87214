"""--check agrees with a right executor and names the op, layer and line where a wrong one goes astray."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.checkpoints import FAMILIES
from tests.support.executors import LIMITS, NUM_PAGES
from tests.support.steps import Driver
from tokenmill.backends.check import CheckedExecutor, CheckFailed, check
from tokenmill.backends.reference import ReferenceBackend, ReferenceExecutor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", ("F32", "BF16", "Q8_0", "Q4_0"))
def test_every_op_of_every_step_agrees(tiny, executor_factory, family, format):
    """Prompt, chunk that goes on, decode beside it; widths are made of whole blocks."""
    model = tiny(family, "gguf", format=format)
    executor = executor_factory(model.model.program, keep_values=True)
    checked = CheckedExecutor(model.model.program, executor, num_pages=NUM_PAGES)
    driver = Driver(checked, num_pages=NUM_PAGES)
    for chunks in ({0: model.tokens(40)}, {0: model.tokens(3), 1: model.tokens(20)}, {0: [5], 1: [6]}):
        driver.step(chunks)
        assert len(checked.report.differences) >= len(model.model.program.ops)
    assert "agree with the reference" in str(checked.report)


class Wrong(ReferenceExecutor):
    """The reference with one op's result spoiled."""

    def __init__(self, program, index: int, spoil, **limits):
        super().__init__(program, **limits)
        run_op, spoiled = self.backend.run_op, program.ops[index]

        def run(op, inputs, step):
            outputs = run_op(op, inputs, step)
            return (*outputs[:-1], spoil(outputs[-1])) if op is spoiled else outputs

        self.backend.run_op = run


def index_of(program, name: str, which: int) -> int:
    return [i for i, op in enumerate(program.ops) if op.name == name][which]


@pytest.mark.parametrize("name", ("embed", "rms_norm", "linear", "add", "rope", "attention", "act_mul", "select_rows"))
@pytest.mark.parametrize(
    "spoil",
    (lambda x: x * 1.01, lambda x: x + np.float32(np.nan), lambda x: np.roll(x, 1, axis=1)),
    ids=("a hundredth too large", "nan", "shifted"),
)
def test_the_first_wrong_op_is_named(tiny, name, spoil):
    program = tiny("gemma3").model.program
    index = index_of(program, name, -1)
    wrong = Wrong(program, index, spoil, keep_values=True, **LIMITS)
    report = check(program, wrong, Driver(wrong, num_pages=NUM_PAGES).inputs({0: [9, 8, 7, 6, 5]}))
    assert report.failure is not None and report.failure.index == index
    assert name in str(report) and "gemma3.py:" in str(report)


def test_the_message_names_layer_line_and_weight(tiny):
    program = tiny("llama").model.program
    wrong = Wrong(program, index_of(program, "linear", 3), lambda x: -x, keep_values=True, **LIMITS)
    checked = CheckedExecutor(program, wrong, num_pages=NUM_PAGES)
    with pytest.raises(CheckFailed, match=r"linear layers\.0\.down_proj \(layer 0, llama\.py:\d+\) differs by"):
        Driver(checked, num_pages=NUM_PAGES).step({0: [9, 8, 7]})


# ---- 8-bit rounding of activations is no fault; a wrong kernel beside it is


class Rounded(Wrong):
    """The reference, one quantised matrix of which reads its activations in 8 bits, as the native kernels do."""

    def __init__(self, program, index: int, spoil, features=32, **limits):
        super().__init__(program, index, spoil, **limits)
        run_op, rounded = self.backend.run_op, program.ops[index]

        def run(op, inputs, step):
            if op is rounded:
                groups = inputs[0].reshape(len(inputs[0]), -1, features)
                scale = np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-30) / 127
                x = (np.rint(groups / scale) * scale).reshape(inputs[0].shape).astype(np.float32)
                inputs = (x, *inputs[1:])
            return run_op(op, inputs, step)

        self.backend.run_op = run


def one_element(y):
    y = y.copy()
    y[0, 5] += 0.3 * np.linalg.norm(y[0])
    return y


def one_row(y):
    y = y.copy()
    y[-1] *= 1.2
    return y


@pytest.mark.parametrize("features", (16, 32))
@pytest.mark.parametrize("outlier", (1, 300))
def test_rounding_to_8_bits_is_allowed_for_and_a_wrong_kernel_is_not(tiny, monkeypatch, outlier, features):
    """An outlier leaves its group few bits: the row is far off then, and by no more than that rounding explains."""
    program = tiny("llama", "gguf", format="Q8_0").model.program
    index = index_of(program, "linear", 0)
    rms_norm = ReferenceBackend.rms_norm

    def with_outlier(self, op, inputs, step):
        (y,) = rms_norm(self, op, inputs, step)
        y = y.copy()
        y[:, 3] *= outlier
        return (y,)

    monkeypatch.setattr(ReferenceBackend, "rms_norm", with_outlier)

    def report_of(spoil, tokens):
        executor = Rounded(program, index, spoil, features, keep_values=True, **LIMITS)
        return check(program, executor, Driver(executor, num_pages=NUM_PAGES).inputs({0: tokens}))

    for tokens in ([9], [9, 8, 7, 6, 5]):
        assert report_of(lambda y: y, tokens).failure is None
        for spoil in (one_element, one_row, lambda y: np.roll(y, 1, axis=1), lambda y: y * 1.2, lambda y: y * 0):
            failure = report_of(spoil, tokens).failure
            assert failure is not None and failure.index == index
    assert "8-bit rounding of its input, which makes" in str(failure)
