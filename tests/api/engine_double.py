"""A stand-in for the engine, loaded by name inside the real engine process: its behaviour is told by the prompt.

Every sequence gets the tokens 100, 101, 102 ... one a step, so that what the server does with them can be foretold.
Prompts that begin with one of the tokens below make it misbehave.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.core import FinishReason
from tokenmill.engine.messages import AbortRequest, AddRequest, EngineReady, EngineStats, TokenDelta
from tokenmill.errors import ConfigError, InvalidRequest

RAISES, EXITS, REFUSED, SLOW = 90, 91, 92, 93


@dataclass
class Loaded:
    engine: DoubleEngine
    ready: EngineReady


def load(config: EngineConfig) -> Loaded:
    folder = Path(config.model)
    folder = folder if folder.is_dir() else folder.parent
    if (folder / "fails").exists():
        raise ConfigError((folder / "fails").read_text())
    if (folder / "dies").exists():
        os._exit(3)
    with (folder / "loads").open("a") as log:
        log.write(f"{os.getpid()}\n")
    ready = EngineReady(model_name="double", model_digest="d", max_model_len=64, vocab_size=1000, decisions=[])
    return Loaded(DoubleEngine(), ready)


class DoubleEngine:
    def __init__(self) -> None:
        self.running: dict[tuple[str, int], AddRequest] = {}
        self.written: dict[tuple[str, int], int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: AddRequest) -> None:
        if request.prompt_token_ids[0] == REFUSED:
            raise InvalidRequest("the double does not like this")
        for i in range(request.params.n):
            self.running[request.request_id, i] = request
            self.written[request.request_id, i] = 0

    def abort(self, request: AbortRequest) -> None:
        for key in list(self.running):
            if key[0] == request.request_id and request.index in (None, key[1]):
                del self.running[key]

    def step(self) -> list[TokenDelta]:
        deltas = []
        for key, request in list(self.running.items()):
            first = request.prompt_token_ids[0]
            if first == RAISES:
                raise RuntimeError("a bug in the double")
            if first == EXITS:
                os._exit(5)
            if first == SLOW:
                time.sleep(0.05)
            self.written[key] += 1
            last = self.written[key] == request.params.max_tokens
            deltas.append(
                TokenDelta(
                    request_id=key[0],
                    index=key[1],
                    token_ids=[99 + self.written[key]],
                    finish_reason=FinishReason.LENGTH if last else None,
                )
            )
            if last:
                del self.running[key]
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.running), generation_tokens=sum(self.written.values()), pages_total=9)
