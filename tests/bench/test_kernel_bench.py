"""The profile: steps that the executor takes, rows that add up, rates by hand."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.checkpoints import gguf_file
from tokenmill.backends.cpu import _native
from tokenmill.bench.kernels import profile_step, run_kernel_bench, step_inputs, step_of
from tokenmill.bench.limits import Step
from tokenmill.bench.machine import Ceilings
from tokenmill.bench.random_model import PRESETS, Shape, write_random_model
from tokenmill.cli.main import main
from tokenmill.config import EngineConfig
from tokenmill.models.registry import build_model
from tokenmill.weights.loader import open_checkpoint


def test_a_few_tokens_are_streams_and_many_are_a_prompt():
    assert step_of(1, 100) == Step(1, 1, 100) and step_of(64, 100) == Step(64, 1, 100)
    assert step_of(512, 100) == Step(1, 512, 512)


def test_the_steps_inputs():
    inputs = step_inputs(Step(2, 3, 20), 16, 50)
    assert inputs.positions.tolist() == [17, 18, 19] * 2
    assert inputs.page_table.tolist() == [[0, 1], [2, 3]]
    assert inputs.slot_mapping.tolist() == [17, 18, 19, 32 + 17, 32 + 18, 32 + 19]
    assert (inputs.q_start.tolist(), inputs.kv_len.tolist(), inputs.logit_rows.tolist()) == (
        [0, 3, 6],
        [20, 20],
        [2, 5],
    )
    assert inputs.token_ids.max() < 50 and all(a.dtype == np.int32 for a in (inputs.positions, inputs.slot_mapping))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return gguf_file(tmp_path_factory.mktemp("kernels") / "tiny.gguf", "llama")


class Clock:
    """An executor on which each op takes as long; it runs one op that the program does not name."""

    def __init__(self, program, seconds=1e-6):
        self.program, self.seconds = program, seconds
        self.copied = []

    def copy_pages(self, pairs):
        self.copied += pairs

    def forward(self, inputs):
        pass

    def profile(self, on):
        pass

    def op_seconds(self):
        return [("kv_write", "layer 0", self.seconds), *((op.name, op.where, self.seconds) for op in self.program.ops)]


def test_ops_that_do_the_same_on_every_layer_are_one_row(tiny):
    checkpoint = open_checkpoint(tiny)
    program = build_model(checkpoint.config, checkpoint.weights).program
    executor = Clock(program)
    executors = {"tokenmill": executor, "slow": Clock(program, 3e-6)}
    rows = profile_step(
        executors, program, Step(4, 1, 33), Ceilings(1e9, 1e9, 1e9), kv_number_bytes=2, page_size=16, repeat=3
    )
    *rows, step = rows
    assert executor.copied == [(0, page) for page in range(1, 12)]
    assert step["count"] == len(program.ops) + 1 and step["us"] == pytest.approx(len(program.ops) + 1)
    assert sum(row["count"] for row in rows) == step["count"]
    assert sum(row["of_step"] for row in rows) == pytest.approx(1)
    (down,) = [row for row in rows if "down_proj" in row["what"]]
    assert down["what"] == "down_proj 96 -> 64, F32" and down["count"] == 2 and down["us"] == pytest.approx(1)
    assert down["gbs"] == pytest.approx(64 * 96 * 4 / 1e-6 / 1e9)
    assert down["gops"] == pytest.approx(4 * 2 * 64 * 96 / 1e-6 / 1e9)
    assert down["share"] == pytest.approx(max(64 * 96 * 4, 4 * 2 * 64 * 96) / 1e9 / 1e-6)
    (attention,) = [row for row in rows if row["op"] == "attention"]
    assert attention["gbs"] == pytest.approx(4 * 33 * 2 * 2 * 2 * 16 / 1e-6 / 1e9)
    (write,) = [row for row in rows if row["op"] == "kv_write"]
    assert set(write) == {"op", "what", "count", "us", "of_step", "slow us", "times slow"}
    assert all(row["times slow"] == pytest.approx(3) for row in [*rows, step])
    assert down["slow us"] == pytest.approx(3) and step["slow us"] == pytest.approx(3 * (len(program.ops) + 1))


def test_the_command(tiny, tmp_path):
    command = f"bench kernels {tiny} --tokens 1,3,70 --context 40 --repeat 2 --num-threads 1 --kv-cache-bytes 4000000"
    done = CliRunner().invoke(main, f"{command} --output-dir {tmp_path}", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for words in ("1 stream at 40 tokens", "3 streams at 40 tokens", "a prompt of 70 tokens", "q_proj+k_proj+v_proj"):
        assert words in done.output
    (path,) = tmp_path.glob("kernels-*.json")
    result = json.loads(path.read_text())
    assert [step["tokens"] for step in result["steps"]] == [1, 3, 70]
    assert all(0 < row["of_step"] <= 1 and row["us"] > 0 for step in result["steps"] for row in step["ops"])


def test_vector_kernels_are_times_faster_than_plain_ones(tmp_path, monkeypatch):
    """The regression check: a ratio within one run, generous, for no figure of a shared machine is worth more."""
    monkeypatch.setitem(PRESETS, "small", Shape("Small", 1, 512, 8, 4, 1024, 1024, 256, 1e4, True))
    write_random_model(tmp_path / "m.gguf", "small", "Q4_0")
    best, *_, plain = _native.instruction_sets()
    result = run_kernel_bench(
        EngineConfig(model=str(tmp_path / "m.gguf"), num_threads=1, kv_cache_bytes=16 << 20, max_num_seqs=16),
        tokens=(1, 16, 80),
        context=64,
        repeat=5,
        against=[plain],
    )
    for step in result["steps"]:
        times = step["ops"][-1]["times plain"]
        assert times > (1.5 if best != plain else 0.5), (step["name"], times)


def test_what_it_cannot_do_is_one_line(tiny, tmp_path):
    for options, says in (
        ("--tokens one", "expected numbers"),
        ("--tokens 1 --context 20 --against mmx", "isa is 'mmx'"),
        ("--tokens 0", "at least 1"),
        ("--tokens 600", "more than the context of 512"),
        ("--tokens 64 --context 512 --kv-cache-bytes 300000", "more KV pages"),
        ("--tokens 1 --context 20 --backend reference", "has no profile"),
    ):
        done = CliRunner().invoke(main, f"bench kernels {tiny} --output-dir {tmp_path} --num-threads 1 {options}")
        assert done.exit_code == 1 and says in done.stderr, (options, done.output)
