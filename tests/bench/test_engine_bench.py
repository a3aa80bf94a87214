"""The engine benchmark's arithmetic and order, with runners that keep no clock."""

import json
import sys

import pytest
from click.testing import CliRunner

from tests.support.checkpoints import gguf_file
from tokenmill.bench.engine import (
    DECODE,
    PREFILL_512,
    Case,
    LlamaCppRunner,
    Timing,
    TokenmillRunner,
    longest_sequence,
    run_cases,
    streams_case,
)
from tokenmill.cli.main import main
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, SetupError


class Stub:
    def __init__(self, name, log, speed):
        self.name, self.log, self.speed = name, log, speed

    def generate(self, prompts, max_tokens):
        self.log.append((self.name, prompts))
        return Timing(first=1.0 / self.speed, finished=(1.0 + max_tokens) / self.speed)

    def close(self):
        pass


def test_each_case_counts_its_own_phase():
    timing = Timing(first=2.0, finished=6.0)
    assert DECODE.rate(timing) == 127 / 4
    assert PREFILL_512.rate(timing) == 256
    assert streams_case(16, 128, 128).rate(timing) == 16 * 256 / 6
    assert longest_sequence([DECODE, PREFILL_512]) == 513


def test_rounds_are_interleaved_a_b_b_a_on_equal_prompts():
    log = []
    runners = [Stub("a", log, 2.0), Stub("b", log, 1.0)]
    result = run_cases(runners, [Case("c", 2, 5, 3, "total")], vocab_size=100, repeat=2)
    timed = log[2:]  # after the warm-up of each
    assert [name for name, _ in timed] == ["a", "b", "b", "a"]
    assert timed[0][1] == timed[1][1] != timed[2][1] == timed[3][1]
    assert all(len(p) == 5 and max(p) < 100 for _, prompts in timed for p in prompts)
    assert result["medians"] == [{"case": "c", "a": 8.0, "b": 4.0, "ratio to b": 2.0}]


FAKE_PEER = """
import json, sys
settings = json.loads(sys.stdin.readline())
print(json.dumps({"vocab_size": 10, "version": "0"}), flush=True)
for line in sys.stdin:
    if settings["repack"] and %(dies)s: sys.exit(132)
    question = json.loads(line)
    print(json.dumps({"first": 0.5, "finished": 1.5}), flush=True)
"""


@pytest.mark.parametrize("dies", [True, False])
def test_a_peer_that_dies_repacked_is_measured_without(tmp_path, dies):
    """The interpreter stands for `python peer_llama.py`: a wrapper that runs a fake instead."""
    (tmp_path / "fake.py").write_text(FAKE_PEER % {"dies": dies})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'fake.py'}\n")
    python.chmod(0o755)
    runner = LlamaCppRunner(tmp_path / "m.gguf", threads=1, max_tokens=64, max_seqs=2, python=str(python))
    try:
        assert runner.settings["repack"] is not dies
        assert runner.generate([[1, 2]], 3) == Timing(0.5, 1.5)
    finally:
        runner.close()
    assert json.dumps(runner.settings)  # goes into the result file


def test_a_peer_that_cannot_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be run"):
        LlamaCppRunner(tmp_path / "m.gguf", threads=1, max_tokens=64, max_seqs=2, python=str(tmp_path / "none"))


def test_without_llama_cpp_the_message_says_so(tmp_path):
    with pytest.raises(SetupError, match="llama"):
        LlamaCppRunner(tmp_path / "m.gguf", threads=1, max_tokens=64, max_seqs=2)


def test_the_command_measures_a_model_in_this_process(tmp_path):
    model = gguf_file(tmp_path / "tiny.gguf", "llama")
    done = CliRunner().invoke(
        main,
        f"bench throughput {model} --streams 3 --input-tokens 20 --output-tokens 5 --repeat 2 --num-threads 1 "
        f"--kv-cache-bytes 4000000 --output-dir {tmp_path / 'out'}",
        catch_exceptions=False,
    )
    assert done.exit_code == 0 and "3 streams of 20+5" in done.output
    (path,) = (tmp_path / "out").glob("throughput-*.json")
    result = json.loads(path.read_text())
    assert [r["round"] for r in result["rounds"]] == [0, 1] and result["medians"][0]["tokenmill"] > 0
    assert result["bandwidth_bytes_per_s"] > 1e8 and result["machine"]["cores"] >= 1
    assert path.with_suffix(".png").exists()


def test_our_runner_writes_exactly_what_is_asked_and_caches_nothing(tmp_path):
    runner = TokenmillRunner(
        EngineConfig(model=str(gguf_file(tmp_path / "tiny.gguf", "llama")), num_threads=1, kv_cache_bytes=4 << 20)
    )
    for _ in range(2):
        timing = runner.generate([list(range(50)), list(range(60))], 7)
        assert 0 < timing.first <= timing.finished
    stats = runner.loaded.engine.stats()
    assert stats.prefix_cache_hits == 0 and stats.generation_tokens == 2 * 2 * 7
    runner.close()


def test_what_the_engine_benchmark_cannot_do_is_one_line(tmp_path):
    model = gguf_file(tmp_path / "tiny.gguf", "llama", max_position_embeddings=256)
    for options, says in (("--against vllm", "knows llama-cpp"), ("", "a case needs 2049 tokens")):
        done = CliRunner().invoke(
            main, f"bench latency {model} {options} --num-threads 1 --kv-cache-bytes 4000000 --output-dir {tmp_path}"
        )
        assert done.exit_code == 1 and says in done.stderr and not list(tmp_path.glob("*.json"))
