"""Whole messages over one connected stream socket: four bytes of length, then msgpack.

The two ends are the halves of a socketpair, one inherited by the engine process. So there is nothing in the file system
to guard or to clean up, and when either process dies, however it dies, the other reads the end of the stream at once.
It knows nothing of what the messages mean.

One thread may send while another receives; two threads may not do the same.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

READ_BYTES = 1 << 18
MAX_MESSAGE_BYTES = 1 << 30  # a longer length means the stream is broken


class Channel:
    """Sends anything msgspec can encode; receives messages of `receives` (a tagged union)."""

    def __init__(self, sock: socket.socket, receives: Any):
        self.sock = sock
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, READ_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._buffer = bytearray()

    def send(self, message: Any) -> None:
        """Blocks while the other end is behind. Raises OSError (BrokenPipeError) when it is gone."""
        body = self._encoder.encode(message)
        self.sock.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self, *, wait: bool) -> list[Any]:
        """Every whole message that is here, [] when there is none; with `wait`, sleeps until something comes.

        Raises EOFError when the other end is gone and everything it sent was read.
        """
        try:
            data = self.sock.recv(READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= 4:
            length = int.from_bytes(self._buffer[start : start + 4], "little")
            if length > MAX_MESSAGE_BYTES:
                raise EOFError(f"a message of {length} bytes")
            if len(self._buffer) - start - 4 < length:
                break
            with memoryview(self._buffer) as view:
                messages.append(self._decoder.decode(view[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._buffer[:start]
        return messages

    def close(self) -> None:
        self.sock.close()
