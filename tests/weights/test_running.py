"""What a file's form must not change, seen in the logits: parts, stored heads, mixed formats, the rigged sequence."""

import numpy as np
import pytest

from tests.support.checkpoints import IM_END_ID, gguf_file, hf_folder, rigged_gguf
from tests.support.executors import FACTORIES
from tests.support.gguf_writer import edit_gguf, split_gguf
from tests.support.steps import Driver
from tokenmill.models.registry import build_model
from tokenmill.quant.formats import BLOCKS
from tokenmill.weights.loader import open_checkpoint

TOKENS = [7, 100, 33, 260, 5, 61, 61, 2, 300]


@pytest.fixture(params=FACTORIES)
def logits(request):
    """path -> logits f32 (len(tokens), vocab)."""

    def run(path, tokens=TOKENS):
        checkpoint = open_checkpoint(path)
        program = build_model(checkpoint.config, checkpoint.weights).program
        assert not checkpoint.weights.unused
        executor = FACTORIES[request.param](program, num_pages=8, page_size=16)
        return Driver(executor, num_pages=8).run(list(tokens))

    return run


def test_a_split_file_runs_as_the_whole(logits, tmp_path):
    path = gguf_file(tmp_path / "m.gguf", "qwen3", format="Q8_0")
    (tmp_path / "parts").mkdir()
    parts = split_gguf(path, tmp_path / "parts", 3)
    whole = logits(path)
    assert np.array_equal(logits(parts[0]), whole)
    assert np.array_equal(logits(tmp_path / "parts"), whole)


def test_a_stored_copy_of_the_embeddings_is_the_same_head(logits, tmp_path):
    path = gguf_file(tmp_path / "m.gguf", "llama", tie_word_embeddings=True)
    same = edit_gguf(path, tmp_path / "same.gguf", tensors=lambda t: t | {"output.weight": t["token_embd.weight"]})
    assert np.array_equal(logits(path), logits(same))


def test_a_folder_runs_as_its_gguf(logits, tmp_path):
    for family in ("llama", "gemma3"):
        folder = hf_folder(tmp_path / family, family)
        assert np.allclose(logits(folder), logits(gguf_file(tmp_path / "m.gguf", family)), atol=1e-4)


def test_every_format_runs_in_one_file(logits, tmp_path):
    """Each matrix in another format, as files named Q4_K_M really are."""
    formats = iter([*BLOCKS] * 10)
    sizes = dict(hidden_size=256, intermediate_size=256)
    path = gguf_file(tmp_path / "m.gguf", "llama", format=lambda name: next(formats), **sizes)
    used = {weight.format for weight in open_checkpoint(path).weights.values()}
    assert used == set(BLOCKS)
    result = logits(path)
    assert np.isfinite(result).all() and result.std() > 0


@pytest.mark.parametrize("format", ["F32", "Q8_0", "Q4_0"])
def test_the_rigged_model_writes_its_sequence(logits, tmp_path, format):
    sequence = [200, 17, 301, 64, 5]
    path = rigged_gguf(tmp_path / "r.gguf", sequence, format=format)
    best = logits(path, [9, *sequence]).argmax(axis=1)
    assert best.tolist() == [*sequence, IM_END_ID]
    loop = rigged_gguf(tmp_path / "l.gguf", sequence, then=None, format=format)
    assert logits(loop, sequence).argmax(axis=1).tolist() == [*sequence[1:], sequence[0]]
