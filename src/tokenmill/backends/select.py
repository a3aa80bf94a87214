"""Which backend runs a program: decided once at load, printed in the start-up log."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ResolvedEngine
from ..errors import ConfigError
from ..program import Program
from .interface import Executor

BACKENDS = ("cpu", "reference")
SCORING_ROWS = 64  # logit rows a step can give to prompt logprobs, besides one for each running sequence


def max_logit_rows(resolved: ResolvedEngine) -> int:
    return min(resolved.config.max_num_seqs + SCORING_ROWS, resolved.config.max_num_batched_tokens)


def make_executor(
    program: Program, resolved: ResolvedEngine, progress: Callable[[int, int], None] | None = None
) -> Executor:
    """Weights packed, pages and workspace allocated. Raises ConfigError where a setting cannot be met.

    progress(bytes packed, bytes in all) is called while weights are packed.
    """
    config = resolved.config
    if config.backend == "reference":
        from .reference import ReferenceExecutor

        return ReferenceExecutor(
            program, num_pages=resolved.num_pages, page_size=resolved.page_size, kv_dtype=config.kv_cache_dtype
        )
    if config.backend != "cpu":
        raise ConfigError(f"backend is {config.backend!r}; there are {', '.join(BACKENDS)}")
    from .cpu.executor import CpuExecutor

    return CpuExecutor(
        program,
        num_pages=resolved.num_pages,
        page_size=resolved.page_size,
        num_threads=resolved.num_threads,
        max_tokens=config.max_num_batched_tokens,
        max_requests=config.max_num_seqs,
        max_logit_rows=max_logit_rows(resolved),
        isa=config.isa,
        kv_dtype=config.kv_cache_dtype,
        progress=progress,
    )
