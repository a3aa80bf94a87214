"""load_engine(): from an EngineConfig to an engine that can take requests, each choice made once and listed.

Reference -> files -> program -> resolved settings -> executor -> engine. Raises SetupError with one line to show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..backends.select import make_executor
from ..config import Decision, EngineConfig, Machine, ModelFacts, ResolvedEngine, resolve
from ..models.registry import Model, build_model
from ..weights import sources
from ..weights.loader import Checkpoint, open_checkpoint
from .engine import Engine
from .messages import EngineReady

Progress = Callable[[str, int, int | None], None]  # what is being done, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    engine: Engine
    checkpoint: Checkpoint
    model: Model
    resolved: ResolvedEngine
    decisions: list[Decision]
    ready: EngineReady


def load_engine(config: EngineConfig, progress: Progress | None = None) -> LoadedEngine:
    """Fetch (if need be), open, build and pack the model; nothing is allocated before everything has been checked."""
    path = sources.resolve(config.model, revision=config.revision, progress=progress)
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, checkpoint.weights)
    facts = ModelFacts(model.context_length, model.program.weight_bytes, model.program.kv_bytes_per_token)
    resolved, decisions = resolve(config, Machine.detect(), facts)
    packing = None if progress is None else lambda done, total: progress("packing weights", done, total)
    executor = make_executor(model.program, resolved, packing)
    checkpoint.check_unchanged()
    decisions = [("model", f"{checkpoint.name}, {model.family}, {checkpoint.path}"), *decisions, *executor.decisions]
    ready = EngineReady(
        model_name=checkpoint.name,
        model_digest=checkpoint.digest,
        max_model_len=resolved.max_model_len,
        vocab_size=model.vocab_size,
        decisions=decisions,
    )
    checkpoint.release()
    # overlap: on a CPU the next step's plan would take its time from the kernels of this one; docs/log.md, 2026-11-30.
    return LoadedEngine(Engine(executor, resolved, overlap=False), checkpoint, model, resolved, decisions, ready)
