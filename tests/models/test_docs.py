"""docs/new_model.md shows the true difference of two families; docs/new_op.md's example works as printed."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

import tests.ops.cases as cases
import tokenmill.backends.reference as reference
import tokenmill.program.builder as builder
import tokenmill.program.ops as ops
from tests.ops.test_ops import test_agrees_with_the_float64_reference as hold_to_reference
from tests.ops.test_reference import test_reference_is_torch as hold_to_torch
from tokenmill.backends.reference import ReferenceBackend
from tokenmill.models import llama, qwen3
from tokenmill.program import OPS, Builder

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.S)


def text_of(module) -> list[str]:
    lines = Path(module.__file__).read_text().splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("def build")) :]


def test_the_diff_of_two_families_is_the_real_one():
    (shown,) = blocks("new_model.md", "diff")
    real = [line for line in difflib.unified_diff(text_of(llama), text_of(qwen3), n=1, lineterm="")][3:]
    assert shown.splitlines() == real


@pytest.fixture
def as_if_added(monkeypatch):
    """The four pieces of new_op.md put where it says they go."""
    table, word, meaning, case = blocks("new_op.md", "python")
    monkeypatch.setitem(OPS, "layer_norm", eval(table, vars(ops).copy()))
    for piece, owner, module in ((word, Builder, builder), (meaning, ReferenceBackend, reference)):
        scope = dict(vars(module))
        exec(piece, scope)
        monkeypatch.setattr(owner, "layer_norm", scope["layer_norm"], raising=False)
    scope = dict(vars(cases))
    exec(case, scope)
    return scope["LayerNorm"]()


def test_the_example_op_is_torchs(as_if_added):
    for shape in as_if_added.shapes:
        hold_to_torch(as_if_added, shape)


def test_the_example_op_is_checked_like_any_other(as_if_added):
    for shape in as_if_added.shapes:
        hold_to_reference(as_if_added, shape, "reference")
