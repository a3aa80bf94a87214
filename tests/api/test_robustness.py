"""Slow, huge and endless clients are cut off while others are served; overload is answered (BC-069, BC-070)."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.api.server import error_of, eventually, read_all, read_until


def rss(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def quick_request(server) -> float:
    """Seconds a normal request takes."""
    started = time.monotonic()
    assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 2}).status_code == 200
    return time.monotonic() - started


class TestSlow:
    def test_idle_sockets_are_closed(self, double):
        sock = double.connect()
        started = time.monotonic()
        assert read_all(sock) == b""
        assert 1.5 < time.monotonic() - started < 4

    def test_slow_headers_are_a_408(self, double):
        sock = double.connect()
        for byte in b"GET":
            sock.sendall(bytes([byte]))
            time.sleep(0.2)
        raw = read_all(sock)
        assert raw.startswith(b"HTTP/1.1 408")
        assert error_of(raw)["code"] == "request_timeout"

    def test_a_body_that_never_comes_is_a_408(self, double):
        sock = double.connect()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        raw = read_all(sock)
        assert raw.startswith(b"HTTP/1.1 408") and error_of(raw)["code"] == "request_timeout"

    def test_a_chunked_body_without_end_is_a_408(self, double):
        sock = double.connect()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(12):
                sock.sendall(b"1\r\n \r\n")
                time.sleep(0.25)
        assert read_all(sock).startswith(b"HTTP/1.1 408")

    def test_three_hundred_slow_sockets_do_not_slow_the_others(self, double):
        before = rss(double.process.pid)
        sockets = [double.connect() for _ in range(300)]
        for sock in sockets:
            sock.sendall(b"P")
        assert max(quick_request(double) for _ in range(5)) < 5
        assert rss(double.process.pid) - before < 50 << 20
        time.sleep(2.5)
        for sock in sockets:
            sock.close()

    @pytest.mark.parametrize("reads", ["nothing", "a little"])
    def test_a_reader_that_does_not_read_is_cut_without_stalling_others(self, endless, reads):
        before = endless.metrics()['vllm:request_success_total{finished_reason="abort"}']
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", endless.port))
        endless.send_raw("/v1/completions", {"prompt": "X", "max_tokens": 90_000, "stream": True}, sock)
        assert eventually(lambda: endless.metrics()["vllm:num_requests_running"] == 1)
        memory = rss(endless.process.pid)
        deadline = time.monotonic() + 20
        while not endless.idle() and time.monotonic() < deadline:
            started = time.monotonic()
            assert endless.healthy()
            assert time.monotonic() - started < 5
            with contextlib.suppress(OSError):
                if reads == "a little":
                    sock.recv(1)
            time.sleep(0.2)
        assert endless.idle()
        assert endless.metrics()['vllm:request_success_total{finished_reason="abort"}'] == before + 1
        assert rss(endless.process.pid) - memory < 30 << 20
        sock.close()


class TestHuge:
    @pytest.mark.parametrize("promised", [200_001, 10**12])
    def test_a_promised_body_past_the_limit_is_refused_unread(self, double, promised):
        sock = double.connect()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % promised)
        raw = read_until(sock, b"}}")
        assert raw.startswith(b"HTTP/1.1 413") and error_of(raw)["code"] == "request_too_large"
        started = time.monotonic()
        read_all(sock)
        assert time.monotonic() - started < 5

    def test_a_chunked_body_past_the_limit(self, double):
        sock = double.connect()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(30):
                sock.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 413")

    def test_two_hundred_megabytes(self, double):
        before = rss(double.process.pid)
        sock = double.connect()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200000000\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(200):
                sock.sendall(b" " * 1_000_000)
        sock.close()
        assert rss(double.process.pid) - before < 30 << 20
        assert quick_request(double) < 1

    def test_a_client_that_sends_it_all_still_sees_the_answer(self, double):
        answer = double.http.post(
            "/v1/completions", content=b" " * 1_000_000, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413 and error_of(answer)["code"] == "request_too_large"

    def test_many_large_bodies_at_once_are_bounded_in_sum(self, double):
        """32 full-sized ones may be read together."""
        sockets = [double.connect() for _ in range(40)]
        with contextlib.suppress(OSError):
            for sock in sockets:
                sock.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 199999\r\n\r\n" + b" " * 190_000
                )
        answers = [read_all(sock) for sock in sockets]
        statuses = {int(raw.split(b" ")[1]) for raw in answers if raw}
        assert statuses == {408, 429}
        assert quick_request(double) < 1

    @pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"GET /", b"GET / HTTP/1.1\r\n"])
    def test_headers_without_end_are_a_431(self, double, head):
        before = rss(double.process.pid)
        sock = double.connect()
        sock.sendall(head)
        filler = b"a: b\r\n" * 10_000 if head.endswith(b"\n") else b"a" * 60_000
        with contextlib.suppress(OSError):
            for _ in range(1000):  # 60 MB
                sock.sendall(filler)
        assert read_all(sock).startswith((b"HTTP/1.1 431", b"HTTP/1.1 400", b""))
        sock.close()
        assert rss(double.process.pid) - before < 20 << 20
        assert quick_request(double) < 1

    def test_headers_just_past_the_cap_are_told(self, double):
        sock = double.connect()
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000)
        raw = read_all(sock)
        assert raw.startswith(b"HTTP/1.1 431") and error_of(raw)

    def test_headers_under_the_cap_with_a_body_in_the_same_write(self, rigged):
        body = json.dumps({"model": "rigged", "prompt": "X" * 3, "user": "u" * 150_000, "max_tokens": 1}).encode()
        sock = rigged.send_raw("/v1/completions", body)
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 200")

    def test_an_unwanted_body_does_not_become_the_next_request(self, double):
        """A refusal before the body was read, on a connection that is kept."""
        sock = double.connect()
        body = b"GET /v1/models HTTP/1.1\r\n\r\n" * 1000
        sock.sendall(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 404")
        sock.sendall(body)
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        raw = read_until(sock, b"}")
        assert raw.startswith(b"HTTP/1.1 200") and b"version" in raw and b"max_model_len" not in raw


class TestOverload:
    def test_beyond_the_queue_it_is_429_at_once_and_recovers(self, endless):
        """One runs, two wait, the others hear so."""
        sockets = [endless.send_raw("/v1/completions", {"prompt": "X", "max_tokens": 50_000}) for _ in range(3)]
        assert eventually(lambda: endless.metrics()["vllm:num_requests_waiting"] == 2)
        for stream in (False, True):
            started = time.monotonic()
            answer = endless.post("/v1/completions", {"prompt": "X", "stream": stream})
            assert time.monotonic() - started < 0.5
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            error = error_of(answer)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        for sock in sockets:
            sock.close()
        assert eventually(endless.idle, 2)
        assert endless.complete("X", max_tokens=2)["choices"][0]["text"] == "ab"

    def test_the_queue_counts_sequences(self, endless):
        assert endless.post("/v1/completions", {"prompt": "X", "n": 3, "max_tokens": 1}).status_code == 200
        answer = endless.post("/v1/completions", {"prompt": ["X", "Y"], "n": 2, "max_tokens": 1})
        assert answer.status_code == 400 and error_of(answer)["param"] == "n"  # it never fits

    def test_three_hundred_at_once(self, endless):
        """Each gets an answer, and those accepted the right one."""
        results: list[tuple[int, float]] = []

        def one() -> None:
            started = time.monotonic()
            sock = endless.send_raw("/v1/completions", {"prompt": "X", "max_tokens": 5})
            raw = read_until(sock, b"}")
            status = int(raw.split(b" ")[1])
            assert status == 429 or (status == 200 and b'"text":"abcde"' in raw), raw
            results.append((status, time.monotonic() - started))
            sock.close()

        threads = [threading.Thread(target=one) for _ in range(300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 300 and {status for status, _ in results} == {200, 429}
        assert eventually(endless.idle, 2)
        rejected = endless.metrics()["vllm:request_rejected_total"]
        assert rejected >= sum(status == 429 for status, _ in results)
