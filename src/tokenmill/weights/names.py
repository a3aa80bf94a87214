"""From the names and habits of checkpoint formats to one form: canonical names, one row order, one meaning of a norm.

    GGUF                     Hugging Face                             canonical
    token_embd.weight        model.embed_tokens.weight                embed_tokens
    blk.3.attn_q.weight      model.layers.3.self_attn.q_proj.weight   layers.3.q_proj
    blk.3.attn_q.bias        model.layers.3.self_attn.q_proj.bias     layers.3.q_proj.bias
    output.weight            lm_head.weight                           lm_head (absent where tied to embed_tokens)

Quirks undone here, once, so that every model file sees one form:
- GGUF files of the llama architecture interleave each head's rotary pairs (i, i + d/2 become 2i, 2i + 1). Rows are
  taken in the other order, whole, so nothing is decoded, copied or lost.
- Gemma norms multiply by 1 + w. Hugging Face stores w, GGUF 1 + w; a Weight always holds the multiplier itself.
- Vectors (norms, biases) become F32, whatever they were stored in: exact.

expected_tensors() says which tensors a configuration asks for and of what shape; anything else is refused by name.
It does not know where bytes lie or what the model computes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..program.weight import Weight
from ..quant.formats import numbers

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
QK_NORM = ("qwen3", "gemma3_text")

GGUF_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
GGUF_LAYER = {
    "attn_norm": "input_norm",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "post_attention_norm",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
GGUF_LAYER_GEMMA3 = GGUF_LAYER | {
    "ffn_norm": "pre_feedforward_norm",
    "post_attention_norm": "post_attention_norm",
    "post_ffw_norm": "post_feedforward_norm",
}
HF_TOP = {"model.embed_tokens": "embed_tokens", "model.norm": "norm", "lm_head": "lm_head"}
HF_LAYER = {
    "input_layernorm": "input_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "o_proj",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_feedforward_norm",
    "post_feedforward_layernorm": "post_feedforward_norm",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "down_proj",
}
# Buffers that old exports stored; the same numbers follow from config.json.
HF_IGNORED = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|attn\.bias)|(model\.)?(vision_tower|multi_modal_projector)\..*"
)


def gguf_name(model_type: str, name: str) -> str | None:
    """The canonical name of a GGUF tensor, or None where it is handled elsewhere (rope_freqs.weight)."""
    if name == "rope_freqs.weight":
        return None
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)", stem)
    if layer:
        canonical = (GGUF_LAYER_GEMMA3 if model_type == "gemma3_text" else GGUF_LAYER).get(layer[2])
        canonical = canonical and f"layers.{layer[1]}.{canonical}"
    else:
        canonical = GGUF_TOP.get(stem)
    return _with_kind(canonical, kind, name, model_type)


def hf_name(model_type: str, name: str) -> str | None:
    """The canonical name of a tensor in a Hugging Face folder, or None for one that the text model does not use."""
    if HF_IGNORED.fullmatch(name):
        return None
    stem, _, kind = name.rpartition(".")
    if model_type == "gemma3_text":  # the multimodal wrapper's names, old and new
        stem = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", stem)
        stem = re.sub(r"^language_model\.lm_head$", "lm_head", stem)
    layer = re.fullmatch(r"model\.layers\.(0|[1-9]\d{0,5})\.([\w.]+)", stem)
    if layer:
        canonical = HF_LAYER.get(layer[2])
        canonical = canonical and f"layers.{layer[1]}.{canonical}"
    else:
        canonical = HF_TOP.get(stem)
    return _with_kind(canonical, kind, name, model_type)


def _with_kind(canonical: str | None, kind: str, name: str, model_type: str) -> str:
    if canonical is None or kind not in ("weight", "bias"):
        raise UnsupportedModel(f"the tensor {name!r} is not part of a {model_type} model")
    return canonical if kind == "weight" else canonical + ".bias"


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes that fix every tensor's shape, read from a config dict and checked."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @staticmethod
    def of(config: dict[str, Any]) -> Dims:
        """Raises ModelFileError naming the key that is missing or not a positive integer."""

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key)
            if value is None:
                value = default
            if value is None:
                raise ModelFileError(f"the model's config has no {key!r}")
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
                raise ModelFileError(f"the model's config has {key} = {value!r}; it must be a positive integer")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        kv_heads = size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelFileError(
                f"the model's config has {heads} num_attention_heads, not a multiple of {kv_heads} num_key_value_heads"
            )
        if config.get("head_dim") is None and hidden % heads:
            raise ModelFileError(f"the model's config has hidden_size {hidden}, not a multiple of its {heads} heads")
        return Dims(
            hidden,
            size("intermediate_size"),
            size("num_hidden_layers"),
            heads,
            kv_heads,
            size("head_dim", hidden // heads),
            size("vocab_size"),
        )


def expected_tensors(config: dict[str, Any], biased: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the model must have, without lm_head.

    `biased`: the per-layer names that carry a bias ("q_proj", ...).
    """
    dims, model_type = Dims.of(config), config["model_type"]
    d, q, kv, ff = dims.hidden, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim, dims.intermediate
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (d,),
        "q_proj": (q, d),
        "k_proj": (kv, d),
        "v_proj": (kv, d),
        "o_proj": (d, q),
        "post_attention_norm": (d,),
        "gate_proj": (ff, d),
        "up_proj": (ff, d),
        "down_proj": (d, ff),
    }
    if model_type in QK_NORM:
        layer |= {"q_norm": (dims.head_dim,), "k_norm": (dims.head_dim,)}
    if model_type == "gemma3_text":
        layer |= {"pre_feedforward_norm": (d,), "post_feedforward_norm": (d,)}
    layer |= {f"{name}.bias": layer[name][:1] for name in sorted(biased)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (dims.vocab, d), "norm": (d,)}
    for i in range(dims.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def biased_by_config(config: dict[str, Any]) -> frozenset[str]:
    """Which projections carry a bias, as the Hugging Face classes decide it from config.json."""
    if config["model_type"] == "qwen2":
        return frozenset(("q_proj", "k_proj", "v_proj"))
    names: set[str] = set()
    if config.get("attention_bias"):
        names |= {"q_proj", "k_proj", "v_proj", "o_proj"}
    if config.get("mlp_bias"):
        names |= {"gate_proj", "up_proj", "down_proj"}
    return frozenset(names)


def as_f32(weight: Weight, plus: float = 0.0) -> Weight:
    """A vector in F32, plus a constant."""
    values = numbers(weight) + np.float32(plus)
    return Weight(weight.name, weight.shape, "F32", np.ascontiguousarray(values).view(np.uint8).reshape(-1))


def unpermute(weight: Weight, num_heads: int) -> Weight:
    """Rows (or a vector's F32) from ggml's interleaved rotary order back to halves: 2i -> i, 2i + 1 -> i + d/2."""
    order = np.arange(weight.shape[0], dtype=np.int32).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if len(weight.shape) == 2:
        return replace(weight, order=order)
    return replace(weight, data=weight.data.view(np.float32)[order].view(np.uint8))
