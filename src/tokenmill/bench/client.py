"""The load generator: drives a Workload against one OpenAI-compatible server and notes when each token came.

Every request opens its own connection: some servers drop kept-alive connections after a stream, and a client that
reconnects silently would be measured instead of them.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, SetupError
from .overhead import Counters, read_counters
from .stats import Sample
from .workloads import Message, Session, Workload

MAX_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. `url` is its base with /v1."""

    name: str
    url: str
    model: str | None = None
    api_key: str | None = None

    @staticmethod
    def parse(text: str) -> Target:
        """NAME=URL, or a bare URL."""
        name, separator, url = text.partition("=")
        if not separator or "/" in name:
            name, url = "server", text
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"target {text!r} is not NAME=http://host:port/v1")
        url = url.rstrip("/")
        return Target(name, url if url.endswith("/v1") else url + "/v1")


class Client:
    """An open session with one target. Use as an async context manager."""

    def __init__(
        self, target: Target, *, timeout: float = 600, ignore_eos: bool = True, extra: dict[str, Any] | None = None
    ):
        self.target, self.timeout, self.ignore_eos, self.extra = target, timeout, ignore_eos, extra or {}
        self.model = target.model

    async def __aenter__(self) -> Client:
        try:
            import aiohttp
        except ImportError:
            raise SetupError("the serving benchmark needs aiohttp: pip install 'tokenmill[bench]'") from None

        headers = {"Authorization": f"Bearer {self.target.api_key}"} if self.target.api_key else {}
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            read_bufsize=1 << 20,
            headers=headers,
        )
        try:
            if not self.model:
                async with self.http.get(self.target.url + "/models") as response:
                    response.raise_for_status()
                    self.model = (await response.json())["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
            await self.http.close()
            raise SetupError(f"{self.target.name}: no model list from {self.target.url}/models ({error})") from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.close()

    async def counters(self) -> Counters | None:
        """The server's own, where it is a tokenmill."""
        try:
            async with self.http.get(self.target.url.removesuffix("/v1") + "/metrics") as response:
                return read_counters(await response.text()) if response.status == 200 else None
        except Exception:  # it has none: nothing to report
            return None

    async def ask(self, messages: list[Message], max_tokens: int) -> Sample:
        """One streamed chat completion. Errors of the server or the network are noted in the sample, not raised."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        body |= self.extra
        sample = Sample(sent=time.perf_counter())
        try:
            async with self.http.post(self.target.url + "/chat/completions", json=body) as response:
                if response.status != 200:
                    sample.error = f"HTTP {response.status}: {(await response.text())[:MAX_ERROR_CHARS]}"
                    return sample
                async for line in response.content:
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        break
                    if data:
                        self._read_event(json.loads(data), sample)
        except Exception as error:  # whatever breaks one request is that request's result
            sample.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        sample.finished = time.perf_counter()
        if sample.error is None and not sample.token_times:
            sample.error = "the stream held no content"
        sample.output_tokens = sample.output_tokens or len(sample.token_times)
        return sample

    def _read_event(self, event: dict, sample: Sample) -> None:
        if event.get("error"):
            sample.error = str(event["error"])[:MAX_ERROR_CHARS]
        usage = event.get("usage") or {}
        sample.output_tokens = usage.get("completion_tokens") or sample.output_tokens
        sample.prompt_tokens = usage.get("prompt_tokens") or sample.prompt_tokens
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            sample.cached_tokens = cached
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                sample.text += text
                sample.token_times.append(time.perf_counter())


async def _run_session(client: Client, session: Session) -> list[Sample]:
    history: list[Message] = []
    samples = []
    for number, turn in enumerate(session.turns):
        history += turn.messages
        sample = await client.ask(history, turn.max_tokens)
        sample.turn = number
        samples.append(sample)
        if sample.error is not None:
            break
        history.append({"role": "assistant", "content": sample.text})
    return samples


async def run_workload(client: Client, workload: Workload) -> tuple[list[Sample], float]:
    """All sessions of a workload; samples in the order of sessions, and the wall time in seconds."""
    started = time.perf_counter()
    results: list[list[Sample]] = [[] for _ in workload.sessions]

    if workload.concurrency is None:

        async def arrive(index: int, session: Session) -> None:
            await asyncio.sleep(max(0.0, session.arrival - (time.perf_counter() - started)))
            results[index] = await _run_session(client, session)

        await asyncio.gather(*(arrive(i, session) for i, session in enumerate(workload.sessions)))
    else:
        queue = iter(enumerate(workload.sessions))

        async def work() -> None:
            for index, session in queue:
                results[index] = await _run_session(client, session)

        await asyncio.gather(*(work() for _ in range(min(workload.concurrency, len(workload.sessions)))))
    return [sample for samples in results for sample in samples], time.perf_counter() - started
