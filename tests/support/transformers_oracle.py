"""Transformers as the oracle: models in float32 with eager attention, from a Hugging Face folder or a GGUF file.

GGUF files go through Transformers' and the gguf package's own reading, so nothing of ours stands on both sides.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import numpy as np
import torch


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
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    buffers = AutoModelForCausalLM.from_config(_shallow(config), dtype=torch.float32, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    for name, buffer in buffers.named_buffers():  # rotary tables and the like, which files do not hold
        holder, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(holder), leaf, buffer)
    model.tie_weights()
    return model


def _shallow(config):
    """The config with one layer of each kind: as many as its buffers depend on."""
    small = copy.deepcopy(config)
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    small.num_hidden_layers = len(kinds)
    if getattr(small, "layer_types", None):
        small.layer_types = kinds
    return small


def logits(model, tokens: list[int], kv_dtype: torch.dtype = torch.float32) -> np.ndarray:
    """float32 (len(tokens), vocab) of one sequence, computed with keys and values rounded to `kv_dtype`."""
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            key_states, value_states = (x.to(kv_dtype).float() for x in (key_states, value_states))
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        return model(torch.tensor([tokens]), **{cache: Rounding()}).logits[0].float().numpy()
