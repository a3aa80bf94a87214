"""GGUF metadata -> a config dict in the shape of Hugging Face's config.json, so that models read one form.

Missing and ill-typed keys are errors that name the key; keys that would change the maths and are not understood are
refused. general.file_type is never read: each tensor says its own format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..quant.formats import dequantize
from .files import TensorInfo

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

# Keys that change what the model computes, and the values at which they change nothing.
REFUSED: dict[str, tuple] = {
    "expert_count": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.shared_kv_layers": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
}


class _Keys:
    """Typed reading of `{arch}.*` keys. Names the key in every error."""

    def __init__(self, metadata: Mapping[str, Any], arch: str):
        self.metadata = metadata
        self.arch = arch

    def _value(self, key: str, default: Any) -> Any:
        full = f"{self.arch}.{key}"
        if full in self.metadata:
            return self.metadata[full]
        if default is ...:
            raise ModelFileError(f"the model's file has no {full!r}")
        return default

    def integer(self, key: str, default: Any = ...) -> Any:
        """A positive integer. A per-layer array is taken where all its values agree."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size and (value == value[0]).all():
            value = int(value[0])
        elif isinstance(value, np.ndarray):
            raise UnsupportedModel(f"{self.arch}.{key} differs from layer to layer, which is not supported")
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise ModelFileError(f"{self.arch}.{key} is {value!r}; it must be a positive integer")
        return value

    def number(self, key: str, default: Any = ...) -> Any:
        """A positive finite number."""
        value = self._value(key, default)
        if value is default:
            return value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelFileError(f"{self.arch}.{key} is {value!r}; it must be a positive number")
        return float(str(np.float32(value)))  # 1e-05 as it was written, not the double nearest to the stored float

    def text(self, key: str, default: Any = ...) -> Any:
        value = self._value(key, default)
        if value is not default and not isinstance(value, str):
            raise ModelFileError(f"{self.arch}.{key} is {value!r}; it must be a string")
        return value


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Raises UnsupportedModel for an architecture or setting tokenmill has not, ModelFileError for a bad key."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFileError(f"general.architecture is {arch!r}; the file does not say what model it is")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(f"the architecture {arch!r} is not supported; these are: {', '.join(ARCHITECTURES)}")
    keys = _Keys(metadata, arch)
    for key, neutral in REFUSED.items():
        value = metadata.get(f"{arch}.{key}", neutral[0])
        if isinstance(value, np.ndarray) or value not in neutral:
            raise UnsupportedModel(f"{arch}.{key} is {value!r}, which is not supported for {arch}")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError("the model's file has no tensor 'token_embd.weight' of two dimensions")

    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{arch}.{key} is {keys.integer(key)}, the head's size is {head_dim}: not supported")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[arch],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 1e6 if arch == "gemma3" else 10000.0),
        "rope_scaling": _rope_scaling(keys, tensors, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if arch != "qwen2":  # whose q, k and v always have one
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    for token in ("bos", "eos"):
        if isinstance(number := metadata.get(f"tokenizer.ggml.{token}_token_id"), int):
            config[f"{token}_token_id"] = number
    window = keys.integer("attention.sliding_window", None)
    if arch == "gemma3":
        config |= _gemma3(keys, config, window)
    elif arch == "llama" and window:
        config |= {"model_type": "mistral", "sliding_window": window}  # what a llama with a window is called
    elif window:
        raise UnsupportedModel(f"{arch}.attention.sliding_window is {window}: a window is not supported for {arch}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := keys.number(key, None)) is not None:
            if arch != "gemma3":
                raise UnsupportedModel(f"{arch}.{key} is {cap}, which is not supported for {arch}")
            config[key] = cap
    return config


def _gemma3(keys: _Keys, config: dict[str, Any], window: int | None) -> dict[str, Any]:
    """Gemma 3 (technical report, section 2): five layers with a window, then one that sees everything."""
    if window is None:
        raise ModelFileError("the model's file has no 'gemma3.attention.sliding_window'")
    layers, every = config["num_hidden_layers"], keys.integer("attention.sliding_window_pattern", 6)
    if layers > 1 << 16:
        raise ModelFileError(f"gemma3.block_count is {layers}")
    # GGUF does not keep query_pre_attn_scalar: it is the head's size in all of the family but the 27B of 62 layers.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scalar,
    }


def _rope_scaling(keys: _Keys, tensors: Mapping[str, TensorInfo], head_dim: int) -> dict[str, Any] | None:
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", None))
    kind = keys.text("rope.scaling.type", "linear" if factor else "none")
    original = keys.integer("rope.scaling.original_context_length", None)
    if "rope_freqs.weight" in tensors:
        if kind not in ("none", "linear") or (factor or 1.0) != 1.0:
            raise UnsupportedModel(f"rope_freqs.weight together with {keys.arch}.rope.scaling.type {kind!r}")
        return _llama3_scaling(tensors["rope_freqs.weight"], keys, original or 8192, head_dim)
    if kind == "none" or (kind == "linear" and (factor or 1.0) == 1.0):
        return None
    if factor is None:
        raise ModelFileError(f"the model's file has no '{keys.arch}.rope.scaling.factor' for scaling {kind!r}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"{keys.arch}.rope.scaling.type is {kind!r}; none, linear and yarn are supported")
    scaling = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = original or int(keys.integer("context_length") / factor)
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (beta := keys.number(f"rope.scaling.{key}", None)) is not None:
            scaling[name] = beta
    attention = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
    if attention != 1.0:  # ggml multiplies YaRN's own factor by it, Hugging Face's attention_factor replaces both
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(info: TensorInfo, keys: _Keys, original: int, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's rope scaling, recovered from the divisors that GGUF keeps of it.

    A divisor is 1 for short wavelengths, `factor` for long ones, and 1 / ((1 - s) / factor + s) between, where
    s = (original / wavelength - low) / (high - low) is a line in 1 / wavelength: two points give low and high. The
    result is checked by computing the divisors from it again.
    """
    if info.format != "F32" or info.shape != (head_dim // 2,):
        raise ModelFileError(f"rope_freqs.weight is {info.format} {info.shape}, not F32 ({head_dim // 2},)")
    divisors = dequantize("F32", info.data, info.shape).astype(np.float64)
    if not np.isfinite(divisors).all() or (divisors < 1 - 1e-6).any():
        raise ModelFileError("rope_freqs.weight holds numbers below 1 or not finite")
    if np.allclose(divisors, 1.0, atol=1e-6):
        return None  # type: ignore[return-value]
    theta = keys.number("rope.freq_base", 10000.0)
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)  # 1 / wavelength
    factor = float(divisors.max())
    low, high = 1.0, 4.0
    between = np.flatnonzero((divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4)))
    if len(between) >= 2:
        s = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(frequency[between], s, 1)
        width = original / slope
        low, high = round(-intercept * width, 4), round((1 - intercept) * width, 4)
    s = np.clip((original * frequency - low) / (high - low), 0, 1) if high > low else np.zeros_like(frequency)
    if not np.allclose(1 / ((1 - s) / factor + s), divisors, rtol=2e-3):
        raise UnsupportedModel("rope_freqs.weight is not Llama 3's scaling of the rotary frequencies")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
