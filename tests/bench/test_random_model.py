"""Random models: files that an independent reader agrees with, weights of a usual size, an engine that runs on them."""

import math
from dataclasses import replace

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from tokenmill.bench import random_model
from tokenmill.bench.random_model import FORMATS, PRESETS, Shape, write_random_model
from tokenmill.bench.runners import TokenmillRunner
from tokenmill.cli.main import main
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.text.gguf_tokenizer import gguf_tokenizer
from tokenmill.weights.gguf import GGUFFile

TINY = Shape("Tiny", 2, 256, 4, 2, 512, 600, 256, 1e4, False)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    monkeypatch.setattr(random_model, "PIECE", 1 << 14)  # several pieces a tensor
    return "tiny"


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read_alike_elsewhere_and_runs(tiny, tmp_path, format):
    path = tmp_path / "m.gguf"
    assert write_random_model(path, tiny, format) == path.stat().st_size
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "llama"
    ours = GGUFFile(path)
    assert len(reader.tensors) == len(ours.tensors) == 3 + 2 * 9
    for tensor in reader.tensors:
        info = ours.tensors[tensor.name]
        assert np.array_equal(tensor.data.view(np.uint8).ravel(), info.data)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        if "norm" in tensor.name:
            assert info.format == "F32" and (values == 1).all()
        else:
            assert info.format == format
            assert 0.01 < values.std() < 0.04 and abs(values.mean()) < 0.2 * values.std()
    runner = TokenmillRunner(EngineConfig(model=str(path), num_threads=1, kv_cache_bytes=4 << 20))
    assert runner.generate([[5, 6, 7], [8, 9]], 4).decoded == 2 * 3  # a logit that is not finite would end it
    runner.close()


def test_a_preset_is_the_model_it_names(tiny, tmp_path):
    def parameters(shape):
        return sum(math.prod(dims) for _, dims in random_model._tensors(shape))

    assert parameters(PRESETS["smollm2-135m"]) == 134_515_008
    assert parameters(PRESETS["llama-1.1b"]) == 1_100_048_384
    assert parameters(replace(TINY, tied=True)) == parameters(TINY) - 600 * 256


def test_rows_that_hold_no_whole_block_take_the_next_format():
    """SmolLM2's 576 features are no multiple of Q4_K's 256; its 1,536 are."""
    assert random_model._format("Q4_K", (49152, 576)) == "Q5_0" and random_model._format("Q4_K", (576, 1536)) == "Q4_K"


def test_the_tokenizer_knows_every_byte(tiny, tmp_path):
    path = tmp_path / "m.gguf"
    write_random_model(path, tiny, "Q8_0")
    tokenizer = gguf_tokenizer(GGUFFile(path).metadata)
    text = "the thing\n in 3 häuser, 日本 \x00\x7f"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.encode("the") == [258]


def test_equal_seeds_make_equal_files(tiny, tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path, seed in zip(paths, (1, 1, 2)):
        write_random_model(path, tiny, "Q4_0", seed=seed)
    a, b, c = (path.read_bytes() for path in paths)
    assert a == b != c


def test_the_command(tiny, tmp_path):
    path = tmp_path / "m.gguf"
    done = CliRunner().invoke(main, f"bench model {path} --like tiny --format F16", catch_exceptions=False)
    assert done.exit_code == 0 and f"written: {path}" in done.output and path.exists()
    done = CliRunner().invoke(main, f"bench model {path} --like tiny --format F16")
    assert done.exit_code == 1 and "--force" in done.stderr
    for options, says in (("--like huge", "there are smollm2-135m"), ("--format Q9", "there are Q4_0")):
        done = CliRunner().invoke(main, f"bench model {tmp_path / 'n.gguf'} {options}")
        assert done.exit_code == 1 and says in done.stderr and not (tmp_path / "n.gguf").exists()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_random_model(tmp_path / "no" / "m.gguf", tiny, "F16")


def test_what_is_cut_short_leaves_nothing(tiny, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random_model(tmp_path / "m.gguf", tiny, "F16", progress=stop)
    assert not list(tmp_path.iterdir())
