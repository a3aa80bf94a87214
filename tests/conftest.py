"""Fixtures every room may use: the real models, fetched once into tokenmill's own cache, digests checked."""

import signal
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and what we start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 GGUF, 98 MB: the default model."""
    from tokenmill.weights.sources import resolve

    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma-3 270M base, Q4_K_M GGUF, 253 MB. Downloads 238 MB the first time: use it in slow tests."""
    from tokenmill.weights.sources import resolve

    return resolve("gemma-3-270m")
