"""`tokenmill serve`: a model over OpenAI's HTTP API. What it prints; server/run.py does the work."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import click

from ..config import EngineConfig, ServerConfig
from ..engine.messages import EngineReady
from .options import config_from, options_of


@click.command()
@click.argument("model", required=False)
@options_of(EngineConfig, skip=("model",))
@options_of(ServerConfig)
@click.option("--engine-factory", hidden=True, help="module:function that loads another engine; for tests.")
@click.pass_context
def serve(ctx: click.Context, model: str | None, engine_factory: str | None, **values: Any) -> None:
    """Serve MODEL over OpenAI's HTTP API.

    Every option is also an environment variable: --api-key is TOKENMILL_API_KEY.
    """
    engine_config = config_from(EngineConfig, {"model": model, **values})
    server_config = config_from(ServerConfig, values)
    ctx.exit(run_server(engine_config, server_config, factory=engine_factory))


def run_server(engine_config: EngineConfig, server_config: ServerConfig, *, factory: str | None = None) -> int:
    """Serve until a signal; the exit code. Raises SetupError if it cannot start."""
    from ..server.run import run

    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    started = time.monotonic()

    def announce(ready: EngineReady, url: str, names: tuple[str, ...]) -> None:
        width = max((len(what) for what, _ in ready.decisions), default=0)
        for what, which in ready.decisions:
            click.echo(f"  {what.ljust(width)}  {which}")
        seconds = time.monotonic() - started
        click.echo(f"{', '.join(names)} is ready on {url} after {seconds:.1f} s. Try it:")
        click.echo(f"  {curl_line(url, names[0], with_key=bool(server_config.api_key))}")

    extra = {} if factory is None else {"factory": factory}
    return run(engine_config, server_config, find_model=find_model, announce=announce, **extra)


def find_model(ref: str, revision: str | None) -> Path:
    """Local files of a model, fetched with a progress bar where they are not here yet."""
    from ..weights import sources
    from .progress import download_progress

    if terms := sources.notice(ref):
        click.echo(terms, err=True)
    with download_progress() as progress:
        return sources.resolve(ref, revision=revision, progress=progress)


def curl_line(url: str, model: str, *, with_key: bool) -> str:
    """A request that works as it stands. A key is named by its variable, never shown."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' -H "Authorization: Bearer $TOKENMILL_API_KEY"' if with_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
