"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window over the last layers (Yang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..program import Builder, Heads, Value, Weights
from .hf_config import RopeParameters, read_head_dim, read_rope, window_from_layer
from .rope import make_rope


@dataclass(frozen=True, kw_only=True)
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: Annotated[int, read_head_dim]
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: Literal["silu"]
    attention_bias: bool = True  # of q, k and v, part of their weights
    rope: Annotated[RopeParameters, read_rope]
    windows: Annotated[tuple[int, ...], window_from_layer]  # positions each layer sees; 0: all


def build(b: Builder, cfg: Config, w: Weights) -> Value:
    """Logits (L, vocab_size) of the step's tokens."""
    heads = Heads(cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim)
    rope = make_rope(cfg.rope, cfg.head_dim)

    x = b.embed(w["embed_tokens"])
    for i in range(cfg.num_hidden_layers):
        layer = w.layer(i)

        h = b.rms_norm(x, layer["input_norm"], cfg.rms_norm_eps)
        q, k, v = b.linear_split(h, layer["q_proj", "k_proj", "v_proj"])
        q, k = b.rope(q, k, rope)
        h = b.attention(q, k, v, heads, scale=cfg.head_dim**-0.5, window=cfg.windows[i])
        x = b.linear(h, layer["o_proj"], residual=x)

        h = b.rms_norm(x, layer["post_attention_norm"], cfg.rms_norm_eps)
        gate, up = b.linear_split(h, layer["gate_proj", "up_proj"])
        h = b.act_mul(gate, up, "silu")
        x = b.linear(h, layer["down_proj"], residual=x)

    x = b.rms_norm(b.select_rows(x), w["norm"], cfg.rms_norm_eps)
    return b.linear(x, w.head)
