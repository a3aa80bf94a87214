"""From a config and weights to a Program: finds the family by model_type and runs its build function.

Knows the families' names; their maths is in one file each.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import UnsupportedModel
from ..program import EagerBuilder, Program, RecordingBuilder, StepInputs, Weights
from ..program.builder import OpRunner
from .hf_config import read_config

FAMILIES = {  # model_type -> module
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


@dataclass(frozen=True, slots=True)
class Model:
    program: Program
    context_length: int  # tokens the model was made for
    vocab_size: int
    family: str  # model_type
    config: Any  # the family's Config


def build_model(config: dict[str, Any], weights: Weights) -> Model:
    """Record the program of the model that `config` (config.json's dict) describes.

    Raises UnsupportedModel: an unknown family or setting, a tensor missing, misshapen or left over.
    """
    family, cfg = _read(config)
    builder = RecordingBuilder()
    program = builder.finish(family.build(builder, cfg, weights))
    _check(cfg, weights, program)
    return Model(program, _context_length(cfg), cfg.vocab_size, _text_config(config)["model_type"], cfg)


def run_eagerly(config: dict[str, Any], weights: Weights, runner: OpRunner, step: StepInputs) -> np.ndarray:
    """Logits (L, vocab) of one step, each op run where the model text calls it: print() and pdb see arrays there."""
    family, cfg = _read(config)
    logits = family.build(EagerBuilder(runner, step), cfg, weights)
    assert logits.array is not None
    return logits.array


def _read(config: dict[str, Any]) -> tuple[ModuleType, Any]:
    config = _text_config(config)
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type = {model_type!r} is not supported; tokenmill has {', '.join(sorted(FAMILIES))}",
            param="model_type",
        )
    family = import_module(f".{FAMILIES[model_type]}", __package__)
    return family, read_config(family.Config, config)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and config.get("model_type") not in FAMILIES else config


def _context_length(cfg: Any) -> int:
    """YaRN states the length before stretching; the others state it after."""
    stretched = cfg.rope.factor * cfg.rope.original_max_position_embeddings if cfg.rope.rope_type == "yarn" else 0
    return max(cfg.max_position_embeddings, int(stretched))


def _check(cfg: Any, weights: Weights, program: Program) -> None:
    """The file and the config agree: nothing left over, and the sizes that the shape rules do not tie together."""
    if weights.unused:
        names = ", ".join(weights.unused[:5]) + (", ..." if len(weights.unused) > 5 else "")
        raise UnsupportedModel(f"{len(weights.unused)} tensors have no place in this model: {names}")
    sizes = [
        ("embed_tokens", (cfg.vocab_size, cfg.hidden_size)),
        (weights.head.name, (cfg.vocab_size, cfg.hidden_size)),
    ]
    for i in range(cfg.num_hidden_layers):
        sizes.append((f"layers.{i}.gate_proj", (cfg.intermediate_size, cfg.hidden_size)))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            name = f"layers.{i}.{name}"
            if (f"{name}.bias" in weights) != (name.rsplit(".", 1)[1] in cfg.biases):
                has = "has" if f"{name}.bias" in weights else "lacks"
                raise UnsupportedModel(f"the file {has} {name}.bias, against its config")
    for name, shape in sizes:
        if weights[name].shape != shape:
            raise UnsupportedModel(f"{name} has shape {weights[name].shape}; the config makes it {shape}")
