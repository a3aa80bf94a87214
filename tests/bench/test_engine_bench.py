"""The engine benchmark's arithmetic and order, with runners that keep no clock; then the commands on tiny models."""

import json
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.support.checkpoints import gguf_file
from tokenmill.bench import engine as engine_bench
from tokenmill.bench.cases import (
    DECODE,
    FULL,
    MIXED,
    QUICK,
    Case,
    Timing,
    batch_case,
    decode_case,
    mixed_loss,
    prefill_case,
    streams_case,
)
from tokenmill.bench.engine import run_cases
from tokenmill.bench.machine import Ceilings
from tokenmill.bench.runners import LlamaCppRunner, RunnerDied, TokenmillRunner
from tokenmill.cli.main import main
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, SetupError

ONE = Ceilings(1.0, 1.0, 1.0)


class Stub:
    def __init__(self, name, log, speed, dies_in=()):
        self.name, self.log, self.speed, self.dies_in = name, log, speed, dies_in

    def generate(self, prompts, max_tokens, late=None):
        self.log.append((self.name, prompts, late))
        if len(prompts) in self.dies_in:
            raise RunnerDied(f"{self.name} ended with status -4")
        after = max_tokens - 1
        seconds = 1.0 / self.speed
        return Timing(seconds, (1 + after) * seconds, len(prompts) * after, after * seconds, 2 * seconds, len(prompts))

    def close(self):
        pass


def run(runners, cases, **options):
    options = {"vocab_size": 100, "ceilings": lambda: ONE, "limit": lambda case, ceilings: None, **options}
    return run_cases(runners, cases, **options)


# ---- cases


def test_each_case_counts_its_own_phase():
    timing = Timing(first=2.0, finished=6.0, decoded=100, decoding=4.0, late=2.0, beside=52)
    assert DECODE.rate(timing) == 25
    assert prefill_case(512).rate(timing) == 256
    assert streams_case(16, 128, 128).rate(timing) == 16 * 256 / 6
    assert MIXED.rate(timing) == (2048 + 52) / 2


def test_the_loss_of_mixing_is_the_time_over_that_of_its_parts():
    prefill, decode = Timing(3.0, 3.0), Timing(1.0, 9.0, decoded=80, decoding=8.0)
    assert mixed_loss(Timing(1.0, 9.0, late=4.4, beside=10), prefill, decode) == pytest.approx(0.1)


def test_the_sets_hold_what_they_promise():
    assert {case.streams for case in FULL if case.counts == "decode"} == {1, 4, 8, 16, 32, 64}
    assert {case.prompt_tokens for case in FULL if case.counts == "prefill"} == {512, 2048, 8000}
    assert set(QUICK) < set(FULL) and len({case.name for case in FULL}) == len(FULL)
    assert max(case.longest for case in FULL) <= 8192  # SmolLM2's context


# ---- rounds


def test_rounds_are_interleaved_a_b_b_a_on_equal_prompts():
    log = []
    runners = [Stub("a", log, 2.0), Stub("b", log, 1.0)]
    result = run(runners, [Case("c", 2, 5, 3, "total")], repeat=2)
    timed = log[2:]  # after the warm-up of each
    assert [name for name, *_ in timed] == ["a", "b", "b", "a"]
    assert timed[0][1] == timed[1][1] != timed[2][1] == timed[3][1]
    assert all(len(p) == 5 and max(p) < 100 for _, prompts, _ in timed for p in prompts)
    (row,) = result["medians"]
    assert (row["a"], row["b"], row["ratio to b"]) == (10.67, 5.33, 2.002) and result["complete"]


