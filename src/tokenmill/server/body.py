"""Request bodies: read within a size and a time, decoded strictly, every mistake named by its field.

Knows HTTP and msgspec; nothing of what the bodies mean (server/protocol.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from ..config import ServerConfig
from ..errors import InvalidRequest, Overloaded, RequestTooLarge
from .errors import ClientDisconnected, RequestTimeout, UnsupportedMediaType

T = TypeVar("T")
log = logging.getLogger("tokenmill")
_WHERE = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?$", re.DOTALL)  # msgspec's own way of saying it

BODIES_AT_ONCE = 32  # full-sized ones that may be in memory together
SMALL_BODY = 1 << 20  # bytes; a larger one is not looked at twice, for what is wrong or ignored in it
MOST_TYPOS, LONGEST_TYPO = 256, 40  # names remembered, characters


class Bodies:
    """Reads bodies within a size, a time, and a sum over all that are being read: many large ones at once are refused
    before they fill the memory."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.room = BODIES_AT_ONCE * config.max_body_bytes  # bytes

    async def read_json(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """The body as the decoder's type. Raises InvalidRequest with the field's name, and what _read raises."""
        check_media_type(request)
        chunks: list[bytes] = []
        try:
            await self._read(request, chunks)
            return decode(b"".join(chunks), decoder)
        finally:
            self.room += sum(map(len, chunks))

    async def _read(self, request: Request, chunks: list[bytes]) -> None:
        """Raises RequestTooLarge (before reading, where the length is promised), RequestTimeout, Overloaded."""
        limit = self.config.max_body_bytes
        too_large = RequestTooLarge(f"the body is larger than {limit} bytes")
        promised = request.headers.get("content-length", "")
        if promised.isdigit() and int(promised) > limit:
            raise too_large
        size = 0
        try:
            async with asyncio.timeout(self.config.body_seconds):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected("the client left")
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    size += len(chunk)
                    if size > limit:
                        raise too_large
                    if len(chunk) > self.room:
                        raise Overloaded("too many large bodies are being read")
                    self.room -= len(chunk)
                    chunks.append(chunk)
        except TimeoutError:
            raise RequestTimeout(f"the body took more than {self.config.body_seconds:g} s") from None


def check_media_type(request: Request) -> None:
    """JSON, not compressed. No content type at all counts as JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"content-type is {kind[:100]!r}; send application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaType(f"content-encoding is {coding[:100]!r}; send the body uncompressed")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidRequest("the body starts with a byte order mark; send plain UTF-8 JSON")
    try:
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        text, where = _WHERE.match(str(error)).groups()  # type: ignore[union-attr]
        if not where and (missing := re.search(r"missing required field `(\w+)`", text)):
            where = missing[1]
        raise InvalidRequest(f"{where}: {text}" if where else text, param=where or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        field = _non_finite_field(body) if len(body) <= SMALL_BODY else None
        if field is not None:
            raise InvalidRequest(f"{field}: not a finite number", param=field) from None
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if len(body) <= SMALL_BODY:
        _tell_typos(body, type(value))
    return value


_ANY_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_told: set[str] = set()


def _tell_typos(body: bytes, struct: Any) -> None:
    """An unknown field is ignored by rule; one that is nearly a known one is named in the log, once."""
    known = _fields_of(struct)
    for name in _ANY_OBJECT.decode(body).keys() - known - _told:
        if len(_told) >= MOST_TYPOS:
            return
        if len(name) <= LONGEST_TYPO and (close := get_close_matches(name, known, 1, 0.8)):
            log.warning("a request's field %r is ignored; did its client mean %r?", name, close[0])
        _told.add(name[:LONGEST_TYPO])


@lru_cache
def _fields_of(struct: Any) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(struct))


def _non_finite_field(body: bytes) -> str | None:
    """The top-level field that holds NaN, Infinity or a number past the floats: no JSON, but clients do send them."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, float) and not math.isfinite(item):
                return name
    return None
