"""The engine in a process of its own: `python -m tokenmill.engine.process --fd 3 --parent 123 --config {...}`.

main() loads an engine, says EngineReady, then repeats: take what came in, run a step, send what it gave. With nothing
to do it sleeps in recv(). It ends when the front end closes its half of the socket pair (or dies: the kernel closes it,
and kills this process at once even inside a long step), when told to Drain, or with EngineFailed when it cannot go on.

It knows nothing of HTTP and of text. Who starts, watches and restarts it is engine/supervisor.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import msgspec

from ..config import EngineConfig
from ..core import FinishReason
from ..errors import TokenmillError
from .channel import Channel
from .messages import (
    AbortRequest,
    AddRequest,
    Drain,
    EngineFailed,
    EngineReady,
    EngineStats,
    OutputBatch,
    ToEngine,
    TokenDelta,
)

DEFAULT_FACTORY = "tokenmill.engine.load:load_engine"
STATS_SECONDS = 0.1  # gauges are sent at most this often, and whenever idleness begins
PR_SET_PDEATHSIG = 1


class EngineLike(Protocol):
    """What the loop needs of an engine. Owned by this one thread."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: AddRequest) -> None: ...
    def abort(self, request: AbortRequest) -> None: ...
    def step(self) -> list[TokenDelta]: ...
    def stats(self) -> EngineStats: ...


class Loaded(Protocol):
    engine: EngineLike
    ready: EngineReady


def find_factory(path: str) -> Callable[[EngineConfig], Loaded]:
    """'package.module:function' -> the function."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies. Where it cannot, the closed socket ends the loop."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def handle(engine: EngineLike, message: Any) -> list[TokenDelta]:
    """Give one message to the engine. What it refuses becomes that request's error, for each of its choices."""
    if isinstance(message, AbortRequest):
        engine.abort(message)
        return []
    try:
        engine.add(message)
    except TokenmillError as error:
        return [
            TokenDelta(request_id=message.request_id, index=i, finish_reason=FinishReason.ERROR, error=error.message)
            for i in range(message.params.n)
        ]
    return []


def run_loop(engine: EngineLike, channel: Channel) -> None:
    """Serve until the front end goes (EOFError, OSError) or its Drain has been obeyed."""
    stats_due = 0.0
    was_busy = False
    draining = False
    while True:
        busy = engine.has_work
        if draining and not busy:
            return
        deltas: list[TokenDelta] = []
        for message in channel.receive(wait=not busy):
            if isinstance(message, Drain):
                draining = True
            else:
                deltas += handle(engine, message)
        if engine.has_work:
            deltas += engine.step()
        busy = engine.has_work
        now = time.monotonic()
        stats = None
        if now >= stats_due or (was_busy and not busy):
            stats, stats_due = engine.stats(), now + STATS_SECONDS
        was_busy = busy
        if deltas or stats is not None:
            channel.send(OutputBatch(deltas, stats))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tokenmill.engine.process")
    parser.add_argument("--fd", type=int, required=True, help="this process's half of the socket pair")
    parser.add_argument("--parent", type=int, required=True, help="process id of the front end")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, help="module:function that loads an engine")
    options = parser.parse_args(arguments)

    die_with_parent(options.parent)
    # The front end decides when this process ends, also where a signal reaches the whole group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=options.fd), ToEngine)
    try:
        try:
            config = msgspec.json.decode(options.config, type=EngineConfig)
            loaded = find_factory(options.factory)(config)
            gc.collect()
            gc.freeze()  # what was loaded stays; without this, now and then a step would wait for a walk over all of it
            channel.send(loaded.ready)
            channel.send(OutputBatch([], loaded.engine.stats()))
            run_loop(loaded.engine, channel)
        except TokenmillError as error:
            channel.send(EngineFailed(message=" ".join(error.message.split())))
            return 1
        except MemoryError:
            channel.send(EngineFailed(message="the engine ran out of memory"))
            return 1
    except (EOFError, OSError) as gone:
        if not isinstance(gone, (EOFError, BrokenPipeError, ConnectionError)):
            raise
    except Exception as bug:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send(EngineFailed(message=f"the engine failed: {type(bug).__name__}"))
        return 1
    return 0


if __name__ == "__main__":
    # os._exit: nothing is worth the time an orderly teardown of weights and threads takes.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
