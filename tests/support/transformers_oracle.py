"""Transformers as the oracle: models in float32 with eager attention, from a Hugging Face folder or a GGUF file.

Of a GGUF file only the bytes of each tensor come through our reader; the gguf package dequantises and names them, and
what llama.cpp's converter did to a Hugging Face model is undone here: no arithmetic of ours stands on both sides.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import gguf
import numpy as np
import torch

from tokenmill.weights.gguf import open_gguf


def load(path: str | Path):
    """The model at `path`, weights dequantised to float32."""
    from transformers import AutoModelForCausalLM

    path = Path(path)
    if path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    else:
        model = _load_gguf(path)
    return model.eval()


def _load_gguf(path: Path):
    from transformers import AutoModelForCausalLM

    metadata, tensors, _ = open_gguf(path)
    config = _config(metadata, tied="output.weight" not in tensors)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    arch = gguf.MODEL_ARCH.LLAMA if config.model_type == "llama" else gguf.MODEL_ARCH.GEMMA3
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    state = {}
    for name in model.state_dict():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored in tensors:
            state[name] = _undo_conversion(name, _dequantized(tensors[stored]), config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    buffers = AutoModelForCausalLM.from_config(_shallow(config), dtype=torch.float32, attn_implementation="eager")
    for name, buffer in buffers.named_buffers():  # rotary tables and the like, which files do not hold
        holder, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(holder), leaf, buffer)
    model.tie_weights()
    return model


def _dequantized(info) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[info.format]
    rows = info.data.reshape(-1, info.data.nbytes // max(1, int(np.prod(info.shape[:-1]))))
    return torch.from_numpy(gguf.quants.dequantize(rows, kind).astype(np.float32).reshape(info.shape).copy())


def _undo_conversion(name: str, weight: torch.Tensor, config) -> torch.Tensor:
    """What llama.cpp's converter did: each head's rotary halves interleaved (llama), norms stored as 1 + w (Gemma)."""
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # (heads, head_dim / 2, 2, in)
        return pairs.transpose(1, 2).reshape(weight.shape)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return weight - 1
    return weight


def _config(metadata, tied: bool):
    from transformers import Gemma3TextConfig, LlamaConfig

    arch = metadata["general.architecture"]

    def key(name: str):
        return metadata[f"{arch}.{name}"]

    sizes = dict(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=key("attention.head_count"),
        num_key_value_heads=key("attention.head_count_kv"),
        max_position_embeddings=key("context_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=tied,
    )
    rope = dict(rope_type="default", rope_theta=key("rope.freq_base"))
    if arch == "llama":
        return LlamaConfig(**sizes, rope_parameters=rope)
    assert arch == "gemma3", arch
    head_dim = key("attention.key_length")
    local = dict(rope_type="default", rope_theta=10000.0)
    return Gemma3TextConfig(
        **sizes,
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        sliding_window=key("attention.sliding_window"),
        rope_parameters=dict(full_attention=rope, sliding_attention=local),
    )


def _shallow(config):
    """The config with one layer of each kind: as many as its buffers depend on."""
    small = copy.deepcopy(config)
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    small.num_hidden_layers = len(kinds)
    if getattr(small, "layer_types", None):
        small.layer_types = kinds
    return small


def logits(model, tokens: list[int], kv_dtype: torch.dtype = torch.float32, last: int = 0) -> np.ndarray:
    """float32 (rows, vocab) of one sequence, of its `last` tokens or all; keys and values rounded to `kv_dtype`."""
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            key_states, value_states = (x.to(kv_dtype).float() for x in (key_states, value_states))
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        return model(torch.tensor([tokens]), logits_to_keep=last, **{cache: Rounding()}).logits[0].float().numpy()
