"""The listening sockets and the connections: binding before anything is loaded, deadlines and caps on every socket.

uvicorn's protocol parses HTTP and runs the ASGI app. What it lets a client do for ever is bounded here: to send
nothing, to send headers slowly or without end, to leave its answer unread, to pipeline. (Bodies: server/body.py.)

It knows nothing of routes and of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import ServerConfig
from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

SEND_BUFFER_BYTES = 1 << 17
WRITE_NOW = "tokenmill.write_now"  # ASGI extension of this server's connections: write_now() below, of one request


def write_now(cycle: Any, data: bytes) -> bool:
    """Write a part of an answer whose head is out, without a coroutine. False where the client is behind: send() it."""
    if cycle.flow.write_paused or not cycle.chunked_encoding:
        return False
    if not cycle.disconnected and not cycle.response_complete:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address `host` has, so that the port is ours from here on.

    Raises ConfigError, one line, where it cannot be had.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}; it must be between 0 and 65535")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host is {host!r}: {getattr(error, 'strerror', None) or error}") from None
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # an address family this kernel does not have
            failure = error
            continue
        try:
            # Lets a restart bind while old connections linger in TIME_WAIT. Two servers still cannot share a port,
            # because listen() comes at once.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = sockets[0].getsockname()[1] if sockets else port  # port 0: the same free port for every address
            sock.bind((address[0], chosen, *address[2:]))
            sock.listen(2048)
            sock.setblocking(False)
            sockets.append(sock)
        except OSError as error:
            sock.close()
            failure = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    if not sockets or (failure and failure.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)):
        for sock in sockets:
            sock.close()
        raise ConfigError(_why(host, port, failure))
    return sockets


def _why(host: str, port: int, failure: OSError | None) -> str:
    if failure is None:
        return f"host is {host!r}: it has no address"
    if failure.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there or choose another with --port"
    if failure.errno == errno.EACCES:
        return f"port {port} on {host}: permission denied; ports below 1024 need rights, choose another with --port"
    return f"cannot listen on {host} port {port}: {os.strerror(failure.errno or 0)}"


def raise_file_limit(wanted: int) -> None:
    """Let this process have `wanted` open files, as far as the hard limit goes."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard == resource.RLIM_INFINITY or hard > wanted:
            hard_enough = wanted
        else:
            hard_enough = hard
        if soft < hard_enough:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_enough, hard))


def make_protocol(config: ServerConfig, error_body: Callable[[int, str], bytes]) -> type:
    """uvicorn's HTTP protocol class with this server's limits."""
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

    class BoundedProtocol(HttpToolsProtocol):
        _read_deadline: asyncio.TimerHandle | None = None  # while there is no whole head of a request
        _write_deadline: asyncio.TimerHandle | None = None  # while the client does not read
        _in_headers = True  # between requests, or inside one's headers
        _header_bytes = 0
        _message_open = False  # a request's body is still to come
        _extra = False  # the client sent a second request before its first was answered

        def connection_made(self, transport):
            super().connection_made(transport)
            if len(self.connections) > config.max_connections:
                transport.abort()
                return
            sock = transport.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                # What a slow reader can make the kernel hold; left alone it would grow to megabytes a connection.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                # Bytes a peer does not take (or a peer that vanished) end the connection, also after close().
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.write_seconds * 1000))
            self._wait_for_headers()

        def connection_lost(self, exc):
            self._stop_reading_timer()
            self._stop_writing_timer()
            super().connection_lost(exc)

        # ---- reading

        def data_received(self, data):
            if self._extra:
                return  # unread until the answer is out, then the connection closes
            if self._in_headers:
                self._header_bytes += len(data)
                if self._header_bytes > config.max_header_bytes and not self._ends_headers(data):
                    self.refuse(431, f"headers of more than {config.max_header_bytes} bytes")
                    return
            super().data_received(data)

        def _ends_headers(self, data: bytes) -> bool:
            """Whether this read, which crossed the cap, also holds the end of headers that stayed under it."""
            end = data.find(b"\r\n\r\n")
            return end >= 0 and self._header_bytes - len(data) + end <= config.max_header_bytes

        def on_headers_complete(self):
            if self.cycle is not None and not self.cycle.response_complete:
                # Pipelining would hide a disconnect from the request that runs. RFC 9112 9.3.2: a client must be ready
                # to send again what was not answered before the connection closed.
                self._extra = True
                self.cycle.keep_alive = False
                return
            self._in_headers, self._message_open = False, True
            self._stop_reading_timer()
            super().on_headers_complete()
            self.scope["extensions"] = {WRITE_NOW: partial(write_now, self.cycle)}

        def on_body(self, body):
            if not self._extra:
                super().on_body(body)

        def on_message_complete(self):
            if self._extra:
                return
            self._message_open = False
            super().on_message_complete()
            if self.cycle.response_complete:  # it was answered before it was read
                self._in_headers, self._header_bytes = True, 0

        def on_response_complete(self):
            super().on_response_complete()
            self._unset_keepalive_if_required()  # one deadline for idleness, slow headers and a body nobody wants
            if not self._message_open:
                self._in_headers, self._header_bytes = True, 0
            if not self.transport.is_closing():
                self._wait_for_headers()

        def _wait_for_headers(self):
            self._stop_reading_timer()
            self._read_deadline = self.loop.call_later(config.header_seconds, self._headers_too_slow)

        def _headers_too_slow(self):
            if self._in_headers and self._header_bytes:
                self.refuse(408, f"the request's headers took more than {config.header_seconds:g} s")
            else:
                self.transport.close()

        def _stop_reading_timer(self):
            if self._read_deadline is not None:
                self._read_deadline.cancel()
                self._read_deadline = None

        # ---- writing

        def pause_writing(self):
            super().pause_writing()
            self._write_deadline = self.loop.call_later(config.write_seconds, self.transport.abort)

        def resume_writing(self):
            self._stop_writing_timer()
            super().resume_writing()

        def _stop_writing_timer(self):
            if self._write_deadline is not None:
                self._write_deadline.cancel()
                self._write_deadline = None

        # ---- answers without the app

        def send_400_response(self, msg: str) -> None:
            self.refuse(400, msg)

        def refuse(self, status: int, message: str) -> None:
            """Answer without the app and close."""
            self._stop_reading_timer()
            if self.cycle is None or self.cycle.response_complete:  # else an answer is under way
                body = error_body(status, message)
                head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()

    return BoundedProtocol
