"""What every request passes first: its id, and the key. Pure ASGI, so that streams pass through untouched."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from ..errors import AuthenticationFailed
from .errors import error_response

OPEN_PATHS = frozenset({"/health"})  # the only ones that need no key; compared whole, never by prefix
_PRINTABLE = re.compile(rb"^[\x21-\x7e]{1,128}$")


class RequestId:
    """Echoes the client's X-Request-Id, or makes one. It is never an id inside the engine."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        header = (b"x-request-id", given if _PRINTABLE.match(given) else secrets.token_hex(8).encode())

        async def send_with_id(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self.app(scope, receive, send_with_id)


class KeyGuard:
    """401 without one of the keys, on every path but OPEN_PATHS, known or not, whatever the method.

    Keys are held and compared as digests, in constant time, and all of them each time.
    """

    def __init__(self, app, *, keys: Iterable[str]):
        self.app = app
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self.allows(scope["headers"]):
            return await self.app(scope, receive, send)
        error = AuthenticationFailed("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
        await error_response(error)(scope, receive, send)

    def allows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return scheme.lower() == b"bearer" and any(matches)
