"""`tokenmill plan`: bytes that add up, pages and concurrency by hand, limits, all without loading weights."""

import json

import pytest
from click.testing import CliRunner

from tests.support.checkpoints import gguf_file, hf_folder
from tokenmill.cli.main import main
from tokenmill.cli.plan import workspace_bytes
from tokenmill.config import EngineConfig, ResolvedEngine
from tokenmill.engine.load import load_engine
from tokenmill.program import Program, RecordingBuilder, Weight


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return gguf_file(tmp_path_factory.mktemp("plan") / "tiny.gguf", "llama")


CEILINGS = ["--bandwidth", "10", "--float-ops", "100", "--int8-ops", "200"]


def plan(path, *options) -> dict:
    done = CliRunner().invoke(main, ["plan", str(path), "--json", *CEILINGS, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_the_ledger_adds_up(tiny):
    made = plan(tiny, "--kv-cache-bytes", "1000000")
    page = made["page_size"] * made["kv_bytes_per_token"]
    assert made["num_pages"] == 1_000_000 // page and made["kv_bytes"] == made["num_pages"] * page
    assert made["total_bytes"] == made["weight_bytes"] + made["kv_bytes"] + made["workspace_bytes"]
    assert sum(made["weight_formats"].values()) > 0 and made["ops"]["attention"] >= 1


def test_concurrency_is_pages_over_pages_of_a_sequence(tiny):
    made = plan(tiny, "--context", "33", "--max-num-seqs", "1000", "--kv-cache-bytes", "1000000")
    assert made["max_concurrency"] == min(1000, made["num_pages"] // 3)
    assert plan(tiny, "--context", "33", "--max-num-seqs", "2")["max_concurrency"] == 2


def test_speeds_are_the_limits_of_the_ceilings_given(tiny):
    made = plan(tiny, "--context", "100")
    assert made["ceilings"]["read_bytes"] == 10e9 and made["ceilings"]["int8_ops"] == 200e9
    assert made["decode_tokens_per_s"] == pytest.approx(10e9 / made["decode_bytes"])
    assert made["decode_context_tokens_per_s"] == pytest.approx(10e9 / made["decode_context_bytes"])
    assert made["decode_context_bytes"] - made["decode_bytes"] == (100 - 96) * made["kv_bytes_per_token"]
    assert made["prefill_tokens_per_s"] == pytest.approx(made["prefill_tokens"] * 100e9 / made["prefill_ops"])
    assert made["decode_batch_tokens_per_s"] >= made["decode_context_tokens_per_s"]


def test_a_cache_of_floats_is_read_at_twice_the_bytes(tiny):
    half, whole = (plan(tiny, "--context", "500", "--kv-cache-dtype", kind) for kind in ("float16", "float32"))
    more = whole["decode_context_bytes"] - half["decode_context_bytes"]
    assert more == 500 * half["kv_bytes_per_token"]


def test_predicted_and_measured_stand_side_by_side(tiny):
    made = plan(tiny, "--measure", "--context", "400", "--num-threads", "1", "--kv-cache-bytes", "4000000")
    assert [row["case"] for row in made["measured"]] == [
        "decode, 1 stream",
        "decode at 336 tokens",
        "prefill, 511 tokens",
    ]
    assert all(0 < row["measured"] < row["predicted"] and 0 < row["share"] < 1 for row in made["measured"])


def test_a_folder_plans_like_its_gguf(tiny, tmp_path):
    folder = hf_folder(tmp_path / "tiny", "llama")
    one, other = plan(tiny), plan(folder)
    for key in ("kv_bytes_per_token", "ops", "prefill_ops", "max_model_len"):
        assert one[key] == other[key]


def test_the_table_names_everything(tiny):
    output = CliRunner().invoke(main, ["plan", str(tiny), "--ops"], catch_exceptions=False).output
    for word in ("weights", "KV", "pages of 16", "concurrency", "decode", "prefill", "threads", "llama.py:"):
        assert word in output


def test_a_context_past_the_models_is_refused(tiny):
    done = CliRunner().invoke(main, ["plan", str(tiny), "--context", "99999999", *CEILINGS])
    assert done.exit_code == 1 and "--context is 99999999" in done.output


def test_workspace_holds_what_is_alive_at_once():
    import numpy as np

    weight = lambda n, out, inn: Weight(n, (out, inn), "F32", np.zeros(4 * out * inn, np.uint8))  # noqa: E731
    b = RecordingBuilder()
    x = b.embed(weight("e", 50, 8))
    gate, up = b.linear_split(x, (weight("g", 32, 8), weight("u", 32, 8)))
    program: Program = b.finish(b.linear(b.select_rows(b.act_mul(gate, up, "silu")), weight("h", 50, 32)))
    resolved = ResolvedEngine(EngineConfig(max_num_batched_tokens=10, max_num_seqs=3), 64, 4, 1)
    # 10 tokens: x (8), and gate, up and their product (32); of logit rows (3 + those for scoring, at most 10):
    # the selected row (32) and the logits (50)
    assert workspace_bytes(program, resolved) == 4 * (10 * (8 + 3 * 32) + 10 * (32 + 50))


def test_workspace_is_what_the_executor_takes(smollm2_path):
    loaded = load_engine(EngineConfig(model=str(smollm2_path), num_threads=1, kv_cache_bytes=64 << 20))
    taken = loaded.engine.runner.executor.memory["workspace"]
    planned = plan(smollm2_path, "--kv-cache-bytes", str(64 << 20))["workspace_bytes"]
    assert planned <= taken <= planned + (8 << 20)
