"""Starting, dying, restarting, draining: clear words, and nothing left behind (BC-080, BC-081 and issue point 8)."""

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.api.conftest import QUICK, TEXT, ids_of
from tests.api.server import (
    DOUBLE,
    ROOT,
    Server,
    alive,
    children,
    error_of,
    eventually,
    read_all,
    read_until,
    serving,
)
from tests.support.checkpoints import rigged_gguf

ENDLESS = {"prompt": [93], "max_tokens": 60}  # the slow prompt of the double: 3 s


def start(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, float]:
    """Exit code, output and seconds of a start that fails."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | (env or {})
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill.cli.main", "serve", *arguments],
        capture_output=True, text=True, timeout=60, env=environ,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def fails(*arguments: str, env: dict[str, str] | None = None) -> str:
    """The one line of a start that fails."""
    code, output, seconds = start(*arguments, env=env)
    lines = [line for line in output.splitlines() if line]
    assert code == 1 and len(lines) == 1, output
    assert "Traceback" not in output
    assert seconds < 10
    return lines[0]


@contextlib.contextmanager
def listener(host: str = "127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        sock.listen()
        yield sock.getsockname()[1]


class TestStartThatFails:
    def test_port_in_use(self, rigged_path):
        with listener() as port:
            line = fails(str(rigged_path), "--port", str(port))
        assert f"port {port} on 127.0.0.1 is in use" in line

    def test_port_in_use_is_found_before_the_model_is_looked_for(self):
        with listener() as port:
            assert "is in use" in fails("no-such-model", "--port", str(port))

    def test_two_servers_cannot_share_a_port(self, rigged, rigged_path):
        assert f"port {rigged.port}" in fails(str(rigged_path), "--port", str(rigged.port))
        assert rigged.healthy()

    def test_ipv6_and_ipv4_of_one_port_are_two(self, rigged_path):
        with listener("::1") as port:
            with serving(rigged_path, *QUICK, *DOUBLE, "--port", str(port)) as server:
                assert server.port == port
            assert "is in use" in fails(str(rigged_path), "--port", str(port), "--host", "::1")

    @pytest.mark.parametrize("port", ["70000", "-1"])
    def test_no_such_port(self, rigged_path, port):
        assert f"port is {port}" in fails(str(rigged_path), "--port", port)

    def test_no_such_host(self, rigged_path):
        assert "no.such.host.invalid" in fails(str(rigged_path), "--host", "no.such.host.invalid")

    def test_missing_model(self):
        assert "/no/such/file.gguf" in fails("/no/such/file.gguf", "--port", "0")

    @pytest.mark.parametrize("content", [b"", b"GGUF", b"<!doctype html><title>404</title>" * 50])
    def test_bad_file(self, tmp_path, content):
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        assert "bad.gguf" in fails(str(path), "--port", "0")

    def test_cut_file(self, tmp_path, rigged_path):
        path = tmp_path / "cut.gguf"
        path.write_bytes(rigged_path.read_bytes()[:-1])
        fails(str(path), "--port", "0")

    @pytest.mark.parametrize(
        ("options", "env", "word"),
        [
            (["--max-model-len", "100000"], {}, "max_model_len is 100000"),
            (["--kv-cache-bytes", "5"], {}, "kv_cache_bytes is 5"),
            (["--max-num-seqs", "0"], {}, "max_num_seqs is 0"),
            (["--max-n", "0"], {}, "max_n is 0"),
            (["--header-seconds", "0"], {}, "header_seconds is 0"),
            (["--drain-seconds", "-1"], {}, "drain_seconds is -1"),
            (["--chat-template", "/no/such/template"], {}, "/no/such/template"),
            ([], {"TOKENMILL_MAX_NUM_SEQS": "many"}, "TOKENMILL_MAX_NUM_SEQS is 'many'"),
            ([], {"TOKENMILL_PORT": "70000"}, "port is 70000"),
        ],
    )
    def test_bad_setting(self, rigged_path, options, env, word):
        port = [] if "TOKENMILL_PORT" in env else ["--port", "0"]
        assert word in fails(str(rigged_path), *port, *options, env=env)

    def test_an_engine_that_dies_while_loading(self, tmp_path, rigged_path):
        model = tmp_path / "m.gguf"
        model.symlink_to(rigged_path)
        (tmp_path / "dies").touch()
        assert "the engine process ended with code 3" in fails(str(model), "--port", "0", *DOUBLE)

    def test_nothing_is_left_behind(self, tmp_path, rigged_path):
        """No process, no socket file, no temporary folder."""
        model = tmp_path / "m.gguf"
        model.symlink_to(rigged_path)
        (tmp_path / "fails").write_text("this does not fit")
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        assert "this does not fit" in fails(str(model), "--port", "0", *DOUBLE, env={"TMPDIR": str(temporary)})
        assert not list(temporary.iterdir())
        assert not [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if uses(p, model)]


def uses(pid: int, model: Path) -> bool:
    with contextlib.suppress(OSError):
        return str(model).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class TestEngineKilled:
    def test_requests_get_errors_health_turns_red_and_green_again(self, rigged_path, tmp_path):
        model = tmp_path / "m.gguf"
        model.symlink_to(rigged_path)
        with serving(model, *DOUBLE, *QUICK) as server:
            streamed = server.send_raw("/v1/completions", ENDLESS | {"stream": True})
            read_until(streamed, b"data: ")
            whole = server.send_raw("/v1/completions", ENDLESS)
            assert eventually(lambda: server.metrics()["vllm:num_requests_running"] == 2)
            os.kill(server.engine_pid(), signal.SIGKILL)
            # the stream: one line with the error, no [DONE], and its end
            rest = read_until(streamed, b"0\r\n\r\n").decode()
            assert rest.count('data: {"error":{') == 1 and '"code":"engine_unavailable"' in rest
            assert "[DONE]" not in rest
            # the whole one: a plain 503
            raw = read_until(whole, b"}}")
            assert raw.startswith(b"HTTP/1.1 503") and b"retry-after" in raw
            error = error_of(raw)
            assert (error["type"], error["code"]) == ("service_unavailable_error", "engine_unavailable")
            assert "SIGKILL" in error["message"]
            health = server.http.get("/health")
            assert health.status_code == 503
            error_of(health)
            assert server.post("/v1/completions", {"prompt": [1]}).status_code == 503
            assert eventually(server.healthy)
            assert server.complete([1], max_tokens=3)["usage"]["completion_tokens"] == 3
            assert server.idle()

    def test_the_real_engine_too(self, rigged_path):
        with serving(rigged_path, *QUICK) as server:
            for _ in range(2):
                os.kill(server.engine_pid(), signal.SIGKILL)
                assert eventually(lambda: not server.healthy(), 2)
                assert eventually(server.healthy, 20)
                assert server.chat("x")["choices"][0]["message"]["content"] == TEXT

    def test_it_does_not_come_back_with_another_model(self, rigged_path, tmp_path):
        """Under this server's tokenizer and name another model's answers would be wrong, and no one would see why."""
        model = tmp_path / "model.gguf"
        other = rigged_gguf(tmp_path / "other.gguf", list(reversed(ids_of(TEXT))), context_length=256)
        shutil.copy(rigged_path, model)
        with serving(model, *QUICK) as server:
            assert server.chat("x")["choices"][0]["message"]["content"] == TEXT
            os.replace(other, model)
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert eventually(lambda: "the model's files are not those" in server.http.get("/health").text, 20)
            answer = server.post("/v1/completions", {"model": "model", "prompt": "X"})
            assert answer.status_code == 503 and "the model's files are not those" in error_of(answer)["message"]
            shutil.copy(rigged_path, model)
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert eventually(server.healthy, 20)
            assert server.chat("x")["choices"][0]["message"]["content"] == TEXT


class TestServerKilled:
    @pytest.mark.parametrize("busy", [False, True])
    def test_the_engine_goes_too_and_the_port_is_free_at_once(self, rigged_path, busy):
        server = Server(rigged_path, *QUICK)
        engine = server.engine_pid()
        if busy:
            server.send_raw("/v1/completions", {"prompt": "X", "max_tokens": 200, "ignore_eos": True, "n": 50})
        server.process.kill()
        server.process.wait()
        assert eventually(lambda: not alive(engine), 5)
        with serving(rigged_path, *QUICK, "--port", str(server.port)) as again:
            assert again.port == server.port and again.healthy()

    def test_restart_at_once_after_connections_were_open(self, rigged_path):
        """TIME_WAIT does not hold the port."""
        with serving(rigged_path, *DOUBLE, *QUICK) as server:
            port = server.port
            sock = server.connect()
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(10)
            sock.close()
        with serving(rigged_path, *DOUBLE, *QUICK, "--port", str(port)) as again:
            assert again.healthy()


class TestStop:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_idle_it_ends_at_once_with_0(self, rigged_path, number):
        server = Server(rigged_path, *DOUBLE, *QUICK)
        engine = server.engine_pid()
        server.process.send_signal(number)
        started = time.monotonic()
        assert server.process.wait(10) == 0
        assert time.monotonic() - started < 3
        assert not alive(engine)

    def test_it_finishes_what_it_took_and_takes_nothing_new(self, rigged_path):
        server = Server(rigged_path, *DOUBLE, "--drain-seconds", "20")
        kept = server.connect()
        kept.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(kept, b"}")
        stream = server.send_raw("/v1/completions", ENDLESS | {"stream": True, "max_tokens": 40})
        whole = server.send_raw("/v1/completions", ENDLESS | {"max_tokens": 40})
        read_until(stream, b"data: ")
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(OSError):
            server.connect()
        assert b"[DONE]" in read_all(stream)
        assert b'"completion_tokens":40' in read_all(whole)
        assert read_all(kept) == b""
        assert server.process.wait(10) == 0

    def test_when_the_time_is_over_requests_hear_why(self, rigged_path):
        server = Server(rigged_path, *DOUBLE, "--drain-seconds", "0.5")
        stream = server.send_raw("/v1/completions", ENDLESS | {"stream": True})
        read_until(stream, b"data: ")
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        raw = read_all(stream)
        assert b"engine_unavailable" in raw and b"shut down" in raw
        assert server.process.wait(10) == 0
        assert time.monotonic() - started < 3

    def test_a_second_signal_ends_it_at_once(self, rigged_path):
        server = Server(rigged_path, *DOUBLE, "--drain-seconds", "30")
        engine = server.engine_pid()
        stream = server.send_raw("/v1/completions", ENDLESS | {"stream": True})
        read_until(stream, b"data: ")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2) == 128 + signal.SIGTERM
        assert eventually(lambda: not alive(engine), 2)

    def test_while_it_loads(self, rigged_path):
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tokenmill.cli.main", "serve", str(rigged_path), "--port", "0"]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert eventually(lambda: children(process.pid), 10)
        engine = children(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        assert eventually(lambda: not any(map(alive, engine)), 5)
        process.stdout.close()


def test_it_writes_no_file(rigged_path):
    """A full disk cannot hurt it: the limit on file sizes is zero, and its temporary folder cannot be written."""

    def no_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": "/proc", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/proc"}
    with listener() as port:
        pass
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", str(rigged_path), "--port", str(port)]
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=no_files
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))
    reader.start()
    try:
        assert eventually(lambda: any("is ready on" in line for line in lines), 20), lines
        import httpx

        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions", json={"model": "rigged", "prompt": "X", "max_tokens": 2}
        )
        assert answer.json()["choices"][0]["text"] == "ab"
    finally:
        process.terminate()
        assert process.wait(10) == 0
        reader.join()
        process.stdout.close()


def test_more_connections_than_allowed_are_closed_at_once(rigged_path):
    with serving(rigged_path, *DOUBLE, *QUICK, "--max-connections", "5") as server:
        held = [server.connect() for _ in range(5)]
        assert eventually(lambda: read_all(server.connect(), 5) == b"")
        for sock in held:
            sock.close()
        assert eventually(lambda: b"200 OK" in fetch(server, b"/health"))


def fetch(server: Server, path: bytes) -> bytes:
    sock = server.connect()
    sock.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return read_all(sock)


def test_names(rigged_path):
    with serving(rigged_path, *DOUBLE, "--served-model-name", "one", "--served-model-name", "two") as server:
        assert server.names == ["one", "two"]
        assert [model.id for model in server.openai.models.list().data] == ["one", "two"]
        for name in ("one", "two"):
            answer = server.post("/v1/completions", {"prompt": [1], "model": name})
            assert answer.json()["model"] == name
        assert server.post("/v1/completions", {"prompt": [1], "model": "rigged"}).status_code == 404


def test_a_template_of_the_servers_own(rigged_path, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{% endfor %}")
    with serving(rigged_path, *DOUBLE, "--chat-template", str(template), "--trust-request-chat-template") as server:
        tokens = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
        assert server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "[user]"
        messages = [{"role": "user", "content": "A"}]
        mine = {"messages": messages, "chat_template": "{{ messages[0].content }}{{ more }}",
                "chat_template_kwargs": {"more": "yz"}, "return_token_ids": True, "max_tokens": 1}  # fmt: skip
        answer = server.post("/v1/chat/completions", mine)
        assert answer.status_code == 200, answer.text
        ids = answer.json()["prompt_token_ids"]
        assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "Ayz"
        for hostile in ("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
                        "{{ 'A' * 10**9 }}", "{{ ''.__class__.__mro__ }}", "{% include 'x' %}", "{% bad"):  # fmt: skip
            answer = server.post("/v1/chat/completions", {"messages": messages, "chat_template": hostile})
            assert answer.status_code == 400, hostile
        assert server.healthy()


def test_default_names():
    from tokenmill.server.run import default_name

    assert default_name("smollm2-135m-instruct") == "smollm2-135m-instruct"
    assert default_name("/models/Qwen3-0.6B-Q8_0.gguf") == "Qwen3-0.6B-Q8_0"
    assert default_name("/models/qwen3/") == "qwen3"
    assert default_name("hf:org/name:q4_k_m") == "org/name"
    assert default_name("pypi:package==1.0#folder/model.gguf") == "model"
    assert default_name("pypi:package==1.0") == "package==1.0"
