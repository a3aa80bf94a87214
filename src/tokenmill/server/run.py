"""One server's life: port, engine process, tokenizer, HTTP, signals, end.

    bind -> find the model's files -> spawn the engine ----------------------> ready -> announce -> serve
     |            |                    \\-> import HTTP, build the tokenizer -/                       |
     no port      no model                                                          SIGTERM: drain, exit 0
     (SetupError, before anything is loaded)                                        again: exit at once

While the engine loads, HTTP already answers: /health is 503 until requests are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import EngineConfig, ServerConfig
from ..engine.messages import EngineReady
from ..engine.process import DEFAULT_FACTORY
from ..errors import ConfigError, EngineUnavailable
from .http import bind, raise_file_limit

log = logging.getLogger("tokenmill")


def default_name(ref: str) -> str:
    """The model's name in the API where none is given: the short name or repository, or the file's name."""
    if ref.startswith("hf:"):
        return ref[3:].partition(":")[0]
    if ref.startswith("pypi:"):
        ref = ref.rpartition("#")[2].removeprefix("pypi:")
    return Path(ref.removeprefix("file:")).expanduser().resolve().name.removesuffix(".gguf") or ref


def check(config: ServerConfig) -> None:
    """Raise ConfigError for a setting that cannot be met."""
    for name in ("max_body_bytes", "max_n", "max_connections", "max_header_bytes"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1")
    for name in ("header_seconds", "body_seconds", "write_seconds"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be above 0")
    if not config.drain_seconds >= 0:
        raise ConfigError(f"drain_seconds is {config.drain_seconds}; it must be 0 or more")
    if any(not key.strip() for key in config.api_key):
        raise ConfigError("api_key is empty")
    if any(not name.strip() for name in config.served_model_name):
        raise ConfigError("served_model_name is empty")


def run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    find_model: Callable[[str, str | None], Path],
    announce: Callable[[EngineReady, str, tuple[str, ...]], None],
    factory: str = DEFAULT_FACTORY,
) -> int:
    """Serve until a signal; the process's exit code. Raises SetupError, leaving nothing behind, if it cannot start.

    find_model(reference, revision) gives local files. announce(ready, base URL, model names) is called once.
    """
    check(server_config)
    sockets = bind(server_config.host, server_config.port)
    try:
        names = server_config.served_model_name or (default_name(engine_config.model),)
        path = find_model(engine_config.model, engine_config.revision)
        from .client import EngineClient

        client = EngineClient(replace(engine_config, model=str(path), revision=None), factory=factory)
        client.spawn()
        try:
            # The engine process imports and loads meanwhile.
            raise_file_limit(server_config.max_connections + 256)
            with asyncio.Runner() as runner:
                return runner.run(Server(client, server_config, names, path, sockets, announce).serve())
        finally:
            client.stop()
    finally:
        for sock in sockets:
            sock.close()


class Server:
    """What runs inside the event loop."""

    def __init__(
        self,
        client: Any,
        config: ServerConfig,
        names: tuple[str, ...],
        path: Path,
        sockets: list[socket.socket],
        announce: Callable[[EngineReady, str, tuple[str, ...]], None],
    ):
        self.client = client
        self.config = config
        self.names = names
        self.path = path
        self.sockets = sockets
        self.announce = announce
        self.signals = 0

    async def serve(self) -> int:
        client, loop = self.client, asyncio.get_running_loop()
        client.attach()
        tokenizer = loop.run_in_executor(None, load_tokenizer, self.path)

        from .app import make_app
        from .state import Serving

        self.serving = Serving(client, self.config, self.names)
        self.http = make_http(make_app(self.serving), self.config)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.create_task(self.http._serve(self.sockets))
        ready = asyncio.create_task(self._become_ready(tokenizer))
        try:
            await asyncio.wait([http, ready], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()  # SetupError: it cannot start
            await http
        finally:
            ready.cancel()
            self.http.should_exit = True
            self.serving.close()
        return 0

    async def _become_ready(self, tokenizer: asyncio.Future) -> None:
        # Whatever fails first says why.
        info, self.serving.tokenizer = await asyncio.gather(self.client.wait_ready(), tokenizer)
        host, port = self.config.host, self.sockets[0].getsockname()[1]
        host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
        self.announce(info, f"http://{f'[{host}]' if ':' in host else host}:{port}", self.names)
        await asyncio.get_running_loop().run_in_executor(None, warm_up, self.serving)

    def _on_signal(self, number: int) -> None:
        self.signals += 1
        if self.signals > 1:
            self.client.stop()
            os._exit(128 + number)
        live = self.client.num_live
        if live:
            print(
                f"stopping: {live} running sequences have {self.config.drain_seconds:g} s", file=sys.stderr, flush=True
            )
        self.client.drain()
        self.http.should_exit = True
        asyncio.get_running_loop().call_later(self.config.drain_seconds, self._drain_is_over)

    def _drain_is_over(self) -> None:
        self.client.fail_all(EngineUnavailable("the server shut down before this request was finished"))


def load_tokenizer(path: Path) -> Any:
    """The front end's own tokenizer, from the same files as the engine's weights."""
    from ..text.tokenizer import load_tokenizer
    from ..weights.loader import open_checkpoint

    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint)
    checkpoint.release()
    return tokenizer


def warm_up(serving: Any) -> None:
    """What the first request and the first scrape would otherwise wait for."""
    from ..text.chat import render_chat

    with contextlib.suppress(Exception):  # it fails again, in its own words, for the request that needs it
        render_chat(serving.tokenizer, [{"role": "user", "content": ""}], template=serving.chat_template)
    with contextlib.suppress(Exception):
        _ = serving.tokenizer.max_token_bytes
        import_module(".exposition", __package__)
    gc.collect()
    gc.freeze()  # modules and vocabulary stay; the collector need not walk over them beside every few requests


def make_http(app: Any, config: ServerConfig) -> Any:
    """A uvicorn server without its own signals, logs and lifespan."""
    import uvicorn

    from .errors import http_error_body
    from .http import make_protocol

    # One line a bad request would let anyone fill the log; failures of ours still get there, with their traceback.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=make_protocol(config, http_error_body),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=2048,
            timeout_graceful_shutdown=int(config.drain_seconds) + 3,
        )
    )
