"""The engine process by itself: it answers, refuses, dies and comes back, and is never left behind."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.api.engine_double import EXITS, RAISES, REFUSED, SLOW
from tokenmill.config import EngineConfig
from tokenmill.core import FinishReason, SamplingParams
from tokenmill.engine.channel import Channel
from tokenmill.engine.messages import (
    AbortRequest,
    AddRequest,
    Drain,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    OutputBatch,
    ToEngine,
    TokenDelta,
)
from tokenmill.engine.supervisor import EngineChannel, EngineGone, Supervisor

ROOT = Path(__file__).resolve().parents[2]
FACTORY = "tests.api.engine_double:load"


class Listener:
    """A supervised double and what it said."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.events: queue.Queue = queue.Queue()
        self.stats: EngineStats | None = None  # the newest
        self.supervisor = Supervisor(EngineConfig(model=str(folder)), self.hear, factory=FACTORY)
        self.supervisor.start()

    def hear(self, event) -> None:
        if isinstance(event, EngineChannel):  # on the supervisor's thread, which waits for the end elsewhere
            threading.Thread(target=self.read, args=(event,), daemon=True).start()
        else:
            self.events.put(event)

    def read(self, engine: EngineChannel) -> None:
        failure = None
        try:
            while True:
                for message in engine.channel.receive(wait=True):
                    if isinstance(message, EngineFailed):
                        failure = message.message
                    else:
                        self.events.put(message)
        except EOFError:
            engine.ended(failure)

    def wait_for(self, kind: type, seconds: float = 20.0):
        deadline = time.monotonic() + seconds
        while True:
            event = self.events.get(timeout=deadline - time.monotonic())
            self.stats = getattr(event, "stats", None) or self.stats
            if isinstance(event, kind):
                return event

    def deltas_until(self, request_id: str) -> list[TokenDelta]:
        """Of one request, up to its end."""
        found: list[TokenDelta] = []
        while not (found and found[-1].finish_reason):
            found += [d for d in self.wait_for(OutputBatch).deltas if d.request_id == request_id]
        return found

    def add(self, request_id: str, first: int = 1, max_tokens: int = 3, n: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, n=n)
        self.supervisor.send(AddRequest(request_id=request_id, prompt_token_ids=[first, 2], params=params))


@pytest.fixture(autouse=True)
def find_the_double(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def double(tmp_path):
    listener = Listener(tmp_path)
    yield listener
    listener.supervisor.stop()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] != "Z"


def wait_gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_a_request_goes_in_and_its_tokens_come_back(double):
    assert double.wait_for(EngineReady).vocab_size == 1000
    double.add("a")
    deltas = double.deltas_until("a")
    assert [d.token_ids for d in deltas] == [[100], [101], [102]]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_stats_say_that_idleness_began(double):
    double.wait_for(EngineReady)
    double.add("a", max_tokens=50)
    double.deltas_until("a")
    while double.stats.num_running:
        double.wait_for(OutputBatch)
    assert double.stats.generation_tokens == 50


def test_a_request_the_engine_refuses_ends_with_its_error_for_every_choice(double):
    double.wait_for(EngineReady)
    double.add("bad", first=REFUSED, n=2)
    deltas = []
    while len(deltas) < 2:
        deltas += double.wait_for(OutputBatch).deltas
    assert [(d.index, d.finish_reason, d.error) for d in deltas] == [
        (i, FinishReason.ERROR, "the double does not like this") for i in range(2)
    ]
    double.add("good")
    assert len(double.deltas_until("good")) == 3


def test_abort_takes_effect_within_a_step(double):
    double.wait_for(EngineReady)
    double.add("slow", first=SLOW, max_tokens=1000)
    double.wait_for(OutputBatch)
    double.supervisor.send(AbortRequest("slow"))
    double.stats = None
    while double.stats is None or double.stats.num_running:
        double.wait_for(OutputBatch, 2.0)


@pytest.mark.parametrize(
    ("first", "message"),
    [(RAISES, "the engine failed: RuntimeError"), (EXITS, "the engine process ended with code 5")],
)
def test_an_engine_that_dies_is_started_again(double, first, message):
    double.wait_for(EngineReady)
    double.add("fatal", first=first)
    gone = double.wait_for(EngineGone)
    assert gone.message == message
    assert 0 < gone.restart_in < 1
    double.wait_for(EngineReady)
    double.add("after")
    assert len(double.deltas_until("after")) == 3


