"""The op table: shape rules that name what does not fit, and costs that add up to what a model is known to cost."""

from __future__ import annotations

import pytest

from tests.support.blocks import random_blocks
from tokenmill.errors import UnsupportedModel
from tokenmill.models.registry import build_model
from tokenmill.program import Heads, RecordingBuilder, Rope, StepShape, Weight
from tokenmill.weights.loader import open_checkpoint


def weight(name: str, *shape: int, bias: int | None = None) -> Weight:
    def data(count):
        return random_blocks("F32", count)

    extra = None if bias is None else Weight(f"{name}.bias", (bias,), "F32", data(bias))
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Weight(name, shape, "F32", data(count), extra)


def activation(b: RecordingBuilder, dim: int):
    return b.embed(weight("table", 4, dim))


# Each: what is called with a fresh builder, and what the message must say.
MISFITS = {
    "an embedding of one dimension": (
        lambda b: b.embed(weight("embed_tokens", 8)),
        r"embed_tokens has shape \(8,\); an embedding is \(vocab, dim\)",
    ),
    "a linear of another width": (
        lambda b: b.linear(activation(b, 8), weight("layers.3.q_proj", 4, 16)),
        r"layers\.3\.q_proj has shape \(4, 16\), its input has 8 features",
    ),
    "one of several": (
        lambda b: b.linear_split(activation(b, 8), (weight("a", 4, 8), weight("b", 4, 9))),
        r"b has shape \(4, 9\)",
    ),
    "a bias of another length": (
        lambda b: b.linear(activation(b, 8), weight("q_proj", 4, 8, bias=5)),
        r"q_proj\.bias has shape \(5,\)",
    ),
    "a residual of another width": (
        lambda b: b.linear(activation(b, 8), weight("o_proj", 4, 8), residual=activation(b, 8)),
        r"o_proj: residual of 8 features does not match 4",
    ),
    "a norm that does not divide the row": (
        lambda b: b.rms_norm(activation(b, 10), weight("q_norm", 4), 1e-6),
        r"q_norm: 10 is not a multiple of its group 4",
    ),
    "a rope wider than its heads": (
        lambda b: b.rope(activation(b, 16), activation(b, 8), Rope(8, (1.0,) * 5)),
        r"rope turns 10 features of heads that have 8",
    ),
    "a rope of other heads": (
        lambda b: b.rope(activation(b, 16), activation(b, 12), Rope(8, (1.0,) * 4)),
        r"rope got 12 features for heads of 8",
    ),
    "heads that do not share evenly": (
        lambda b: b.attention(activation(b, 24), activation(b, 16), activation(b, 16), Heads(3, 2, 8), scale=1.0),
        r"3 query heads do not divide into 2 key/value heads",
    ),
    "heads that do not fill the projection": (
        lambda b: b.attention(activation(b, 24), activation(b, 8), activation(b, 8), Heads(4, 1, 8), scale=1.0),
        r"attention got q 24, k 8, v 8 for 4/1 heads of 8",
    ),
    "a gate of another width": (
        lambda b: b.act_mul(activation(b, 8), activation(b, 9), "silu"),
        r"act_mul got 8 and 9 features",
    ),
    "an activation nobody has": (
        lambda b: b.act_mul(activation(b, 8), activation(b, 8), "relu"),
        r"activation 'relu' is not one of",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_weight_that_does_not_fit_is_named(name):
    call, message = MISFITS[name]
    with pytest.raises(UnsupportedModel, match=message):
        call(RecordingBuilder())


def test_a_decode_costs_two_flops_a_weight_and_reads_each_weight_once(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    program = build_model(checkpoint.config, checkpoint.weights).program
    one = StepShape(num_tokens=1, num_logit_rows=1, context_tokens=1)
    matrices = sum(w.shape[0] * w.shape[1] for w in program.weights if len(w.shape) == 2)
    assert program.flops(one) == pytest.approx(2 * matrices, rel=0.01)
    assert program.bytes(one) == pytest.approx(program.weight_bytes, rel=0.05)


def test_costs_grow_with_tokens_context_and_logits(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    program = build_model(checkpoint.config, checkpoint.weights).program
    base = StepShape(num_tokens=10, num_logit_rows=1, context_tokens=55)
    deeper = StepShape(num_tokens=10, num_logit_rows=1, context_tokens=55 + 1000)
    scored = StepShape(num_tokens=10, num_logit_rows=3, context_tokens=55)
    per_position = sum(4 * op.attrs["num_heads"] * op.attrs["head_dim"] for op in program.ops if op.name == "attention")
    assert program.flops(deeper) - program.flops(base) == 1000 * per_position
    assert program.bytes(deeper) - program.bytes(base) == 1000 * program.kv_bytes_per_token
    head = program.ops[-1].weights[0]
    assert program.flops(scored) - program.flops(base) == pytest.approx(2 * 2 * head.shape[0] * head.shape[1], rel=0.01)
    assert program.kv_bytes_per_token == 30 * 2 * 2 * 3 * 64


def test_a_program_prints_its_ops_with_formats_and_lines(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    text = str(build_model(checkpoint.config, checkpoint.weights).program).splitlines()
    assert text[0].startswith("%0 = embed(embed_tokens:Q8_0)  # llama.py:")
    assert text[2].startswith(
        "%2, %3, %4 = linear(%1, layers.0.q_proj:Q4_1, layers.0.k_proj:Q4_1, layers.0.v_proj:Q4_1)"
    )
    assert "# layer 0, llama.py:" in text[2] and "# llama.py:" in text[-1]
