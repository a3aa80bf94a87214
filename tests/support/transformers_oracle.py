"""Transformers as the oracle: models in float32 with eager attention, from a Hugging Face folder or a GGUF file.

GGUF files go through Transformers' and the gguf package's own reading, so nothing of ours stands on both sides.
"""

from __future__ import annotations

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
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    buffers = AutoModelForCausalLM.from_config(_one_layer(config), dtype=torch.float32, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    for name, buffer in buffers.named_buffers():  # rotary tables and the like, which files do not hold
        holder, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(holder), leaf, buffer)
    model.tie_weights()
    return model


def _one_layer(config):
    import copy

    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    if getattr(small, "layer_types", None):
        small.layer_types = config.layer_types[:1]
    return small


def logits(model, tokens: list[int]) -> np.ndarray:
    """float32 (len(tokens), vocab) of one sequence."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
