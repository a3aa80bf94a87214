"""A real `tokenmill serve` in a subprocess, and the ways tests talk to it: SDK, plain HTTP, raw sockets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = ("--engine-factory", "tests.api.engine_double:load")


class Server:
    """Starts on a free port; ready when the constructor returns. Options as on the command line."""

    def __init__(self, model: Path | str, *options: str, env: dict[str, str] | None = None, key: str | None = None):
        # PYTHONPATH: the engine double is found by its name.
        environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | (env or {})
        command = [sys.executable, "-m", "tokenmill.cli.main", "serve", str(model), "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
        )
        self.lines: list[str] = []
        self.key = key
        for line in self.process.stdout:  # type: ignore[union-attr]
            self.lines.append(line)
            if found := re.search(r"(.+) is ready on http://127\.0\.0\.1:(\d+)", line):
                self.names, self.port = found[1].split(", "), int(found[2])
                break
        else:
            raise AssertionError("".join(self.lines))
        self.model = self.names[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._drainer.start()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, timeout=60)

    def _drain(self) -> None:
        for line in self.process.stdout:  # type: ignore[union-attr]
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=60)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.http.close()
        self.openai.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    # ---- requests

    def complete(self, prompt: Any = "X", **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return strict_json(answer.content)

    def chat(self, content: Any = "x", **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})
        assert answer.status_code == 200, answer.text
        return strict_json(answer.content)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json={"model": self.model, **body})

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Every event of a stream that ends as it should."""
        with self.http.stream("POST", path, json={"model": self.model, "stream": True, **body}) as answer:
            raw = answer.read().decode()
        assert answer.status_code == 200, raw
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(raw)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send_raw(self, path: str, body: dict[str, Any] | bytes, sock: socket.socket | None = None) -> socket.socket:
        """POST by hand; the socket, nothing read yet."""
        sock = sock or self.connect()
        data = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            .encode() + data
        )  # fmt: skip
        return sock

    # ---- what it says of itself

    def metrics(self) -> dict[str, float]:
        """Sample name (with labels other than model_name) -> value."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = re.sub(r'model_name="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")
                found[name] = float(value)
        return found

    def idle(self) -> bool:
        now = self.metrics()
        return not any(
            now[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )

    def healthy(self) -> bool:
        return self.http.get("/health").status_code == 200

    def engine_pid(self) -> int:
        """The engine process: the server's only child."""
        pids = children(self.process.pid)
        assert len(pids) == 1, pids
        return pids[0]


@contextlib.contextmanager
def serving(model: Path | str, *options: str, **kwargs: Any) -> Iterator[Server]:
    server = Server(model, *options, **kwargs)
    try:
        yield server
    finally:
        server.stop()


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def eventually(condition: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def events_of(raw: str) -> list[dict[str, Any]]:
    """The JSON of each `data:` line; the last must be [DONE], once."""
    assert raw.endswith("data: [DONE]\n\n"), raw[-300:]
    lines = [line for line in raw.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert [line for line in lines if line == "data: [DONE]"] == [lines[-1]]
    return [strict_json(line[6:]) for line in lines[:-1]]


def unchunk(raw: bytes) -> str:
    """The body of a chunked answer."""
    body = raw.partition(b"\r\n\r\n")[2]
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        out += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return out.decode()


def refuse_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def strict_json(raw: str | bytes) -> Any:
    """JSON without NaN and Infinity, in valid UTF-8."""
    return json.loads(raw if isinstance(raw, str) else raw.decode("utf-8"), parse_constant=refuse_constant)


def read_until(sock: socket.socket, mark: bytes, seconds: float = 20.0) -> bytes:
    """What comes up to and with `mark`."""
    sock.settimeout(seconds)
    data = b""
    while mark not in data:
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    return data


def read_all(sock: socket.socket, seconds: float = 20.0) -> bytes:
    """Until the server closes."""
    sock.settimeout(seconds)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            data += piece
    return data


def error_of(answer: httpx.Response | bytes) -> dict[str, Any]:
    """The error object, which has OpenAI's four fields and no more."""
    if isinstance(answer, bytes):
        raw = answer.partition(b"\r\n\r\n")[2]
    else:
        raw = answer.content
        assert answer.headers["content-type"] == "application/json"
    error = strict_json(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"] and "/site-packages" not in error["message"]
    return error
