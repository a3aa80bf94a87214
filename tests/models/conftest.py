"""Tiny random models of every family, as files, with Transformers' logits; every test runs on every executor."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import checkpoints, transformers_oracle
from tests.support.executors import FACTORIES, LIMITS, NUM_PAGES
from tests.support.steps import Driver
from tokenmill.models.registry import build_model
from tokenmill.weights.loader import open_checkpoint


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=FACTORIES)
def executor_factory(request):
    """factory(program, **limits) -> Executor."""
    return functools.partial(FACTORIES[request.param], **LIMITS)


@dataclass
class Tiny:
    """A tiny model's file or folder, opened by us, and Transformers' model of the same weights."""

    path: Path
    oracle_path: Path

    @functools.cached_property
    def model(self):
        checkpoint = open_checkpoint(self.path)
        return build_model(checkpoint.config, checkpoint.weights)

    @functools.cached_property
    def oracle(self):
        return transformers_oracle.load(self.oracle_path)

    def driver(self, executor_factory, **limits) -> Driver:
        return Driver(executor_factory(self.model.program, **limits), num_pages=NUM_PAGES)

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(3, self.model.vocab_size, count).tolist()

    def wanted(self, tokens: list[int], kv_dtype: torch.dtype = torch.float16) -> np.ndarray:
        """Transformers' logits, keys and values rounded to kv_dtype as a cache would."""
        return transformers_oracle.logits(self.oracle, tokens, kv_dtype)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(family, kind, **overrides): kind is float32, float16, bfloat16 (folders) or gguf (F32). Made once each."""
    made: dict[str, Tiny] = {}

    def make(family: str, kind: str = "float32", **overrides) -> Tiny:
        key = repr((family, kind, sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{kind}")
            if kind == "gguf":
                path = checkpoints.gguf_file(folder / "model.gguf", family, **overrides)
                made[key] = Tiny(path, make(family, "float32", **overrides).path)
            else:
                path = checkpoints.hf_folder(folder / "model", family, dtype=kind, **overrides)
                made[key] = Tiny(path, path)
        return made[key]

    return make