def test_a_share_is_taken_of_the_ceilings_beside_the_round():
    """The machine slows down after the first round, rates and limits with it; the share is of the medians shown."""
    speeds = iter([8.0, 8.0, 4.0])
    a = Stub("a", [], 1.0)
    generate = a.generate

    def slower(prompts, max_tokens, late=None):
        timing = generate(prompts, max_tokens)
        a.speed *= 0.75 if len(a.log) == 2 else 1  # after the first timed run: the middle of 8 and 4 is 6
        return timing

    a.generate = slower
    result = run(
        [a],
        [Case("c", 1, 5, 5, "decode")],
        repeat=2,
        ceilings=lambda: Ceilings(next(speeds), 1.0, 1.0),
        limit=lambda case, ceilings: ceilings.read_bytes / 4,
    )
    assert [row["read_bytes"] for row in result["ceilings"]] == [8, 6]
    assert result["medians"] == [{"case": "c", "panel": "decode", "limit": 1.75, "a": 0.88, "share": 0.5029}]


def test_a_mixed_case_also_runs_its_parts():
    log = []
    result = run([Stub("a", log, 1.0)], [replace(MIXED, late_tokens=20)], repeat=1)
    assert [(len(prompts), late and len(late)) for _, prompts, late in log[1:]] == [(8, 20), (1, None), (8, None)]
    assert result["medians"][0]["loss a"] == result["rounds"][0]["loss"] == 0.0


def test_a_peer_that_dies_twice_in_a_case_is_left_out_of_it():
    log = []
    runners = [Stub("a", log, 1.0), Stub("b", log, 1.0, dies_in={3})]
    result = run(runners, [batch_case(3), batch_case(4)], repeat=4)
    assert [name for name, prompts, _ in log if name == "b" and len(prompts) == 3] == ["b", "b"]
    three, four = result["medians"]
    assert three["b"] is None and three["ratio to b"] is None and three["a"] and four["b"]
    assert [row["error"] for row in result["rounds"] if "error" in row] == ["b ended with status -4"] * 2


def test_a_run_that_was_cut_short_goes_on_where_it_stopped():
    cases = [batch_case(3), batch_case(4)]
    saved = []

    class Cut(Exception):
        pass

    def save(result):
        saved.append(json.loads(json.dumps(result)))
        if len(saved) == 3:
            raise Cut

    with pytest.raises(Cut):
        run([Stub("a", [], 1.0), Stub("b", [], 1.0)], cases, save=save)
    assert not saved[-1]["complete"] and len(saved[-1]["rounds"]) == 6
    saved[-1]["rounds"].append({"case": cases[1].name, "runner": "a", "round": 1, "tokens_per_s": 1.0})  # half a round
    log = []
    result = run([Stub("a", log, 1.0), Stub("b", log, 1.0)], cases, earlier=saved[-1])
    assert len(log) == 2 + 6 and result["complete"] and len(result["rounds"]) == 12
    assert [(row["case"], row["round"]) for row in result["ceilings"]] == [(c.name, r) for r in range(3) for c in cases]


# ---- the peer

FAKE_PEER = """
import json, sys
settings = json.loads(sys.stdin.readline())
print(json.dumps({"vocab_size": 10, "version": "0"}), flush=True)
for line in sys.stdin:
    if settings["repack"] and %(dies)s: sys.exit(132)
    question = json.loads(line)
    if question["max_tokens"] == 99: sys.exit(7)
    print(json.dumps({"first": 0.5, "finished": 1.5, "decoded": 2, "decoding": 1.0}), flush=True)
"""


def fake_peer(tmp_path, dies=False) -> str:
    """The interpreter stands for `python peer_llama.py`: a wrapper that runs a fake instead."""
    (tmp_path / "fake.py").write_text(FAKE_PEER % {"dies": dies})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'fake.py'}\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("dies", [True, False])
def test_a_peer_that_dies_repacked_is_measured_without(tmp_path, dies):
    runner = LlamaCppRunner(tmp_path / "m.gguf", threads=1, python=fake_peer(tmp_path, dies))
    try:
        assert runner.settings["repack"] is not dies
        assert runner.generate([[1, 2]], 3) == Timing(0.5, 1.5, 2, 1.0)
    finally:
        runner.close()
    assert json.dumps(runner.settings)  # goes into the result file


def test_a_peer_that_dies_later_is_started_again(tmp_path):
    runner = LlamaCppRunner(tmp_path / "m.gguf", threads=1, python=fake_peer(tmp_path))
    try:
        with pytest.raises(RunnerDied, match="llama-cpp ended with status 7"):
            runner.generate([[1, 2]], 99)
        assert runner.generate([[1, 2]], 3).decoded == 2
    finally:
        runner.close()


