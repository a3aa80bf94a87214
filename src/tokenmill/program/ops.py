"""The op table. An op is a kernel someone would write by hand; a model is a list of about a dozen kinds of them.

Each entry: name, shape rule, flops and bytes, and the maths with its source. The formulas feed `tokenmill plan`, the
profile's roofline and cost attribution. The meaning of each op in numpy is backends/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UnsupportedModel
from .program import Op, StepShape, Value
from .weight import Weight

Shape = tuple[str, int]  # (rows, dim)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class OpSpec:
    name: str
    doc: str
    shape_rule: Callable[[tuple[Value, ...], tuple[Weight, ...], dict], tuple[Shape, ...]]
    flops: Callable[[Op, StepShape], int]
    bytes: Callable[[Op, StepShape], int]


def rows_of(value: Value, shape: StepShape) -> int:
    return shape.num_tokens if value.rows == "T" else shape.num_logit_rows


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise UnsupportedModel(message)


def _activation_bytes(op: Op, shape: StepShape) -> int:
    return sum(4 * v.dim * rows_of(v, shape) for v in (*op.inputs, *op.outputs))


def _elementwise_flops(per_element: int) -> Callable[[Op, StepShape], int]:
    return lambda op, shape: sum(per_element * v.dim * rows_of(v, shape) for v in op.outputs)


def _embed_shape(inputs, weights, attrs):
    (weight,) = weights
    _need(len(weight.shape) == 2, f"{weight.name} has shape {weight.shape}; an embedding is (vocab, dim)")
    return (("T", weight.shape[1]),)


def _rms_norm_shape(inputs, weights, attrs):
    (x,), (weight,) = inputs, weights
    group = attrs["group"]
    _need(weight.shape == (group,), f"{weight.name} has shape {weight.shape}, the norm needs ({group},)")
    _need(x.dim % group == 0, f"{weight.name}: {x.dim} is not a multiple of its group {group}")
    return ((x.rows, x.dim),)


def _linear_shape(inputs, weights, attrs):
    x = inputs[0]
    shapes = []
    for weight in weights:
        _need(
            len(weight.shape) == 2 and weight.shape[1] == x.dim,
            f"{weight.name} has shape {weight.shape}, its input has {x.dim} features",
        )
        if weight.bias is not None:
            _need(weight.bias.shape == weight.shape[:1], f"{weight.bias.name} has shape {weight.bias.shape}")
        shapes.append((x.rows, weight.shape[0]))
    if len(inputs) == 2:
        residual = inputs[1]
        _need(
            len(weights) == 1 and (residual.rows, residual.dim) == shapes[0],
            f"{weights[0].name}: residual of {residual.dim} features does not match {shapes[0][1]}",
        )
    return tuple(shapes)


def _rope_shape(inputs, weights, attrs):
    head_dim, turned = attrs["head_dim"], 2 * len(attrs["inv_freq"])
    _need(turned <= head_dim, f"rope turns {turned} features of heads that have {head_dim}")
    for x in inputs:
        _need(x.dim % head_dim == 0, f"rope got {x.dim} features for heads of {head_dim}")
    return tuple((x.rows, x.dim) for x in inputs)


def _attention_shape(inputs, weights, attrs):
    q, k, v = inputs
    heads, kv_heads, head_dim = attrs["num_heads"], attrs["num_kv_heads"], attrs["head_dim"]
    _need(heads % kv_heads == 0, f"{heads} query heads do not divide into {kv_heads} key/value heads")
    _need(
        q.dim == heads * head_dim and k.dim == v.dim == kv_heads * head_dim,
        f"attention got q {q.dim}, k {k.dim}, v {v.dim} for {heads}/{kv_heads} heads of {head_dim}",
    )
    return (("T", q.dim),)


def _act_mul_shape(inputs, weights, attrs):
    gate, up = inputs
    _need(gate.dim == up.dim, f"act_mul got {gate.dim} and {up.dim} features")
    _need(attrs["act"] in ACTIVATIONS, f"activation {attrs['act']!r} is not one of {ACTIVATIONS}")
    return ((gate.rows, gate.dim),)


def _linear_flops(op: Op, shape: StepShape) -> int:
    return sum(2 * w.shape[0] * w.shape[1] * rows_of(op.inputs[0], shape) for w in op.weights)


def _linear_bytes(op: Op, shape: StepShape) -> int:
    if rows_of(op.inputs[0], shape) == 0:
        return 0
    return sum(w.nbytes for w in op.weights) + _activation_bytes(op, shape)


def _attention_flops(op: Op, shape: StepShape) -> int:
    return 4 * op.attrs["num_heads"] * op.attrs["head_dim"] * shape.context_tokens


def _attention_bytes(op: Op, shape: StepShape) -> int:
    """Keys and values in f16, read once for each token that attends: an upper bound, tiles of a chunk share reads."""
    return 4 * op.attrs["num_kv_heads"] * op.attrs["head_dim"] * shape.context_tokens + _activation_bytes(op, shape)


OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        OpSpec(
            "embed",
            "out[t] = scale * table[token_ids[t]]. Attributes: scale.",
            _embed_shape,
            _elementwise_flops(1),
            lambda op, s: s.num_tokens * (op.weights[0].nbytes // op.weights[0].shape[0] + 4 * op.outputs[0].dim),
        ),
        OpSpec(
            "rms_norm",
            "Over each run of `group` features: x * weight / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019, eq. 4). "
            "group = dim normalises the row, group = head_dim each head (Qwen3, Gemma-3).",
            _rms_norm_shape,
            _elementwise_flops(4),
            _activation_bytes,
        ),
        OpSpec(
            "linear",
            "out_i = x @ weight_i.T + bias_i (+ residual, the second input, with one weight). Several weights share x.",
            _linear_shape,
            _linear_flops,
            _linear_bytes,
        ),
        OpSpec(
            "add",
            "x + y.",
            lambda inputs, weights, attrs: ((inputs[0].rows, inputs[0].dim),),
            _elementwise_flops(1),
            _activation_bytes,
        ),
        OpSpec(
            "rope",
            "Rotary position embedding (Su et al. 2021) on q and k, pairs (i, i + len(inv_freq)) of each head, the "
            "rest of the head untouched: angle = position * inv_freq[i], both halves times `scale` (YaRN's factor). "
            "Attributes: head_dim, inv_freq (tuple of float), scale.",
            _rope_shape,
            _elementwise_flops(3),
            _activation_bytes,
        ),
        OpSpec(
            "attention",
            "Writes k, v to the cache at slot_mapping in the cache's format (f16), then for each query at position p: "
            "softmax(scale * q K^T) V over positions (p - window, p], or [0, p] if window is 0, K and V read back from "
            "the cache; with softcap c > 0 scores are c * tanh(score / c) first (Gemma 2, section 2). "
            "Attributes: layer, num_heads, num_kv_heads, head_dim, scale, window, softcap.",
            _attention_shape,
            _attention_flops,
            _attention_bytes,
        ),
        OpSpec(
            "act_mul",
            "act(gate) * up (Shazeer 2020). act: silu, gelu (erf), gelu_tanh.",
            _act_mul_shape,
            _elementwise_flops(8),
            _activation_bytes,
        ),
        OpSpec(
            "select_rows",
            "x[logit_rows]: only rows that sample go through the head.",
            lambda inputs, weights, attrs: (("L", inputs[0].dim),),
            lambda op, s: 0,
            lambda op, s: 8 * s.num_logit_rows * op.outputs[0].dim,
        ),
    )
}
