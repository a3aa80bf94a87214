"""/metrics under vLLM's names: gauges never freeze, counters never go down, usage adds up (BC-074, BC-075)."""

import random
import time

import pytest

from tests.api.engine_double import EXITS
from tests.api.server import eventually, read_until

NAMES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prompt_tokens_sum",
    "request_generation_tokens_sum", "request_time_per_output_token_seconds_count",
)  # fmt: skip


def test_vllms_names_with_the_models_name(rigged):
    rigged.complete(max_tokens=3)
    text = rigged.http.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    for name in NAMES:
        assert f'vllm:{name}{{model_name="rigged"}}' in text.text, name
    for reason in ("stop", "length", "abort", "error"):
        assert f'vllm:request_success_total{{finished_reason="{reason}",model_name="rigged"}}' in text.text


def test_it_can_be_parsed(rigged):
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(rigged.http.get("/metrics").text)}
    assert families["vllm:num_requests_running"].type == "gauge"
    assert families["vllm:generation_tokens"].type == "counter"
    assert families["vllm:time_per_output_token_seconds"].type == "histogram"


def test_one_requests_figures(rigged):
    before = rigged.metrics()
    answer = rigged.complete([5, 6, 7], max_tokens=9, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 9

    def grew(name: str) -> float:
        return rigged.metrics()[f"vllm:{name}"] - before[f"vllm:{name}"]

    assert grew("prompt_tokens_total") == 3 and grew("generation_tokens_total") == 9
    assert grew("time_to_first_token_seconds_count") == 1 and grew("inter_token_latency_seconds_count") == 8
    assert grew("time_per_output_token_seconds_count") == 8
    assert grew("request_prompt_tokens_sum") == 3 and grew("request_generation_tokens_sum") == 9
    assert grew("request_queue_time_seconds_count") == 1 and grew("e2e_request_latency_seconds_count") == 1
    assert grew('request_success_total{finished_reason="length"}') == 1
    assert 0 < grew("e2e_request_latency_seconds_sum") < 5
    assert grew("time_to_first_token_seconds_sum") <= grew("e2e_request_latency_seconds_sum")


class TestGauges:
    def test_they_show_what_runs(self, endless):
        socks = [endless.send_raw("/v1/completions", {"prompt": "X", "max_tokens": 50_000}) for _ in range(3)]
        assert eventually(lambda: endless.metrics()["vllm:num_requests_waiting"] == 2)
        now = endless.metrics()
        assert now["vllm:num_requests_running"] == 1
        assert eventually(lambda: endless.metrics()["vllm:kv_cache_usage_perc"] > 0)
        for sock in socks:
            sock.close()
        assert eventually(endless.idle, 2)

    def test_all_zero_after_forty_streams_are_dropped_at_once(self, tiny):
        before = tiny.metrics()
        body = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True}
        socks = [tiny.send_raw("/v1/completions", body) for _ in range(40)]
        for sock in socks[:8]:
            read_until(sock, b"data: ")
        for sock in socks:
            sock.close()
        time.sleep(1)
        assert tiny.idle()
        after = tiny.metrics()
        assert all(
            after[name] >= value for name, value in before.items() if name.endswith(("_total", "_count", "_sum"))
        )

    def test_after_rejected_requests(self, tiny):
        for body in ({"prompt": "x", "n": 0}, {"prompt": [5] * 600}, {"prompt": "x", "model": "y"}):
            assert tiny.post("/v1/completions", body).status_code in (400, 404)
        assert tiny.idle()

    def test_after_the_engine_died_and_counters_stay(self, double):
        double.complete([1], max_tokens=5)
        assert eventually(lambda: double.metrics()["vllm:engine_steps_total"] >= 0)
        before = double.metrics()
        answer = double.post("/v1/completions", {"prompt": [EXITS]})
        assert answer.status_code == 503
        assert double.idle()
        assert double.metrics()['vllm:request_success_total{finished_reason="error"}'] > 0
        assert eventually(double.healthy)
        after = double.metrics()
        assert all(
            after[name] >= value for name, value in before.items() if name.endswith(("_total", "_count", "_sum"))
        )
        assert after["vllm:engine_restarts_total"] == before["vllm:engine_restarts_total"] + 1
        assert after["vllm:engine_ready"] == 1


class TestUsage:
    """prompt: the ids that were fed; completion: the ids that were sampled, the end token too; total: their sum."""

    @pytest.mark.parametrize("model", ["tiny", "rigged", "smol"])
    def test_it_is_what_the_ids_say(self, request, model):
        server = request.getfixturevalue(model)
        rng = random.Random(model)
        words = ["hello", "the world", "\U0001f525 \u6f22", "<|im_end|>", "a" * 30, "\n\n"]
        for i in range(6 if model == "smol" else 30):
            body = {
                "prompt": " ".join(rng.choices(words, k=rng.randrange(1, 9))),
                "max_tokens": rng.randrange(1, 6 if model == "smol" else 40),
                "seed": i,
                "n": rng.choice([1, 1, 2, 3]),
                "stop": rng.choice([None, "e", ["fgh", "x"], "\n"]),
                "return_token_ids": True,
            }
            answer = server.complete(**body)
            usage = answer["usage"]
            assert usage["prompt_tokens"] == len(answer["choices"][0]["prompt_token_ids"])
            assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"] - 1
            *events, last = server.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert last["usage"][name] == usage[name]
            for choice in answer["choices"]:
                mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
                assert "".join(part["text"] for part in mine) == choice["text"]
                assert [t for part in mine for t in part.get("token_ids", [])] == choice["token_ids"]
                assert mine[-1]["finish_reason"] == choice["finish_reason"]

    def test_the_cache_is_told_in_streams_too(self, tiny):
        ids = [11 + (i * 7) % 200 for i in range(90)]
        assert tiny.complete(ids, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] < 5
        body = {"prompt": ids, "max_tokens": 1, "stream_options": {"include_usage": True}}
        assert tiny.stream("/v1/completions", body)[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 89

    def test_preemption_is_no_cache_hit(self, tiny_path):
        """A cache for about three of the eight: recomputed tokens count neither as cached nor twice."""
        from concurrent.futures import ThreadPoolExecutor

        from tests.api.conftest import QUICK
        from tests.api.server import serving

        page_bytes = 16 * 2 * 2 * (2 * 16) * 2
        with serving(tiny_path, *QUICK, "--kv-cache-bytes", str(33 * page_bytes), "--max-num-seqs", "8") as small:

            def one(i: int) -> dict:
                prompt = [13 + (i * 31 + j * (i + 3)) % 240 for j in range(60)]
                return small.complete(prompt, max_tokens=90, ignore_eos=True, seed=i)["usage"]

            with ThreadPoolExecutor(8) as pool:
                usages = list(pool.map(one, range(8)))
            assert small.metrics()["vllm:num_preemptions_total"] > 0
            for usage in usages:
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (60, 90)
                assert usage["prompt_tokens_details"]["cached_tokens"] < 16
            assert small.metrics()["vllm:generation_tokens_total"] == 8 * 90
            assert eventually(small.idle, 2)
