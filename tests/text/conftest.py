"""Tokenizers for tests of text: a small byte-level one, a SentencePiece model trained on the spot, and SmolLM2's."""

from __future__ import annotations

import io

import pytest

from tests.support.checkpoints import CHAT_TEMPLATE, MERGES, token_list
from tokenmill.text.gguf_tokenizer import gguf_tokenizer
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "  Two spaces   and three, then\ttabs and 12345 numbers.",
    "Il était une fois un château où vivait un garçon naïf.",
    "Привет, мир! Как дела сегодня?",
    "def f(x):\n    return x * 2  # comment\n",
    "the them then there these they thing think this those through",
    "hello hello hello world world word words wording",
]


def byte_level_metadata(**changes) -> dict:
    """GGUF key-values of a small gpt2 tokenizer; changes replace keys without their tokenizer.ggml. (None: removed)."""
    tokens = token_list()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t.startswith("<|") else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    for key, value in changes.items():
        metadata["tokenizer.ggml." + key] = value
    return {key: value for key, value in metadata.items() if value is not None}


def train_sentencepiece(**options) -> bytes:
    """A small BPE model's file, trained as Llama's was: identity normalisation, bytes, every space kept."""
    import sentencepiece

    settings = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.999,
        "minloglevel": 2,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
    }
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4), model_writer=out, **(settings | options)
    )
    return out.getvalue()


def sentencepiece_metadata(model: bytes, **changes) -> dict:
    """GGUF key-values of that model, as the converter writes them."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(sp.get_piece_size())

    def kind(i: int) -> int:
        for name, value in (("unknown", 2), ("control", 3), ("unused", 5), ("byte", 6)):
            if getattr(sp, f"is_{name}")(i):
                return value
        return 1

    metadata = {
        "model": "llama",
        "tokens": [sp.id_to_piece(i) for i in ids],
        "scores": [sp.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "unknown_token_id": sp.unk_id(),
    }
    return {"tokenizer.ggml." + key: value for key, value in (metadata | changes).items() if value is not None}


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    return gguf_tokenizer(byte_level_metadata())


@pytest.fixture(scope="session")
def sp_file() -> bytes:
    return train_sentencepiece()


@pytest.fixture(scope="session")
def spm(sp_file) -> Tokenizer:
    return gguf_tokenizer(sentencepiece_metadata(sp_file))


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> Tokenizer:
    from tokenmill.weights.loader import open_checkpoint

    return load_tokenizer(open_checkpoint(smollm2_path))
