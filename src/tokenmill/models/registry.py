"""From a config and weights to a Program: finds the family by model_type and runs its build function.

Knows the families' names; their maths is in one file each.
"""

from __future__ import annotations

import dataclasses
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
    if weights.unused:
        names = ", ".join(weights.unused[:5]) + (", ..." if len(weights.unused) > 5 else "")
        raise UnsupportedModel(f"{len(weights.unused)} tensors have no place in this model: {names}")
    return Model(program, _context_length(cfg), cfg.vocab_size, config["model_type"], cfg)


def run_eagerly(config: dict[str, Any], weights: Weights, runner: OpRunner, step: StepInputs) -> np.ndarray:
    """Logits (L, vocab) of one step, each op run where the model text calls it: print() and pdb see arrays there."""
    family, cfg = _read(config)
    logits = family.build(EagerBuilder(runner, step), cfg, weights)
    assert logits.array is not None
    return logits.array


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """`config` and what its family assumes of keys that are not there: Gemma's published ones leave out most sizes."""
    fields = dataclasses.fields(_family(config).Config)
    assumed = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return assumed | {key: value for key, value in config.items() if value is not None or key not in assumed}


def _read(config: dict[str, Any]) -> tuple[ModuleType, Any]:
    family = _family(config)
    return family, read_config(family.Config, config)


def _family(config: dict[str, Any]) -> ModuleType:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type = {model_type!r} is not supported; tokenmill has {', '.join(sorted(FAMILIES))}",
            param="model_type",
        )
    return import_module(f".{FAMILIES[model_type]}", __package__)


def _context_length(cfg: Any) -> int:
    """YaRN states the length before stretching; the others state it after."""
    stretched = cfg.rope.factor * cfg.rope.original_max_position_embeddings if cfg.rope.rope_type == "yarn" else 0
    return max(cfg.max_position_embeddings, int(stretched))
