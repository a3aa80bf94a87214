"""How close an executor's distributions are to Transformers' on the same file dequantised to float32.

    kl, top1 = measure(executor_factory, path)
    python -m tests.support.quality reference|cpu [path]

KL(Transformers || executor) in nats and the share of positions with the same most likely token, over 4,000 tokens of
English (Python's own documentation) in windows of 512, every position counted. Transformers' part is computed once a
machine and kept under the temporary folder.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from .steps import Driver

CHUNK = 128  # rows of a step: bounds the logits held at once


def english_tokens(path: str | Path, count: int) -> list[int]:
    """The first `count` tokens of pydoc's topics under the model's own tokenizer."""
    from pydoc_data.topics import topics

    from tokenmill.text.tokenizer import load_tokenizer
    from tokenmill.weights.loader import open_checkpoint

    text = " ".join(topics[name] for name in sorted(topics))[: count * 12]
    return load_tokenizer(open_checkpoint(path)).encode(text, add_special_tokens=False)[:count]


def windows_of(tokens: list[int], window: int) -> list[list[int]]:
    return [tokens[i : i + window] for i in range(0, len(tokens), window)]


def reference_logits(path: str | Path, num_tokens: int = 4000, window: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32 (n,), and Transformers' logits minus each row's highest, f16 (n, vocab), memory-mapped."""
    path = Path(path)
    with open(path, "rb") as f:
        identity = hashlib.sha256(f.read(1 << 22) + str((path.stat().st_size, num_tokens, window)).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"tokenmill-quality-{os.getuid()}" / identity[:16]
    logits_file, tokens_file = folder / "logits.npy", folder / "tokens.npy"
    if not tokens_file.exists():
        from . import transformers_oracle

        folder.mkdir(parents=True, exist_ok=True)
        tokens = english_tokens(path, num_tokens)
        model = transformers_oracle.load(path)
        kept = np.empty((len(tokens), model.config.vocab_size), np.float16)
        for i, part in enumerate(windows_of(tokens, window)):
            logits = transformers_oracle.logits(model, part)
            kept[i * window : i * window + len(part)] = logits - logits.max(axis=1, keepdims=True)
        partial = folder / f"{os.getpid()}.npy"  # renamed when whole: runs may race
        np.save(partial, kept)
        partial.rename(logits_file)
        np.save(partial, np.array(tokens, np.int32))
        partial.rename(tokens_file)
    return np.load(tokens_file), np.load(logits_file, mmap_mode="r")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def kl_and_agreement(wanted: np.ndarray, got: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per row: KL(wanted || got) in nats, and whether both have the same highest logit."""
    p, q = log_softmax(wanted), log_softmax(got)
    return (np.exp(p) * (p - q)).sum(axis=1), wanted.argmax(axis=1) == got.argmax(axis=1)


def measure(
    executor_factory, path: str | Path, *, num_tokens: int = 4000, window: int = 512, **limits
) -> tuple[float, float]:
    """(mean KL in nats, top-1 agreement 0..1) of executor_factory(program, **limits) on the model at `path`."""
    from tokenmill.models.registry import build_model
    from tokenmill.weights.loader import open_checkpoint

    tokens, wanted = reference_logits(path, num_tokens, window)
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, checkpoint.weights)
    num_pages = -(-window // 16)
    limits = dict(num_pages=num_pages, page_size=16, max_tokens=CHUNK, max_requests=1, max_logit_rows=CHUNK) | limits
    driver = Driver(executor_factory(model.program, **limits), num_pages=num_pages)
    kl, same, row = [], [], 0
    for part in windows_of(tokens.tolist(), window):
        for start in range(0, len(part), CHUNK):
            got = driver.step({0: part[start : start + CHUNK]})[0]
            for i in range(0, len(got), 32):
                rows = slice(row + i, row + min(i + 32, len(got)))
                divergence, agrees = kl_and_agreement(np.asarray(wanted[rows], np.float32), got[i : i + 32])
                kl.append(divergence)
                same.append(agrees)
            row += len(got)
        driver.forget(0)
    return float(np.concatenate(kl).mean()), float(np.concatenate(same).mean())


if __name__ == "__main__":
    from tokenmill.weights.sources import resolve

    from .executors import FACTORIES

    kl, top1 = measure(FACTORIES[sys.argv[1]], sys.argv[2] if len(sys.argv) > 2 else resolve("smollm2-135m-instruct"))
    print(f"KL {kl:.5f} nats, top-1 {top1:.2%}")
