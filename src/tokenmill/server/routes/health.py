"""GET /health, /version and /."""

from __future__ import annotations

from starlette.requests import Request

from ... import __version__
from ..errors import JSON
from ..state import serving_of


async def health(request: Request) -> JSON:
    """200 while requests are taken; 503 while the engine loads, was lost, or the server shuts down."""
    serving = serving_of(request)
    serving.check_ready()
    return JSON({"status": "ok"})


async def version(request: Request) -> JSON:
    return JSON({"version": __version__})


async def root(request: Request) -> JSON:
    serving = serving_of(request)
    return JSON({"name": "tokenmill", "version": __version__, "model": serving.names[0], "api": "/v1"})
