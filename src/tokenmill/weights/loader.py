"""open_checkpoint(path): a model's files -> Checkpoint, everything checked, nothing copied that need not be.

Opening maps the files and reads their headers; weights stay in the files until a backend packs them. What is checked:
every tensor the configuration asks for is there exactly once with the right shape, and no other tensor is.

Which head a model ends with, when config.json and the files disagree on tie_word_embeddings:
- tied, no lm_head stored: the embedding matrix is the head.
- tied, lm_head stored: equal bytes are dropped; a different matrix is used as the head, with a warning.
- not tied, lm_head stored: it is the head. Not tied, none stored: refused.
GGUF has no such key: output.weight is the head where it is stored, the embedding matrix where it is not.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..models.registry import with_defaults
from ..program.weight import Weight, Weights
from . import gguf, names, safetensors
from .files import MappedFile, TensorInfo
from .gguf_config import config_from_gguf

log = logging.getLogger("tokenmill.weights")

DIGEST_WHOLE = 1 << 16  # tensors up to this many bytes are digested whole
DIGEST_PIECES, DIGEST_PIECE = 8, 1 << 12  # of larger ones, so many pieces of so many bytes


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened model. `weights` hold canonical names; `config` is a text model's config.json, resolved."""

    name: str
    path: Path
    kind: str  # "gguf" or "hf"
    config: dict[str, Any]
    weights: Weights
    metadata: Mapping[str, Any]  # GGUF key-values; {} for "hf"
    folder: Path | None  # of an "hf" model
    files: list[Path]
    tensors: dict[str, Weight] = field(repr=False)  # what `weights` wraps
    mapped: list[MappedFile] = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """32 hex digits that name the weights: their names, shapes and formats, small ones whole, pieces of the large.

        Any training step changes every tensor, so two models that differ by accident differ here. It is no defence
        against someone who builds a twin on purpose: whoever may write a model's file is trusted with its cache.
        """
        h = hashlib.sha256()
        for name, weight in sorted(self.tensors.items()):
            self.release()  # a piece brings up to a huge page of neighbours into memory
            h.update(f"{name} {weight.format} {weight.shape}\n".encode())
            if weight.nbytes <= DIGEST_WHOLE:
                h.update(weight.data.data)
                continue
            for start in np.linspace(0, weight.nbytes - DIGEST_PIECE, DIGEST_PIECES, dtype=np.int64):
                h.update(weight.data[start : start + DIGEST_PIECE].data)
        for key in sorted(self.config):
            h.update(f"{key}={self.config[key]!r}\n".encode())
        return h.hexdigest()[:32]

    def release(self) -> None:
        """Let go of the memory that holds what has been read of the files."""
        for file in self.mapped:
            file.release()

    def check_unchanged(self) -> None:
        """Raise ModelFileError if a file was changed since it was opened. Call once the weights are packed."""
        for file in self.mapped:
            file.check_unchanged()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file (or the first part of a split one) or a folder with either GGUF or Hugging Face files.

    Raises ModelFileError for a missing, cut, damaged or hostile file, UnsupportedModel for a sound one that tokenmill
    cannot run; the message names the file and the tensor or key.
    """
    path = Path(os.path.expanduser(path))
    if not os.path.exists(path):
        raise ModelFileError(f"{path} does not exist")
    if os.path.exists(path / "config.json"):
        checkpoint = _open_folder(path)
    elif path.suffix in (".safetensors", ".json"):
        raise ModelFileError(f"{path} is one file of a Hugging Face folder; give the folder, {path.parent}")
    else:
        checkpoint = _open_gguf(path)
    checkpoint.release()  # the vectors that were read lie all over the files, and brought their neighbours
    return checkpoint


def _open_gguf(path: Path) -> Checkpoint:
    metadata, tensors, files = gguf.open_gguf(path)
    config = config_from_gguf(metadata, tensors)
    model_type = config["model_type"]
    stored: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        canonical = names.gguf_name(model_type, name)
        if canonical is not None:
            stored[canonical] = info
    biased = frozenset(
        name.removeprefix("layers.0.").removesuffix(".bias")
        for name in stored
        if name.startswith("layers.0.") and name.endswith(".bias")
    )
    weights = _collect(config, stored, biased)
    if model_type in ("llama", "mistral"):
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for name, weight in weights.items():
            part = name.removesuffix(".bias").rpartition(".")[2]
            if part in heads:
                weights[name] = names.unpermute(weight, heads[part])
    paths = [file.path for file in files]
    name = re.sub(r"-\d{5}-of-\d{5}$", "", paths[0].stem)
    return Checkpoint(name, path, "gguf", config, Weights(weights), metadata, None, paths, weights, files)


def _open_folder(folder: Path) -> Checkpoint:
    config = _read_config(folder / "config.json")
    model_type = config["model_type"]
    tensors, files = safetensors.open_safetensors(folder)
    stored: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        canonical = names.hf_name(model_type, name)
        if canonical is None:
            continue
        if canonical in stored:
            raise ModelFileError(f"{folder}: {name!r} and {stored[canonical].name!r} are the same tensor")
        safetensors.check_format(info)
        stored[canonical] = info
    _resolve_head(config, stored)
    weights = _collect(config, stored, names.biased_by_config(config))
    if model_type == "gemma3_text":
        for name, weight in weights.items():
            if name.endswith("norm"):
                weights[name] = names.as_f32(weight, plus=1.0)
    paths = [folder / "config.json", *(file.path for file in files)]
    return Checkpoint(_folder_name(folder), folder, "hf", config, Weights(weights), {}, folder, paths, weights, files)


def _folder_name(folder: Path) -> str:
    """The folder's own name, or org/name of a snapshot in the hub's cache (models--org--name/snapshots/COMMIT)."""
    folder = folder.absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def _read_config(path: Path) -> dict[str, Any]:
    """config.json, its text_config pulled up where it describes a multimodal model."""
    config = safetensors.read_json(path, limit=16 << 20)
    if isinstance(config.get("text_config"), dict):
        outer = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
        config = outer | config["text_config"]
        if outer.get("model_type") == "gemma3":
            config["model_type"] = "gemma3_text"
    model_type = config.get("model_type")
    if model_type not in names.MODEL_TYPES:
        raise UnsupportedModel(
            f"{path}: model_type {model_type!r} is not supported; these are: {', '.join(names.MODEL_TYPES)}"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise UnsupportedModel(f"{path}: weights quantised by {method!r} are not supported")
    config = with_defaults(config)
    tied = model_type == "gemma3_text"  # what the family's class assumes where config.json does not say
    config["tie_word_embeddings"] = config.get("tie_word_embeddings", tied)
    if not isinstance(config["tie_word_embeddings"], bool):
        raise ModelFileError(f"{path}: tie_word_embeddings is {config['tie_word_embeddings']!r}, not true or false")
    return config


def _resolve_head(config: dict[str, Any], stored: dict[str, TensorInfo]) -> None:
    """Apply the rule at the top of this file to an opened folder."""
    head, embedding = stored.get("lm_head"), stored.get("embed_tokens")
    if head is None and not config["tie_word_embeddings"]:
        raise ModelFileError("tie_word_embeddings is false and 'lm_head.weight' is not stored: the model has no head")
    if head is None or not config["tie_word_embeddings"] or embedding is None:
        return
    if (head.shape, head.format) == (embedding.shape, embedding.format) and np.array_equal(head.data, embedding.data):
        del stored["lm_head"]
        return
    log.warning("tie_word_embeddings is true, but a different lm_head.weight is stored: it is used as the head")
    config["tie_word_embeddings"] = False


def _collect(config: dict[str, Any], stored: dict[str, TensorInfo], biased: frozenset[str]) -> dict[str, Weight]:
    """Weights of exactly the tensors the configuration asks for. Vectors become F32."""
    layers = names.Dims.of(config).layers
    if layers > len(stored):  # also bounds the table below by what the file really holds
        raise ModelFileError(f"the model's config has {layers} layers, its files hold {len(stored)} tensors in all")
    expected = names.expected_tensors(config, biased)
    if not config["tie_word_embeddings"]:
        expected["lm_head"] = expected["embed_tokens"]
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ModelFileError(f"the model's files have no tensor for {safetensors._some(missing)}")
    for name, info in stored.items():
        where = f"{info.file.path}: tensor {info.name!r}"
        if name not in expected:
            raise UnsupportedModel(f"{where} is not part of this {config['model_type']} model ({name})")
        if info.shape != expected[name]:
            raise ModelFileError(f"{where} has shape {info.shape}, the model's config asks for {expected[name]}")
    weights = {}
    for name, info in stored.items():
        weight = Weight(name, info.shape, info.format, info.data, mapped=True)
        weights[name] = weight if len(info.shape) == 2 else names.as_f32(weight)
    return weights
