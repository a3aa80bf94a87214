"""The robustness scenario: 500 mixed requests on a third of the KV memory they would like, a fifth of them aborted.

Lengths of 1 to 2,000 tokens, read token by token or at the end, up to four choices, greedy and sampled, stop strings
and logprobs, shared and private prefixes. Every one ends rightly, no page is lost, and memory stays flat.
"""

import asyncio
import gc
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.checkpoints import gguf_file
from tokenmill import AsyncLLM, SamplingParams
from tokenmill.outputs import RequestOutputKind

REQUESTS = 500
LONGEST = 2048
PAGE = 16
VOCAB = range(3, 300)
MAX_NUM_SEQS = 48


@dataclass
class Case:
    prompt: list[int]
    params: SamplingParams
    kind: RequestOutputKind
    start: float  # seconds after the scenario's start
    abort_after: int | None  # outputs seen; 0: at once, while it may still be queued


def make_cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    shared = [rng.choice(VOCAB) for _ in range(600)]
    cases = []
    for i in range(REQUESTS):
        length = min(1999, max(1, round(10 ** rng.uniform(0, 3.3))))
        own = [rng.choice(VOCAB) for _ in range(length)]
        prompt = (shared + own)[:length] if rng.random() < 0.3 else own
        aborted = rng.random() < 0.2
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 4]),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            seed=i,
            max_tokens=max(1, min(rng.randint(1, 24), 2000 - length)),
            stop=rng.choice([None, None, "a"]),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=1 if length < 100 and rng.random() < 0.2 else None,
            ignore_eos=rng.random() < 0.5,
        )
        kind = rng.choice([RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
        cases.append(Case(prompt, params, kind, rng.uniform(0, 1), rng.choice([0, 0, 1, 3]) if aborted else None))
    return cases


def third_of_wanted_bytes(cases: list[Case], bytes_per_token: int) -> int:
    """KV for a third of the sequences that may run at once, at this mix's mean length; enough for the longest."""
    mean = sum((len(c.prompt) + c.params.max_tokens) * c.params.n for c in cases) / sum(c.params.n for c in cases)
    return int(max(MAX_NUM_SEQS * mean / 3, LONGEST)) * bytes_per_token


async def run_case(llm: AsyncLLM, case: Case, name: str) -> tuple[str, list]:
    """-> (what became of it, the outputs seen)."""
    await asyncio.sleep(case.start)
    outputs = []
    stream = llm.generate({"prompt_token_ids": case.prompt}, case.params, name, output_kind=case.kind)
    if case.abort_after == 0:
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        return "left", outputs
    async for output in stream:
        outputs.append(output)
        if case.abort_after is not None and len(outputs) == case.abort_after:
            await llm.abort(name)
    return "ended", outputs


def check(case: Case, outputs: list) -> None:
    last = outputs[-1]
    assert last.finished and len(last.outputs) == case.params.n
    for choice in last.outputs:
        if case.kind is RequestOutputKind.DELTA:
            parts = [o.outputs[choice.index] for o in outputs]
            tokens, text = [t for p in parts for t in p.token_ids], "".join(p.text for p in parts)
            logprobs = [p for part in parts for p in part.logprobs or ()]
        else:
            tokens, text, logprobs = choice.token_ids, choice.text, choice.logprobs or []
        reasons = ("stop", "length") if case.abort_after is None else ("stop", "length", "abort")
        assert choice.finish_reason in reasons, (choice, case)
        assert len(tokens) <= case.params.max_tokens
        if choice.finish_reason == "length":
            assert len(tokens) == case.params.max_tokens
        if choice.finish_reason != "abort":
            assert len(tokens) >= 1
        if case.params.stop and choice.finish_reason != "abort":
            assert case.params.stop not in text
        if case.params.logprobs is not None:
            assert len(logprobs) == len(tokens)
    if case.params.prompt_logprobs is not None and case.abort_after is None:
        assert len(last.prompt_logprobs) == len(case.prompt)


def resident_bytes() -> int:
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def scenario(llm: AsyncLLM, cases: list[Case], label: str) -> Counter:
    results = await asyncio.gather(*(run_case(llm, case, f"{label}-{i}") for i, case in enumerate(cases)))
    seen = Counter()
    for case, (fate, outputs) in zip(cases, results):
        seen[fate] += 1
        if fate == "ended":
            check(case, outputs)
            seen.update(choice.finish_reason for choice in outputs[-1].outputs)
    for _ in range(1000):
        stats = llm.stats
        if not (stats.num_running or stats.num_waiting or stats.num_gated or stats.pages_used):
            break
        await asyncio.sleep(0.01)
    assert (stats.num_running, stats.num_waiting, stats.num_gated, stats.pages_used) == (0, 0, 0, 0)
    return seen


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    return gguf_file(folder / "m.gguf", "llama", max_position_embeddings=LONGEST)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_500_mixed_requests(path, prefix_caching):
    cases = make_cases(1)
    first, second = cases[: REQUESTS // 2], cases[REQUESTS // 2 :]
    with_probe = AsyncLLM(path, num_threads=1, kv_cache_bytes=1 << 26)
    bytes_per_token = with_probe._loaded.model.program.kv_bytes_per_token
    with_probe.close()

    async def go():
        llm = AsyncLLM(
            path,
            num_threads=1,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=256,
            kv_cache_bytes=third_of_wanted_bytes(cases, bytes_per_token),
            enable_prefix_caching=prefix_caching,
            max_waiting=2 * REQUESTS,
        )
        try:
            seen = await scenario(llm, first, "warm")
            before = resident_bytes()
            seen += await scenario(llm, second, "rest")
            after = resident_bytes()
            return seen, llm.stats, before, after
        finally:
            llm.close()

    seen, stats, before, after = asyncio.run(go())
    assert seen["ended"] + seen["left"] == REQUESTS
    assert seen["left"] > 0 and seen["abort"] > 0 and seen["stop"] > 0 and seen["length"] > 0
    assert seen["error"] == 0
    assert stats.pages_used == 0 and stats.pages_total >= LONGEST // PAGE
    assert stats.pages_cached <= stats.pages_total and (prefix_caching or stats.pages_cached == 0)
    assert after - before < 24 << 20, f"memory grew by {(after - before) / 2**20:.1f} MiB"
