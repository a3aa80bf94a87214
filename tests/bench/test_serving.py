"""The load generator end to end against a small server that speaks OpenAI's API, and the command around it."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
import uvicorn
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tokenmill.bench.client import Client, Target, run_workload
from tokenmill.bench.serving import ServingOptions, run_serving
from tokenmill.bench.workloads import make_workload
from tokenmill.cli.main import main
from tokenmill.errors import ConfigError, SetupError


class FakeServer:
    """Answers every chat with max_tokens chunks, 1 ms apart, and remembers what was asked, in order."""

    def __init__(self):
        self.asked: list[dict] = []
        self.live = self.most_live = 0
        self.fail_from: int | None = None
        self.gap = 0.001

    async def models(self, request):
        return JSONResponse({"data": [{"id": "fake-model"}]})

    async def chat(self, request):
        body = await request.json()
        self.asked.append(body)
        if self.fail_from is not None and len(self.asked) > self.fail_from:
            return JSONResponse({"error": {"message": "no more"}}, status_code=503)

        async def events():
            self.live += 1
            self.most_live = max(self.most_live, self.live)
            yield 'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
            for i in range(body["max_tokens"]):
                await asyncio.sleep(self.gap)
                yield f"data: {json.dumps({'choices': [{'delta': {'content': f'w{i} '}}]})}\n\n"
            usage = {
                "prompt_tokens": 11,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 5},
            }
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
            self.live -= 1

        return StreamingResponse(events(), media_type="text/event-stream")


@contextlib.contextmanager
def serve(fake: FakeServer):
    app = Starlette(
        routes=[Route("/v1/models", fake.models), Route("/v1/chat/completions", fake.chat, methods=["POST"])]
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def fake():
    return FakeServer()


@pytest.fixture
def url(fake):
    with serve(fake) as address:
        yield address


def drive(url, workload, **kwargs):
    async def go():
        async with Client(Target.parse(url), **kwargs) as client:
            return await run_workload(client, workload)

    return asyncio.run(go())


def test_a_sample_holds_what_the_client_saw(url, fake):
    samples, wall = drive(url, make_workload("chat", 1, count=3, concurrency=1))
    for sample, body in zip(samples, fake.asked):
        assert sample.error is None
        assert sample.output_tokens == body["max_tokens"] == len(sample.token_times)
        assert sample.text.startswith("w0 w1 ") and sample.prompt_tokens == 11 and sample.cached_tokens == 5
        assert 0.001 <= sample.ttft < 1 and all(gap >= 0 for gap in sample.gaps)
    assert wall >= sum(s.finished - s.sent for s in samples) * 0.99
    assert body["model"] == "fake-model" and body["ignore_eos"] is True and body["temperature"] == 0


def test_concurrency_is_kept(url, fake):
    drive(url, make_workload("chat", 1, count=12, concurrency=4))
    assert fake.most_live == 4


def test_conversations_send_the_answers_back(url, fake):
    samples, _ = drive(url, make_workload("agent", 1, count=1))
    assert [len(body["messages"]) for body in fake.asked] == [2 + 2 * i for i in range(10)]
    assert fake.asked[1]["messages"][2] == {"role": "assistant", "content": samples[0].text}
    assert [s.turn for s in samples] == list(range(10))


def test_a_failing_server_is_a_result_not_a_crash(url, fake):
    fake.fail_from = 1
    samples, _ = drive(url, make_workload("chat", 1, count=3, concurrency=1))
    assert [s.error is None for s in samples] == [True, False, False]
    assert samples[1].error.startswith("HTTP 503: ")


def test_targets_are_interleaved_with_equal_requests(url, fake):
    other = FakeServer()
    order = []
    with serve(other) as other_url:
        result = run_serving(
            ServingOptions(
                targets=[Target("ours", url), Target("theirs", other_url)], workloads=["chat"], repeat=2, count=2
            ),
            progress=order.append,
        )
    assert [text.rsplit(" ", 1)[1] for text in order] == ["ours", "theirs", "theirs", "ours"]
    strip = lambda bodies: [b["messages"] for b in bodies]  # noqa: E731
    assert sorted(map(str, strip(fake.asked))) == sorted(map(str, strip(other.asked)))
    assert [(row["target"], row["rounds"], row["errors"]) for row in result["medians"]] == [
        ("ours", 2, 0),
        ("theirs", 2, 0),
    ]


def test_the_command_writes_json_a_table_and_a_plot(url, tmp_path):
    done = CliRunner().invoke(
        main,
        f"bench serving ours={url} --requests 4 --repeat 1 --slo-ttft 5000 --slo-itl 1000 --price-per-hour 2 "
        f"--output-dir {tmp_path}",
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert "goodput req/s" in done.output and "cost/M out" in done.output
    (path,) = tmp_path.glob("serving-*.json")
    result = json.loads(path.read_text())
    (row,) = result["medians"]
    assert row["requests"] == 4 and row["goodput_share"] == 1.0 and row["cost_per_million_output_tokens"] > 0
    assert result["machine"]["cores"] >= 1
    assert path.with_suffix(".png").stat().st_size > 1000


def test_the_command_shows_what_went_wrong(url, fake, tmp_path):
    fake.fail_from = 2  # the warm-up passes
    done = CliRunner().invoke(main, f"bench serving ours={url} --requests 2 --repeat 1 --output-dir {tmp_path}")
    assert done.exit_code == 0 and 'chat, ours: HTTP 503: {"error":{"message":"no more"}}' in done.stderr


def test_no_server_there_is_one_line(tmp_path):
    done = CliRunner().invoke(main, ["bench", "serving", "http://127.0.0.1:9", "--output-dir", str(tmp_path)])
    assert done.exit_code == 1 and "Error: server: no model list from http://127.0.0.1:9/v1/models" in done.output
    assert not list(tmp_path.iterdir())


def test_targets():
    assert Target.parse("a=http://h:1/v1") == Target("a", "http://h:1/v1")
    assert Target.parse("https://h/").url == "https://h/v1"
    assert Target.parse("http://h/v1?x=1").name == "server"
    with pytest.raises(ConfigError):
        Target.parse("a=h:1")


def test_unknown_workloads_are_refused_before_anything_runs():
    with pytest.raises(ConfigError):
        run_serving(ServingOptions(targets=[Target("x", "http://127.0.0.1:9/v1")], workloads=["chat", "poems"]))
    with pytest.raises(SetupError):
        run_serving(ServingOptions(targets=[Target("x", "http://127.0.0.1:9/v1")], workloads=["chat"]))
