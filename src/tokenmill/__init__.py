"""tokenmill: an LLM inference engine. `from tokenmill import LLM, AsyncLLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core import SamplingParams
    from .llm import LLM, AsyncLLM
    from .outputs import RequestOutput

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_HOMES = {"SamplingParams": "core", "LLM": "llm", "AsyncLLM": "llm", "RequestOutput": "outputs"}


def __dir__() -> list[str]:
    """What completion offers: the names there are, loaded or not."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import on first use, so that `tokenmill --help` does not pay for numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
