"""EngineThread: deltas reach who asked, errors too, and nothing is left waiting when it ends."""

import os
import queue
import threading
import time

import pytest

from tokenmill.core import FinishReason, SamplingParams
from tokenmill.engine.messages import AbortRequest, AddRequest, EngineStats, TokenDelta
from tokenmill.engine.thread import EngineThread
from tokenmill.errors import EngineUnavailable, Overloaded


class CountingEngine:
    """Gives each choice the tokens 0, 1, 2 ... one a step; notes which thread calls it."""

    def __init__(self, fail_at=None):
        self.live: dict[tuple[str, int], int] = {}
        self.limits: dict[str, int] = {}
        self.ended: list[TokenDelta] = []
        self.threads = set()
        self.steps = 0
        self.fail_at = fail_at
        self.gate = threading.Event()
        self.gate.set()

    @property
    def has_work(self):
        return bool(self.live or self.ended)

    def add(self, request):
        self.threads.add(threading.get_ident())
        if len(self.limits) >= 8:
            raise Overloaded("the queue is full")
        self.limits[request.request_id] = request.params.max_tokens
        for i in range(request.params.n):
            self.live[request.request_id, i] = 0

    def abort(self, request):
        self.threads.add(threading.get_ident())
        for key in [k for k in self.live if k[0] == request.request_id and request.index in (None, k[1])]:
            del self.live[key]
            self.ended.append(TokenDelta(request_id=key[0], index=key[1], finish_reason=request.finish_reason))

    def step(self):
        self.gate.wait(10)
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.steps == self.fail_at:
            raise ZeroDivisionError("a bug")
        deltas, self.ended = self.ended, []
        for key, count in list(self.live.items()):
            done = count + 1 == self.limits[key[0]]
            self.live[key] = count + 1
            reason = FinishReason.LENGTH if done else None
            deltas.append(TokenDelta(request_id=key[0], index=key[1], token_ids=[count], finish_reason=reason))
            if done:
                del self.live[key]
        return deltas

    def stats(self):
        return EngineStats(num_running=len(self.live), num_steps=self.steps)


def ask(request_id, max_tokens=3, n=1):
    return AddRequest(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(max_tokens=max_tokens, n=n))


def collect(inbox, choices=1):
    deltas = []
    while choices:
        what = inbox.get(timeout=10)
        if isinstance(what, Exception):
            raise what
        deltas += what
        choices -= sum(d.finish_reason is not None for d in what)
    return deltas


@pytest.fixture
def engine():
    return CountingEngine()


@pytest.fixture
def thread(engine):
    thread = EngineThread(engine)
    yield thread
    engine.gate.set()
    thread.close()


def test_each_request_gets_its_own_deltas_in_order(thread, engine):
    inboxes = {name: queue.Queue() for name in "abc"}
    for name, inbox in inboxes.items():
        thread.submit(ask(name, n=2), inbox.put)
    for name, inbox in inboxes.items():
        deltas = collect(inbox, choices=2)
        assert {d.request_id for d in deltas} == {name}
        for index in (0, 1):
            assert [t for d in deltas if d.index == index for t in d.token_ids] == [0, 1, 2]
    assert engine.threads == {thread._thread.ident} != {threading.get_ident()}
    assert thread._live == {}


def test_abort_ends_with_a_last_delta(thread, engine):
    inbox = queue.Queue()
    thread.submit(ask("a", max_tokens=10**9), inbox.put)
    inbox.get(timeout=10)
    thread.abort(AbortRequest("a"))
    thread.abort(AbortRequest("unknown"))
    assert collect(inbox)[-1].finish_reason is FinishReason.ABORT
    assert thread._live == {} and not engine.live


def test_a_refusal_reaches_who_asked_and_nobody_else(thread, engine):
    for i in range(8):
        thread.submit(ask(f"fill-{i}", max_tokens=1), queue.Queue().put)
    refused, inbox = queue.Queue(), queue.Queue()
    thread.submit(ask("over"), refused.put)
    assert isinstance(refused.get(timeout=10), Overloaded)
    engine.limits.clear()
    thread.submit(ask("next"), inbox.put)
    assert len(collect(inbox)) == 3


def test_it_sleeps_when_idle(thread, engine):
    inbox = queue.Queue()
    thread.submit(ask("a"), inbox.put)
    collect(inbox)
    time.sleep(0.05)
    steps = engine.steps
    time.sleep(0.1)
    assert engine.steps == steps


def test_a_receiver_that_is_gone_is_aborted(thread, engine):
    def gone(what):
        raise RuntimeError("Event loop is closed")

    thread.submit(ask("a", max_tokens=10**9), gone)
    deadline = time.monotonic() + 10
    while engine.steps == 0 or engine.live:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_answers_everything_and_is_idempotent(thread, engine):
    engine.gate.clear()
    running, waiting = queue.Queue(), queue.Queue()
    thread.submit(ask("a", max_tokens=10**9), running.put)
    thread.submit(ask("b"), waiting.put)
    closer = threading.Thread(target=thread.close)
    closer.start()
    engine.gate.set()
    closer.join(10)
    thread.close()
    for inbox in (running, waiting):
        with pytest.raises(EngineUnavailable, match="shut down"):
            collect(inbox)
    with pytest.raises(EngineUnavailable):
        thread.submit(ask("c"), running.put)


def test_a_bug_in_the_engine_ends_every_request_with_an_error():
    thread = EngineThread(CountingEngine(fail_at=2))
    inbox = queue.Queue()
    thread.submit(ask("a", max_tokens=10**9), inbox.put)
    with pytest.raises(EngineUnavailable, match="ZeroDivisionError"):
        collect(inbox)
    with pytest.raises(EngineUnavailable):
        thread.submit(ask("b"), inbox.put)
    thread.close()


def test_closing_before_anything_ran(engine):
    EngineThread(engine).close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_that_it_has_no_engine(thread):
    """No thread survives a fork: a request would wait for ever, and so would close() for a lock held at the fork."""
    inbox = queue.Queue()
    thread.submit(ask("a"), inbox.put)
    collect(inbox)
    with thread._lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                thread.submit(ask("b"), inbox.put)
            except EngineUnavailable:
                thread.close()
                code = 0
            finally:
                os._exit(code)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    thread.submit(ask("c"), inbox.put)  # the parent goes on
    collect(inbox)