def test_a_killed_engine_is_started_again_each_time_after_a_longer_pause(double):
    pauses = []
    for _ in range(3):
        double.wait_for(EngineReady)
        os.kill(double.supervisor.pid, signal.SIGKILL)
        gone = double.wait_for(EngineGone)
        assert gone.message == "the engine process was killed by SIGKILL"
        pauses.append(gone.restart_in)
    assert pauses == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(("file", "message"), [("fails", "the page size is 7"), ("dies", "ended with code 3")])
def test_an_engine_that_was_never_ready_is_not_started_again(tmp_path, file, message):
    (tmp_path / file).write_text("the page\nsize is 7")
    listener = Listener(tmp_path)
    gone = listener.wait_for(EngineGone)
    assert message in gone.message and gone.restart_in is None
    listener.supervisor.stop()
    assert listener.events.empty()


def test_stop_leaves_no_process(double):
    double.wait_for(EngineReady)
    pid = double.supervisor.pid
    double.supervisor.stop()
    assert not alive(pid)


def test_stop_while_it_is_loading(tmp_path):
    listener = Listener(tmp_path)
    listener.supervisor.stop()
    assert listener.supervisor.pid is None


PARENT = """
import sys, time
from tokenmill.config import EngineConfig
from tokenmill.engine.messages import AddRequest, EngineReady
from tokenmill.core import SamplingParams
from tokenmill.engine.supervisor import Supervisor
def hear(event):
    if isinstance(event, EngineReady):
        if "busy" in sys.argv:
            params = SamplingParams(max_tokens=10**9)
            supervisor.send(AddRequest(request_id="x", prompt_token_ids=[93], params=params))
        print(supervisor.pid, flush=True)
supervisor = Supervisor(EngineConfig(model=sys.argv[1]), hear, factory="tests.api.engine_double:load")
supervisor.start()
time.sleep(60)
"""


@pytest.mark.parametrize("mood", ["idle", "busy"])
def test_a_killed_front_end_takes_its_engine_along(tmp_path, mood):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), mood], stdout=subprocess.PIPE, text=True)
    engine = int(parent.stdout.readline())
    assert alive(engine)
    parent.kill()
    parent.wait()
    assert wait_gone(engine)


def test_drain_finishes_what_was_accepted_and_then_ends(tmp_path):
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tokenmill.engine.process", "--fd", str(theirs.fileno())]
    command += ["--parent", str(os.getpid()), "--config", f'{{"model": "{tmp_path}"}}', "--factory", FACTORY]
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    theirs.close()
    channel = Channel(ours, FromEngine)
    params = SamplingParams(max_tokens=3)
    channel.send(AddRequest(request_id="a", prompt_token_ids=[SLOW], params=params))
    channel.send(Drain())
    tokens = []
    with pytest.raises(EOFError):
        while True:
            for message in channel.receive(wait=True):
                if isinstance(message, OutputBatch):
                    tokens += [token for delta in message.deltas for token in delta.token_ids]
    assert tokens == [100, 101, 102]
    assert process.wait(5) == 0


class TestChannel:
    def test_messages_arrive_whole_in_order_however_they_are_cut(self):
        left, right = socket.socketpair()
        sent = [
            AddRequest(request_id=str(i), prompt_token_ids=list(range(i)), params=SamplingParams()) for i in range(40)
        ]
        pieces = Channel(left, ToEngine)
        raw = b""
        for message in sent:
            body = pieces._encoder.encode(message)
            raw += len(body).to_bytes(4, "little") + body
        receiver = Channel(right, ToEngine)
        received = []
        for start in range(0, len(raw), 37):
            left.sendall(raw[start : start + 37])
            received += receiver.receive(wait=False)
        assert received == sent

    def test_nothing_there(self):
        _left, right = socket.socketpair()
        assert Channel(right, ToEngine).receive(wait=False) == []

    def test_the_other_end_is_gone(self):
        left, right = socket.socketpair()
        channel = Channel(right, ToEngine)
        Channel(left, FromEngine).send(AbortRequest("x"))
        left.close()
        assert channel.receive(wait=True) == [AbortRequest("x")]
        with pytest.raises(EOFError):
            channel.receive(wait=True)
        with pytest.raises(OSError):
            channel.send(AbortRequest("y"))

    def test_a_length_past_reason_is_an_end(self):
        left, right = socket.socketpair()
        left.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(EOFError):
            Channel(right, ToEngine).receive(wait=True)
