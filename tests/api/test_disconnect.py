"""A client that leaves frees the engine at once: whole or streamed, running or queued (BC-030, BC-031)."""

import random
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from tests.api.server import events_of, eventually, read_all, read_until, unchunk

ENDLESS = {"prompt": "X", "max_tokens": 50_000, "ignore_eos": True}


def reset(sock: socket.socket) -> None:
    """Close with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    """FIN while the socket stays open for reading: we take it as leaving."""
    sock.shutdown(socket.SHUT_WR)


def running(server) -> float:
    return server.metrics()["vllm:num_requests_running"]


def waiting(server) -> float:
    return server.metrics()["vllm:num_requests_waiting"]


def aborted(server) -> float:
    return server.metrics()['vllm:request_success_total{finished_reason="abort"}']


@pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_running_request_is_aborted(endless, leave, stream, path):
    before = aborted(endless)
    body = ENDLESS | {"stream": stream, "messages": [{"role": "user", "content": "x"}]}
    sock = endless.send_raw(path, body)
    if stream:
        read_until(sock, b"data: ")
    assert eventually(lambda: running(endless) == 1)
    leave(sock)
    started = time.monotonic()
    # the only slot is free for the next one
    assert endless.complete("X", max_tokens=3)["choices"][0]["text"] == "abc"
    assert time.monotonic() - started < 1
    assert eventually(endless.idle, 1)
    assert aborted(endless) == before + 1
    sock.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_request_is_aborted(endless, stream):
    first = endless.send_raw("/v1/completions", ENDLESS)
    assert eventually(lambda: running(endless) == 1)
    queued = [endless.send_raw("/v1/completions", ENDLESS | {"stream": stream}) for _ in range(2)]
    assert eventually(lambda: waiting(endless) == 2)
    assert endless.post("/v1/completions", ENDLESS).status_code == 429
    for sock in queued:
        sock.close()
    assert eventually(lambda: waiting(endless) == 0, 1)
    assert running(endless) == 1
    first.close()
    assert eventually(endless.idle, 1)


def test_leaving_before_the_body_is_whole(rigged):
    for _ in range(20):
        sock = rigged.connect()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        sock.close()
    assert rigged.complete(max_tokens=1)["choices"][0]["text"] == "a"
    assert "Traceback" not in rigged.log


def test_a_pipelined_request_does_not_hide_the_leaving(endless):
    sock = endless.send_raw("/v1/completions", ENDLESS)
    assert eventually(lambda: running(endless) == 1)
    endless.send_raw("/v1/completions", ENDLESS, sock)
    time.sleep(0.1)
    sock.close()
    assert eventually(endless.idle, 1)


def test_what_is_pipelined_is_not_answered_and_the_connection_closes(rigged):
    """RFC 9112 9.3.2: the client sends it again on another connection."""
    sock = rigged.connect()
    request = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    body = b'{"model": "rigged", "prompt": "X", "max_tokens": 2}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    sock.sendall(post + request + request)
    raw = read_all(sock)
    assert raw.count(b"HTTP/1.1 200") == 1 and b'"text":"ab"' in raw


def test_streams_that_stop_at_random_points_leave_nothing_behind(tiny):
    """Mixed with streams that finish, whose text is what they give alone; client-made ids repeat."""
    rng = random.Random(1)
    bodies = [
        {"prompt": f"the {i % 7}", "max_tokens": 24, "seed": i % 7, "stream": True, "ignore_eos": True}
        for i in range(150)
    ]
    alone = {i: texts(tiny, bodies[i]) for i in range(7)}
    before = tiny.metrics()
    open_files = len(list(Path(f"/proc/{tiny.process.pid}/fd").iterdir()))
    finished: dict[int, str] = {}
    problems: list[str] = []

    def one(i: int) -> None:
        if i % 10 == 0:
            finished[i] = texts(tiny, bodies[i])
            return
        way = rng.choice(["at once", "one chunk", "some", "one byte before the end", "half", "reset"])
        sock = tiny.send_raw("/v1/completions", bodies[i])
        try:
            if way == "at once":
                return
            data = read_until(sock, b"data: ")
            if way == "one chunk":
                return
            if way == "half":
                return sock.shutdown(socket.SHUT_WR)
            if way == "reset":
                return reset(sock)
            wanted = rng.randrange(500, 3000) if way == "some" else 10**9
            while len(data) < wanted and b"[DONE]\n" not in data:
                data += sock.recv(1 if b"[DON" in data[-60:] else 256)
        except OSError as error:
            problems.append(f"{way}: {error}")
        finally:
            sock.close()

    slots = threading.Semaphore(16)

    def limited(i: int) -> None:
        with slots:
            one(i)

    threads = [threading.Thread(target=limited, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert all(text == alone[i % 7] for i, text in finished.items()), "cross-talk"
    assert eventually(tiny.idle, 3)
    after = tiny.metrics()
    ended = sum(
        after[f'vllm:request_success_total{{finished_reason="{why}"}}']
        - before[f'vllm:request_success_total{{finished_reason="{why}"}}']
        for why in ("stop", "length", "abort", "error")
    )
    assert ended == len(bodies)  # each once
    assert (
        after['vllm:request_success_total{finished_reason="error"}']
        == before['vllm:request_success_total{finished_reason="error"}']
    )
    assert eventually(lambda: len(list(Path(f"/proc/{tiny.process.pid}/fd").iterdir())) <= open_files + 2)
    assert "Traceback" not in tiny.log


def texts(server, body) -> str:
    """On a connection of its own, closed at once."""
    sock = server.send_raw("/v1/completions", body)
    raw = read_until(sock, b"0\r\n\r\n")
    sock.close()
    return "".join(event["choices"][0]["text"] for event in events_of(unchunk(raw)))
