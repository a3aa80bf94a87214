"""Server-sent events: one `data:` line an event, written as they come. Knows ASGI and nothing of what it carries."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would hold events back
]

_encoder = msgspec.json.Encoder()


def event(body: Any) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"


class EventWriter:
    """The answer of one stream. Nothing is sent before the first write, so that earlier errors can have a status."""

    def __init__(self, send: Any):
        self._send = send
        self.started = False

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Waits while the client is behind."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
