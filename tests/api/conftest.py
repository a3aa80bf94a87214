"""One server for each configuration, shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.server import DOUBLE, Server, serving
from tests.support.checkpoints import gguf_file, rigged_gguf, token_list

TEXT = "abcdefghijklmnopqrstuvwxyz"  # what the rigged model writes, one token a letter
QUICK = ("--num-threads", "1", "--drain-seconds", "5")


def ids_of(text: str) -> list[int]:
    tokens = token_list()
    return [tokens.index(letter) for letter in text]


@pytest.fixture(scope="session")
def rigged_path(tmp_path_factory) -> Path:
    """Writes TEXT after any prompt, then its end token."""
    return rigged_gguf(tmp_path_factory.mktemp("rigged") / "rigged.gguf", ids_of(TEXT), context_length=256)


@pytest.fixture(scope="session")
def rigged(rigged_path) -> Iterator[Server]:
    with serving(rigged_path, *QUICK) as server:
        yield server


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> Iterator[Server]:
    """Writes TEXT over and over. One sequence runs at a time, two may wait; the context is long."""
    path = rigged_gguf(
        tmp_path_factory.mktemp("endless") / "endless.gguf", ids_of(TEXT), then=None, context_length=100_000
    )
    with serving(path, *QUICK, "--max-num-seqs", "1", "--max-waiting", "2", "--write-seconds", "2") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    return gguf_file(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", seed=3)


@pytest.fixture(scope="session")
def tiny(tiny_path) -> Iterator[Server]:
    """A tiny random llama with a context of 512 tokens."""
    with serving(tiny_path, *QUICK, "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture(scope="session")
def smol(smollm2_path) -> Iterator[Server]:
    with serving(smollm2_path, "--drain-seconds", "5", "--served-model-name", "smol") as server:
        yield server


@pytest.fixture(scope="session")
def double(rigged_path, tmp_path_factory) -> Iterator[Server]:
    """The rigged model's tokenizer over an engine that can be told to misbehave; short deadlines."""
    model = tmp_path_factory.mktemp("double") / "double.gguf"
    model.symlink_to(rigged_path)
    limits = ("--header-seconds", "2", "--body-seconds", "2", "--write-seconds", "3", "--max-body-bytes", "200000")
    with serving(model, *DOUBLE, *QUICK, *limits) as server:
        yield server