def test_a_peer_that_cannot_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be run"):
        LlamaCppRunner(tmp_path / "m.gguf", threads=1, python=str(tmp_path / "none"))


def test_without_llama_cpp_the_message_says_so(tmp_path):
    with pytest.raises(SetupError, match="llama"):
        LlamaCppRunner(tmp_path / "m.gguf", threads=1)


# ---- our runner


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return gguf_file(tmp_path_factory.mktemp("bench") / "tiny.gguf", "llama")


def runner_of(path, **settings):
    return TokenmillRunner(EngineConfig(model=str(path), num_threads=1, kv_cache_bytes=4 << 20, **settings))


def test_our_runner_writes_exactly_what_is_asked_and_caches_nothing(tiny):
    runner = runner_of(tiny)
    for _ in range(2):
        timing = runner.generate([list(range(50)), list(range(60))], 7)
        assert 0 < timing.first < timing.finished and timing.decoded == 2 * 6
        assert timing.decoding == timing.finished - timing.first
    stats = runner.loaded.engine.stats()
    assert stats.prefix_cache_hits == 0 and stats.generation_tokens == 2 * 2 * 7
    runner.close()


def test_decode_counts_only_while_every_stream_decodes(tiny):
    """With a budget of 32 tokens a step the second prompt is done later: what the first wrote meanwhile is not counted,
    and neither is what the second writes alone at the end."""
    runner = runner_of(tiny, max_num_batched_tokens=32)
    timing = runner.generate([[5] * 20, [6] * 100], 12)
    assert 0 < timing.decoded < 2 * 11 and 0 < timing.decoding < timing.finished - timing.first
    assert timing.decoded % 2 == 0
    runner.close()


def test_a_decode_case_that_says_nothing_is_an_error_in_its_row(tiny):
    runner = runner_of(tiny, max_num_batched_tokens=8)
    result = run([runner], [batch_case(8, 64, 4)], vocab_size=runner.vocab_size, repeat=1)
    assert "--max-num-batched-tokens" in result["rounds"][0]["error"] and result["medians"][0]["tokenmill"] is None
    runner.close()


def test_a_late_prompt_is_computed_beside_the_streams(tiny):
    runner = runner_of(tiny, max_num_batched_tokens=32)
    timing = runner.generate([[5] * 4, [6] * 4], 20, late=[7] * 100)
    assert timing.beside in (2 * 4, 2 * 5)  # 30 tokens a step beside two streams: four, and one may be on its way
    assert 0 < timing.late < timing.finished - timing.first
    runner.close()


# ---- the commands


def invoke(command, **options):
    return CliRunner().invoke(main, f"{command} --num-threads 1 --kv-cache-bytes 4000000", **options)


def test_the_command_measures_a_model_in_this_process(tiny, tmp_path):
    done = invoke(
        f"bench throughput {tiny} --streams 3 --input-tokens 20 --output-tokens 5 --repeat 2 --output-dir {tmp_path}",
        catch_exceptions=False,
    )
    assert done.exit_code == 0 and "3 streams of 20+5" in done.output
    (path,) = tmp_path.glob("throughput-*.json")
    result = json.loads(path.read_text())
    assert [r["round"] for r in result["rounds"]] == [0, 1] and result["complete"]
    (row,) = result["medians"]
    assert row["tokenmill"] > 0 and row["limit"] > 0 and 0 < row["share"] < 1
    assert all(row["read_bytes"] > 1e8 and row["recipe"] for row in result["ceilings"])
    assert result["format"] == "F32" and result["machine"]["cores"] >= 1
    assert path.with_suffix(".png").exists()


