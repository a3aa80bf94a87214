"""Which backend runs a program: decided once at load."""

from __future__ import annotations

from ..config import ResolvedEngine
from ..program import Program
from .interface import Executor


def make_executor(program: Program, resolved: ResolvedEngine) -> Executor:
    """Weights packed, pages and workspace allocated; raises ConfigError where a setting cannot be met."""
    from .reference import ReferenceExecutor

    return ReferenceExecutor(program, num_pages=resolved.num_pages, page_size=resolved.page_size)
