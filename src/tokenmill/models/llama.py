"""Llama 1 to 3, SmolLM2 and their kin: the decoder the other families vary (Touvron et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..program import Builder, Heads, Value, Weights
from .hf_config import RopeParameters, read_head_dim, read_num_kv_heads, read_rope
from .rope import make_rope


@dataclass(frozen=True, kw_only=True)
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: Annotated[int, read_num_kv_heads]
    head_dim: Annotated[int, read_head_dim]
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: Literal["silu"]
    attention_bias: bool = False  # biases are part of their weights
    mlp_bias: bool = False
    rope: Annotated[RopeParameters, read_rope]


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
        h = b.attention(q, k, v, heads, scale=cfg.head_dim**-0.5)
        x = b.linear(h, layer["o_proj"], residual=x)

        h = b.rms_norm(x, layer["post_attention_norm"], cfg.rms_norm_eps)
        gate, up = b.linear_split(h, layer["gate_proj", "up_proj"])
        h = b.act_mul(gate, up, "silu")
        x = b.linear(h, layer["down_proj"], residual=x)

    x = b.rms_norm(b.select_rows(x), w["norm"], cfg.rms_norm_eps)
    return b.linear(x, w.head)