def test_the_engine_command_beside_a_peer(tiny, tmp_path, monkeypatch):
    """Cases that do not fit the model's context are left out, and named; Ctrl-C keeps what was measured."""
    command = (
        f"bench engine {tiny} --only prefill --only 4 --against llama-cpp --peer-python {fake_peer(tmp_path)} "
        f"--repeat 1 --output-dir {tmp_path / 'out'}"
    )
    done = invoke(command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "out").glob("engine-*.json")
    result = json.loads(path.read_text())
    assert [row["case"] for row in result["medians"]] == ["decode, 4 streams", "decode, 64 streams"]
    assert result["medians"][0]["llama-cpp"] == 2.0 and "prefill, 8,000 tokens" in result["skipped"]
    assert result["peers"]["llama-cpp"] | {"repack": True, "format": "F32"} == result["peers"]["llama-cpp"]

    real, calls = engine_bench.measure_ceilings, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(engine_bench, "measure_ceilings", interrupted)
    path.unlink()
    done = invoke(command)
    (path,) = (tmp_path / "out").glob("engine-*.json")
    assert done.exit_code == 130 and f"--resume {path}" in done.stderr
    assert not json.loads(path.read_text())["complete"]
    resume = f"bench engine --resume {path}"
    for other, says in (
        ("--repeat 2", "--repeat: "),
        ("--only 16", "was begun with the cases decode at 2,048 tokens; prefill, 512 tokens"),
        ("--max-num-seqs 7", "--max-num-seqs: "),
        ("--against other", "--against: "),
    ):
        done = CliRunner().invoke(main, f"{resume} {other}")
        assert done.exit_code == 1 and says in done.stderr, done.output
    done = CliRunner().invoke(main, resume.replace("engine", "latency", 1))
    assert done.exit_code == 1 and "it is the result of bench engine, not of bench latency" in done.stderr
    done = CliRunner().invoke(main, resume, catch_exceptions=False)  # all the rest is in the file
    assert done.exit_code == 0 and done.stderr.count("case 1 of 2") == 0 < done.stderr.count("case 2 of 2")
    result = json.loads(path.read_text())
    assert result["complete"] and [row["round"] for row in result["ceilings"]] == [0, 0]
    for again in (resume, f"{command} --resume {path}"):
        done = CliRunner().invoke(main, again)
        assert done.exit_code == 0 and done.output == f"{path} is complete, nothing to do\n"
    assert json.loads(path.read_text()) == result


def test_what_the_engine_benchmark_cannot_do_is_one_line(tmp_path):
    model = gguf_file(tmp_path / "tiny.gguf", "llama", max_position_embeddings=128)
    (tmp_path / "other.json").write_text("{}")
    for command, says in (
        ("latency {} --against vllm", "knows llama-cpp"),
        ("engine {} --only prefill", "a case needs 513 tokens"),
        ("engine {} --only nothing", "the cases are decode, 1 stream"),
        (f"engine {{}} --peer-model {model}", "--peer-model needs --against"),
        (f"engine {{}} --resume {tmp_path / 'other.json'}", "not the result of an engine benchmark"),
    ):
        done = invoke(f"bench {command.format(model)} --output-dir {tmp_path / 'out'}")
        assert done.exit_code == 1 and says in done.stderr and not list(tmp_path.glob("out/*")), done.output


def test_peers_are_named_by_their_files_format(tmp_path):
    ours, other = gguf_file(tmp_path / "a.gguf", "llama"), gguf_file(tmp_path / "b.gguf", "llama", format="Q4_0")
    assert engine_bench._peer_name(ours, ours, {}) == "llama-cpp"
    assert engine_bench._peer_name(other, ours, {}).startswith("llama-cpp ")
    with pytest.raises(ConfigError, match="two peers"):
        engine_bench._peer_name(ours, ours, {"llama-cpp": {}})


def test_a_decode_case_says_its_context():
    assert decode_case(2048).name == "decode at 2,048 tokens" and decode_case(2048).longest == 2112


def test_a_directory_that_cannot_be_written_is_told_before_anything_is_measured(tiny, tmp_path):
    (tmp_path / "file").touch()
    for command in ("bench engine", "bench kernels", "bench serving --workload streams"):
        done = CliRunner().invoke(main, f"{command} {tiny} --output-dir {tmp_path / 'file' / 'out'}")
        assert done.exit_code == 1 and "cannot be written" in done.stderr, done.output
