"""The engine benchmark: token ids in, token ids out, no server, no text; alone or beside a peer in the same run.

A case is so many streams of so many prompt and output tokens, all sent at once. Its rate is what the case is about:
decode and prefill count their own phase only, streams counts every token over the whole time. Prompts are random ids,
fresh in each round, the same for every engine, and no prefix cache helps.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ..config import EngineConfig
from ..core import SamplingParams
from ..errors import ConfigError, SetupError
from .machine import describe, measure_bandwidth


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    counts: str  # "decode", "prefill" or "total": which tokens and which time make the rate

    def rate(self, timing: Timing) -> float:
        """Tokens per second of what the case counts."""
        if self.counts == "prefill":
            return self.streams * self.prompt_tokens / timing.first
        if self.counts == "decode":
            return self.streams * (self.output_tokens - 1) / (timing.finished - timing.first)
        return self.streams * (self.prompt_tokens + self.output_tokens) / timing.finished


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the start until every stream has its first token, and until all are done."""

    first: float
    finished: float


DECODE = Case("decode, 1 stream", 1, 32, 128, "decode")
PREFILL_512 = Case("prefill, 512 tokens", 1, 512, 1, "prefill")
PREFILL_2048 = Case("prefill, 2048 tokens", 1, 2048, 1, "prefill")


def streams_case(streams: int, prompt_tokens: int, output_tokens: int) -> Case:
    return Case(f"{streams} streams of {prompt_tokens}+{output_tokens}", streams, prompt_tokens, output_tokens, "total")


class Runner(Protocol):
    """An engine that takes prompts together and writes exactly max_tokens for each, greedily."""

    name: str

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Timing: ...

    def close(self) -> None: ...


class TokenmillRunner:
    """Our engine in this process, driven step by step."""

    name = "tokenmill"

    def __init__(self, config: EngineConfig, progress: Callable | None = None):
        from ..engine.load import load_engine

        self.loaded = load_engine(replace(config, enable_prefix_caching=False), progress=progress)
        self.vocab_size = self.loaded.model.vocab_size
        self._serial = 0

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Timing:
        from ..engine.messages import AddRequest

        engine = self.loaded.engine
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        waiting: dict[str, int] = {}
        first = 0.0
        requests = []
        for prompt in prompts:
            self._serial += 1
            requests.append(AddRequest(request_id=f"bench-{self._serial}", prompt_token_ids=prompt, params=params))
        started = time.perf_counter()
        for request in requests:
            engine.add(request)
            waiting[request.request_id] = 0
        without_first = set(waiting)
        while waiting:
            for delta in engine.step():
                if delta.error is not None:
                    raise SetupError(f"the benchmark's request failed: {delta.error}")
                waiting[delta.request_id] += len(delta.token_ids)
                if without_first and delta.token_ids:
                    without_first.discard(delta.request_id)
                    if not without_first:
                        first = time.perf_counter() - started
                if delta.finish_reason is not None and waiting.pop(delta.request_id) != max_tokens:
                    raise SetupError("the engine stopped before the asked number of tokens")
        return Timing(first, time.perf_counter() - started)

    def close(self) -> None:
        close = getattr(self.loaded.engine, "close", None)
        if close is not None:
            close()


class LlamaCppRunner:
    """llama.cpp in another process, through bench/peer_llama.py in an interpreter that has llama-cpp-python."""

    name = "llama-cpp"

    def __init__(self, model: Path, *, threads: int, max_tokens: int, max_seqs: int, python: str = sys.executable):
        max_seqs = max(2, max_seqs)  # the probe and the warm-up send two
        settings = {"model": str(model), "threads": threads, "max_tokens": max_tokens, "max_seqs": max_seqs}
        # Some builds of llama.cpp die in their repacked (AMX) kernels; without repacking they are slower but alive.
        for repack in (True, False):
            self.settings = {**settings, "flash_attention": True, "repack": repack}
            try:
                self._start(python)
                self._ask({"prompts": [[1, 2, 3, 4], [5, 6, 7]], "max_tokens": 2})
                return
            except _PeerDied:
                self.close()
        raise SetupError(f"llama.cpp dies on {model} in {python}")

    def _start(self, python: str) -> None:
        script = Path(__file__).with_name("peer_llama.py")
        try:
            self.process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise ConfigError(f"peer interpreter {python} cannot be run: {error.strerror}") from None
        answer = self._ask(self.settings)
        self.vocab_size, self.version = answer["vocab_size"], answer["version"]

    def _ask(self, question: dict) -> dict:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise _PeerDied
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise SetupError(f"llama.cpp: {answer['error']}")
        return answer

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Timing:
        answer = self._ask({"prompts": prompts, "max_tokens": max_tokens})
        return Timing(answer["first"], answer["finished"])

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _PeerDied(Exception):
    pass


