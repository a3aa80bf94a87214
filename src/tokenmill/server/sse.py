"""Server-sent events: one `data:` line an event, written as they come. Knows ASGI and nothing of what it carries."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from .http import WRITE_NOW

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would hold events back
]
PLACE = f"<{secrets.token_hex(16)}>"  # where a Template's text goes; no text of anyone's holds it

_encode = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class Template:
    """An event whose next copies differ in one string only."""

    __slots__ = ("_after", "_before")

    def __init__(self, event_with_place: bytes):
        self._before, _, self._after = event_with_place.partition(_encode(PLACE))

    def fill(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _encode(text), self._after)


class EventStream:
    """The answer of one stream. put() takes events from whoever has them; a task runs flush() whenever wait() returns.

    Once the head is out and while the client keeps up, put() writes past the task, straight to the connection: a task's
    wake-up costs more than all the rest of a token's way. Nothing is sent before the first flush(), so that earlier
    errors can have a status.
    """

    __slots__ = ("_waiting", "_wake", "_write_now", "started")

    def __init__(self) -> None:
        self.started = False
        self._waiting: list[bytes] = []
        self._write_now: Callable[[bytes], bool] | None = None  # while nothing waits
        self._wake = asyncio.Event()

    def put(self, data: bytes) -> None:
        if self._write_now is None or not self._write_now(data):
            self.hold(data)
            self._wake.set()

    def hold(self, data: bytes) -> None:
        """Have the task send it: the last of an answer ends it too."""
        self._write_now = None
        self._waiting.append(data)

    def wake(self) -> None:
        """The generation is over: wait() returns."""
        self._wake.set()

    async def wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    async def flush(self, scope: Any, send: Any, *, last: bool = False) -> None:
        """Send what waits; returns once the client has room for more."""
        self._write_now = None
        data = b"".join(self._waiting)
        self._waiting.clear()
        if not data and not last:
            return
        if not self.started:
            self.started = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": not last})
        if not self._waiting:
            self._write_now = scope.get("extensions", {}).get(WRITE_NOW)
