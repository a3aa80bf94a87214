"""Gemma 3's text model (Gemma Team 2025): most layers see a window and turn positions faster, norms stand on both sides
of attention and MLP, each head of q and k is normalised, and embeddings are scaled up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..program import Builder, Heads, Value, Weights
from .hf_config import RopeParameters, read_global_rope, read_local_rope, window_by_pattern
from .rope import make_rope


@dataclass(frozen=True, kw_only=True)
class Config:
    vocab_size: int = 262_208  # published configs leave out what is Gemma3TextConfig's default
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-6
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256.0
    attention_bias: bool = False  # biases are part of their weights
    rope: Annotated[RopeParameters, read_global_rope]
    local_rope: Annotated[RopeParameters, read_local_rope]  # of the layers with a window
    windows: Annotated[tuple[int, ...], window_by_pattern]  # positions each layer sees; 0: all


def build(b: Builder, cfg: Config, w: Weights) -> Value:
    """Logits (L, vocab_size) of the step's tokens."""
    heads = Heads(cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim)
    rope, local_rope = make_rope(cfg.rope, cfg.head_dim), make_rope(cfg.local_rope, cfg.head_dim)

    x = b.embed(w["embed_tokens"], scale=cfg.hidden_size**0.5)
    for i in range(cfg.num_hidden_layers):
        layer = w.layer(i)

        h = b.rms_norm(x, layer["input_norm"], cfg.rms_norm_eps)
        q, k, v = b.linear_split(h, layer["q_proj", "k_proj", "v_proj"])
        q = b.rms_norm(q, layer["q_norm"], cfg.rms_norm_eps)
        k = b.rms_norm(k, layer["k_norm"], cfg.rms_norm_eps)
        q, k = b.rope(q, k, local_rope if cfg.windows[i] else rope)
        h = b.attention(q, k, v, heads, scale=cfg.query_pre_attn_scalar**-0.5, window=cfg.windows[i])
        h = b.linear(h, layer["o_proj"])
        x = b.add(x, b.rms_norm(h, layer["post_attention_norm"], cfg.rms_norm_eps))

        h = b.rms_norm(x, layer["pre_feedforward_norm"], cfg.rms_norm_eps)
        gate, up = b.linear_split(h, layer["gate_proj", "up_proj"])
        h = b.act_mul(gate, up, "gelu_tanh")
        h = b.linear(h, layer["down_proj"])
        x = b.add(x, b.rms_norm(h, layer["post_feedforward_norm"], cfg.rms_norm_eps))

    x = b.rms_norm(b.select_rows(x), w["norm"], cfg.rms_norm_eps)
    return b.linear(x, w.head)
