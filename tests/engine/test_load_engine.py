"""load_engine(): from a file to an engine that answers, every choice listed, every refusal one line before serving."""

import pytest

from tests.support.checkpoints import gguf_file
from tokenmill.config import EngineConfig
from tokenmill.core import FinishReason, SamplingParams
from tokenmill.engine.load import load_engine
from tokenmill.engine.messages import AddRequest
from tokenmill.errors import ConfigError, SourceError

MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(gguf_file(tmp_path_factory.mktemp("load") / "tiny.gguf", "llama"))


def test_a_file_becomes_an_engine_that_answers(path):
    told = []
    config = EngineConfig(model=path, kv_cache_bytes=MIB, num_threads=1)
    loaded = load_engine(config, progress=lambda what, done, total: told.append((done, total)))
    assert loaded.ready.model_digest == loaded.checkpoint.digest
    assert loaded.ready.vocab_size == loaded.model.vocab_size
    assert loaded.ready.max_model_len == loaded.resolved.max_model_len
    assert {"model", "context", "KV cache", "threads"} <= {what for what, _ in loaded.decisions}
    assert all(0 <= done <= total for done, total in told)
    engine = loaded.engine
    engine.add(AddRequest(request_id="a", prompt_token_ids=[5, 6, 7], params=SamplingParams(seed=1, max_tokens=5)))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    engine.close()
    assert sum(len(d.token_ids) for d in deltas) == 5 and deltas[-1].finish_reason == FinishReason.LENGTH


def test_what_cannot_be_met_is_refused_by_name(path):
    with pytest.raises(ConfigError, match="kv_cache_bytes is 1"):
        load_engine(EngineConfig(model=path, kv_cache_bytes=1))
    with pytest.raises(ConfigError, match="max_model_len"):
        load_engine(EngineConfig(model=path, max_model_len=10**6))
    with pytest.raises(SourceError, match="no model 'nowhere'"):
        load_engine(EngineConfig(model="nowhere"))