def longest_sequence(cases: list[Case]) -> int:
    return max(case.prompt_tokens + case.output_tokens for case in cases)


def run_cases(
    runners: list[Runner],
    cases: list[Case],
    *,
    vocab_size: int,
    repeat: int = 3,
    seed: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """Every case in every round on every runner, A B B A. The first runner's rate over each other's is the ratio.

    {"rounds": [...], "medians": one row a case with each runner's tokens/s and the ratios of the medians}.
    """
    rounds: list[dict] = []
    for runner in runners:  # pages touched, threads woken, caches warm
        progress(f"warming up {runner.name}")
        runner.generate([[7] * 16, [9] * 16], 8)
    for number in range(repeat):
        for case in cases:
            words = random.Random(f"{seed} {number} {case.name}")
            prompts = [[words.randrange(vocab_size) for _ in range(case.prompt_tokens)] for _ in range(case.streams)]
            for runner in runners if number % 2 == 0 else runners[::-1]:
                progress(f"{case.name}, round {number + 1} of {repeat}: {runner.name}")
                timing = runner.generate(prompts, case.output_tokens)
                rounds.append(
                    {
                        "case": case.name,
                        "runner": runner.name,
                        "round": number,
                        "tokens_per_s": round(case.rate(timing), 2),
                        "first_s": round(timing.first, 5),
                        "finished_s": round(timing.finished, 5),
                    }
                )
    summary = []
    for case in cases:
        row: dict = {"case": case.name}
        for runner in runners:
            rates = [r["tokens_per_s"] for r in rounds if (r["case"], r["runner"]) == (case.name, runner.name)]
            row[runner.name] = statistics.median(rates)
        for runner in runners[1:]:
            row[f"ratio to {runner.name}"] = round(row[runners[0].name] / row[runner.name], 3)
        summary.append(row)
    return {"rounds": rounds, "medians": summary}


def run_engine_bench(
    config: EngineConfig,
    cases: list[Case],
    *,
    against: list[str],
    peer_python: str = sys.executable,
    repeat: int = 3,
    seed: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """Load ours, start the peers on the same file with the same threads, run the cases. Raises SetupError."""
    for name in against:
        if name != LlamaCppRunner.name:
            raise ConfigError(f"--against {name!r}: the engine benchmark knows {LlamaCppRunner.name}")
    longest = longest_sequence(cases)
    config = replace(config, max_num_seqs=max(config.max_num_seqs, *(case.streams for case in cases)))
    progress("loading tokenmill")
    ours = TokenmillRunner(config)
    runners: list[Runner] = [ours]
    peers: dict[str, dict] = {}
    try:
        if longest > ours.loaded.resolved.max_model_len:
            raise ConfigError(f"a case needs {longest} tokens; the context is {ours.loaded.resolved.max_model_len}")
        for name in against:
            if ours.loaded.checkpoint.kind != "gguf":
                raise ConfigError("llama-cpp reads GGUF files only; give a GGUF model")
            progress(f"starting {name}")
            peer = LlamaCppRunner(
                ours.loaded.checkpoint.path,
                threads=ours.loaded.resolved.num_threads,
                max_tokens=longest,
                max_seqs=max(case.streams for case in cases),
                python=peer_python,
            )
            runners.append(peer)
            peers[name] = {"version": peer.version, **peer.settings}
        head = {
            "machine": describe(),
            "model": ours.loaded.checkpoint.name,
            "model_digest": ours.loaded.checkpoint.digest,
            "decisions": [list(decision) for decision in ours.loaded.decisions],
            "peers": peers,
            "bandwidth_bytes_per_s": round(measure_bandwidth(ours.loaded.resolved.num_threads)),
        }
        vocab_size = min([ours.vocab_size] + [r.vocab_size for r in runners[1:] if isinstance(r, LlamaCppRunner)])
        results = run_cases(runners, cases, vocab_size=vocab_size, repeat=repeat, seed=seed, progress=progress)
        return {**head, **results}
    finally:
        for runner in runners:
            runner.close()
