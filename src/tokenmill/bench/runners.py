"""The engines that the engine benchmark runs: ours in this process, and llama.cpp in another.

A runner takes prompts as token ids, all at once, writes exactly max_tokens for each, greedily, and says how long it
took. It knows nothing of cases, rounds and ratios.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ..config import EngineConfig
from ..errors import ConfigError, SetupError
from .cases import Timing

Prompt = list[int]


class Runner(Protocol):
    name: str

    def generate(self, prompts: list[Prompt], max_tokens: int, late: Prompt | None = None) -> Timing:
        """`late` arrives once every stream has its first token; one token is written for it."""
        ...

    def close(self) -> None: ...


class RunnerDied(SetupError):
    """The engine ended while it was measured; the runner has been started again."""


class TokenmillRunner:
    """Our engine, driven step by step."""

    name = "tokenmill"

    def __init__(self, config: EngineConfig, progress: Callable | None = None):
        from ..engine.load import load_engine

        self.loaded = load_engine(replace(config, enable_prefix_caching=False), progress=progress)
        self.vocab_size = self.loaded.model.vocab_size
        self._serial = 0

    def generate(self, prompts: list[Prompt], max_tokens: int, late: Prompt | None = None) -> Timing:
        started = time.perf_counter()
        waiting = {self._add(prompt, max_tokens): max_tokens for prompt in prompts}
        without_first = set(waiting)
        late_id = None
        first = decoding = late_at = late_seconds = now = 0.0
        decoded = beside = 0
        ended = False  # one of the streams
        while waiting:
            deltas = self.loaded.engine.step()
            now = time.perf_counter() - started
            all_decode, mixing = not without_first and not ended, late_id in waiting
            for delta in deltas:
                if delta.error is not None:
                    raise SetupError(f"the benchmark's request failed: {delta.error}")
                count = len(delta.token_ids)
                if delta.request_id == late_id:
                    late_seconds = now - late_at
                else:
                    decoded += count if all_decode else 0
                    beside += count if mixing else 0
                    without_first -= {delta.request_id} if count else set()
                waiting[delta.request_id] -= count
                if delta.finish_reason is not None:
                    ended = ended or delta.request_id != late_id
                    if waiting.pop(delta.request_id):
                        raise SetupError("the engine stopped before the asked number of tokens")
            if all_decode:
                decoding = now - first
            if not first and not without_first:
                first = now
                if late:
                    late_id, late_at = self._add(late, 1), time.perf_counter() - started
                    waiting[late_id] = 1
        return Timing(first, now, decoded, decoding, late_seconds, beside)

    def _add(self, prompt: Prompt, max_tokens: int) -> str:
        from ..core import SamplingParams
        from ..engine.messages import AddRequest

        self._serial += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = AddRequest(request_id=f"bench-{self._serial}", prompt_token_ids=prompt, params=params)
        self.loaded.engine.add(request)
        return request.request_id

    def close(self) -> None:
        close = getattr(self.loaded.engine, "close", None)
        if close is not None:
            close()


class LlamaCppRunner:
    """llama.cpp through bench/peer_llama.py, in an interpreter that has llama-cpp-python.

    `settings` go into the result file. Some builds die in their repacked (AMX) kernels: such a one runs without
    repacking, slower but alive, and settings["repack"] says so.
    """

    def __init__(self, model: Path, *, threads: int, python: str = sys.executable, name: str = "llama-cpp"):
        self.name = name
        self.python = python
        for repack in (True, False):
            self.settings = {"model": str(model), "threads": threads, "flash_attention": True, "repack": repack}
            try:
                self._start()
                self._ask({"prompts": [[1, 2, 3, 4], [5, 6, 7]], "max_tokens": 2})
                return
            except _PeerEnded:
                self.close()
        raise SetupError(f"llama.cpp dies on {model} in {python}")

    def _start(self) -> None:
        script = Path(__file__).with_name("peer_llama.py")
        try:
            self.process = subprocess.Popen(
                [self.python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise ConfigError(f"peer interpreter {self.python} cannot be run: {error.strerror}") from None
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
            raise _PeerEnded
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise SetupError(f"llama.cpp: {answer['error']}")
        return answer

    def generate(self, prompts: list[Prompt], max_tokens: int, late: Prompt | None = None) -> Timing:
        try:
            return Timing(**self._ask({"prompts": prompts, "max_tokens": max_tokens, "late": late}))
        except _PeerEnded:
            self.close()
            status = self.process.returncode
            self._start()
            raise RunnerDied(f"{self.name} ended with status {status}") from None

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


class _PeerEnded(Exception):
    pass
