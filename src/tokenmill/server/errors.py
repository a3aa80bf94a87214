"""Every failure as the API's own: {"error": {message, type, param, code}} with the right status.

Knows the exception tree and HTTP; nothing of routes.
"""

from __future__ import annotations

import asyncio
import http
import logging
from difflib import get_close_matches

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..errors import AuthenticationFailed, Overloaded, RequestTooLarge, TokenmillError

log = logging.getLogger("tokenmill")
LINGER_SECONDS = 2.0  # how long an unread body is read on after its refusal, so that the client gets to see it
HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed", 408: "request_timeout", 415: "unsupported_media_type"}


class RequestTimeout(TokenmillError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class UnsupportedMediaType(TokenmillError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class ClientDisconnected(TokenmillError):
    """Nobody is left to answer. Never sent."""

    status = 499
    code = "client_disconnected"


def error_object(error: TokenmillError) -> dict:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def http_error_object(status: int, message: str) -> dict:
    """For failures of HTTP itself, which have no exception class of ours."""
    code = HTTP_CODES.get(status, "bad_request" if status < 500 else "internal_error")
    type_ = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": type_, "param": None, "code": code}}


def http_error_body(status: int, message: str) -> bytes:
    return msgspec.json.encode(http_error_object(status, message))


class JSON(Response):
    """A JSON answer. Floats that are not finite become null: msgspec never writes NaN or Infinity."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


class LingeringJSON(JSON):
    """Answers a request whose body was not read, then reads on for a little: closing at once would reset the
    connection, and a client that is still sending would see that instead of the answer."""

    async def __call__(self, scope, receive, send) -> None:
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while (message := await receive())["type"] == "http.request" and message["more_body"]:
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: TokenmillError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after)
    elif error.status == 503:
        headers["retry-after"] = "1"
    elif isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, RequestTimeout):
        headers["connection"] = "close"
    unread = isinstance(error, (RequestTooLarge, UnsupportedMediaType))
    return (LingeringJSON if unread else JSON)(error_object(error), error.status, headers)


async def on_tokenmill_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenmillError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = request.url.path[:200]
        close = get_close_matches(path, sorted({route.path for route in request.app.routes}), 1, 0.75)
        message = f"there is no {request.method} {path}" + (f"; did you mean {close[0]}?" if close else "")
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path[:200]}"
    else:
        message = str(error.detail) or http.HTTPStatus(error.status_code).phrase
    return JSON(http_error_object(error.status_code, message), error.status_code, error.headers)


async def on_bug(request: Request, error: Exception) -> Response:
    """Anything not raised on purpose. The traceback goes to the log (starlette raises it again), not to the client."""
    return JSON(http_error_object(500, "the server failed on this request; its log says why"), 500)


HANDLERS = {TokenmillError: on_tokenmill_error, HTTPException: on_http_exception, Exception: on_bug}
