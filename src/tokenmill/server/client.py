"""The event loop's side of the engine process: submit requests, hand their tokens on, abort, watch its health.

    engine process --socket, a message a step--> EngineClient --> EngineStream --> Sink of each caller

Everything here but `_from_supervisor` runs on the event loop's thread. It knows nothing of HTTP and of text.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from ..config import EngineConfig
from ..engine.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineReady,
    EngineStats,
    OutputBatch,
    TokenDelta,
)
from ..engine.process import DEFAULT_FACTORY
from ..engine.supervisor import EngineChannel, EngineGone, Supervisor
from ..errors import EngineUnavailable, InvalidRequest, Overloaded, SetupError, TokenmillError

log = logging.getLogger("tokenmill")

COUNTERS = (  # of EngineStats; they never go down, also when the engine starts anew
    "num_steps",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "busy_seconds",
    "host_cpu_seconds",
)


class EngineState(enum.Enum):
    LOADING = "the engine is loading"
    READY = "ready"
    DOWN = "the engine died and is being restarted"
    CHANGED = "the model's files are not those that the server started with; put them back, or restart the server"
    DRAINING = "the server is shutting down"


class Sink(Protocol):
    """Who asked. Called on the event loop's thread; returns at once."""

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """What came for its requests together, mostly from one step of the engine."""
        ...

    def fail(self, error: TokenmillError) -> None:
        """Nothing more will come: the engine died, the server's drain time is over, or cancel() was called."""
        ...


class EngineStream:
    """One caller's requests in the engine; what it gives goes to `sink` at once, without a task to be woken for each
    token. Close it, always: that frees the engine."""

    __slots__ = ("_client", "_deltas", "_open", "_sink")  # touched for each token of each stream: few cache lines

    def __init__(self, client: EngineClient, adds: Iterable[AddRequest], sink: Sink):
        self._client = client
        self._sink = sink
        self._open = {add.request_id: set(range(add.params.n)) for add in adds}  # choices that have not finished
        self._deltas: list[TokenDelta] = []

    def stop_choice(self, abort: AbortRequest) -> None:
        """A stop string matched: the engine need not go on with this choice. Later deltas of it are dropped."""
        if abort.index is not None and abort.index in self._open.get(abort.request_id, ()):
            self._client.abort(abort)
            self._finished(abort.request_id, abort.index)

    def cancel(self, error: TokenmillError) -> None:
        """Abort what is unfinished; the sink is told `error`."""
        self.close()
        self.fail(error)

    def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        for request_id in list(self._open):
            self._client.abort(AbortRequest(request_id))
            for index in list(self._open.get(request_id, ())):
                self._finished(request_id, index)

    def _finished(self, request_id: str, index: int) -> None:
        choices = self._open[request_id]
        choices.discard(index)
        self._client.num_live -= 1
        if not choices:
            del self._open[request_id]
            self._client.streams.pop(request_id, None)

    def feed(self, delta: TokenDelta) -> bool:
        """Keep a delta until flush(). True if it is the first that waits for it."""
        if delta.index not in self._open.get(delta.request_id, ()):
            return False  # on its way when the choice was stopped
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._finished(delta.request_id, delta.index)
        return len(self._deltas) == 1

    def flush(self) -> None:
        deltas, self._deltas = self._deltas, []
        try:
            self._sink.deliver(deltas)
        except Exception:  # a bug met by one request is not another's
            log.exception("a request's tokens could not be turned into its answer")
            self.cancel(TokenmillError("the server failed on this request; its log says why"))

    def fail(self, error: TokenmillError) -> None:
        for request_id, choices in list(self._open.items()):
            for index in list(choices):
                self._finished(request_id, index)
        self._sink.fail(error)


class EngineClient:
    """One engine process, from the event loop. Make it, start() it inside the loop, stop() it at the end."""

    def __init__(self, config: EngineConfig, *, factory: str = DEFAULT_FACTORY):
        self.config = config
        self.state = EngineState.LOADING
        self.info: EngineReady | None = None
        self.stats = EngineStats()
        self.streams: dict[str, EngineStream] = {}  # by the engine's request id
        self.num_live = 0  # sequences accepted and not finished
        self.num_restarts = 0
        self.num_rejected = 0  # requests that found the queue full
        self.on_gone: Callable[[EngineGone], None] = lambda gone: None
        self._past = EngineStats()  # counters of engines that died
        self._supervisor = Supervisor(config, self._from_supervisor, factory=factory)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: list[Any] = []  # events from before the loop ran; with the lock
        self._lock = threading.Lock()
        self._first: asyncio.Future | None = None
        self._failure: str | None = None  # the engine's last words

    # ---- life

    def spawn(self) -> None:
        """Start the engine process. May be called before there is an event loop."""
        self._supervisor.start()

    def attach(self) -> None:
        """Take events on the running event loop from now on."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._first = self._loop.create_future()
            for event in self._early:
                self._loop.call_soon(self._handle, event)
            self._early.clear()

    async def wait_ready(self) -> EngineReady:
        """Until the first engine has loaded. Raises SetupError with its reason if it could not."""
        assert self._first is not None
        return await asyncio.shield(self._first)

    def drain(self) -> None:
        """Take nothing new; what runs may finish."""
        self.state = EngineState.DRAINING

    def fail_all(self, error: TokenmillError) -> None:
        for stream in set(self.streams.values()):
            stream.fail(error)

    def stop(self) -> None:
        self._supervisor.stop()

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    @property
    def capacity(self) -> int:
        """Sequences that may run and wait together: the engine's rule, kept here too, to tell a client at once."""
        return self.config.max_num_seqs + self.config.max_waiting

    # ---- requests

    def check_ready(self) -> None:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(self.state.value)

    def submit(self, adds: list[AddRequest], sink: Sink) -> EngineStream:
        """Queue validated requests, all or none. Raises Overloaded, EngineUnavailable, InvalidRequest (never fits)."""
        wanted = sum(add.params.n for add in adds)
        self.check_room(wanted)
        stream = EngineStream(self, adds, sink)
        self.num_live += wanted
        for add in adds:
            self.streams[add.request_id] = stream
            self._supervisor.send(add)
        return stream

    def check_room(self, wanted: int) -> None:
        """Raises what submit() would raise for so many sequences: ask before doing work for them."""
        self.check_ready()
        if wanted > self.capacity:
            raise InvalidRequest(f"{wanted} sequences in one request; this server takes {self.capacity}", param="n")
        if self.num_live + wanted > self.capacity:
            self.num_rejected += 1
            raise Overloaded(f"the queue is full: {self.config.max_waiting} sequences may wait", retry_after=1)

    def abort(self, message: AbortRequest) -> None:
        self._supervisor.send(message)

    # ---- events

    def _from_supervisor(self, event: Any) -> None:
        """On the supervisor's thread."""
        with self._lock, contextlib.suppress(RuntimeError):  # the loop is closed: the server is going away
            if self._loop is None:
                self._early.append(event)
            else:
                self._loop.call_soon_threadsafe(self._handle, event)

    def _read(self, engine: EngineChannel) -> None:
        """The engine sent something, or its end of the channel is closed."""
        try:
            messages = engine.channel.receive(wait=False)
        except EOFError:
            assert self._loop is not None
            self._loop.remove_reader(engine.channel.sock)
            engine.ended(self._failure)
            return
        for message in messages:
            self._handle(message)

    def _handle(self, event: Any) -> None:
        if isinstance(event, OutputBatch):
            if event.stats is not None:
                self.stats = self._with_past(event.stats)
            fed = []
            for delta in event.deltas:
                stream = self.streams.get(delta.request_id)
                if stream is not None and stream.feed(delta):
                    fed.append(stream)
            for stream in fed:
                stream.flush()
        elif isinstance(event, EngineReady):
            if self.info is not None and event.model_digest != self.info.model_digest:
                # Other weights under this server's tokenizer and name: wrong answers, and no one would see why.
                log.error(EngineState.CHANGED.value)
                if self.state is not EngineState.DRAINING:
                    self.state = EngineState.CHANGED
                return
            self.info = event
            if self.state is not EngineState.DRAINING:
                self.state = EngineState.READY
            if self._first is not None and not self._first.done():
                self._first.set_result(event)
            elif self.num_restarts:
                log.warning("the engine is ready again")
        elif isinstance(event, EngineChannel):
            assert self._loop is not None
            self._failure = None
            self._loop.add_reader(event.channel.sock, self._read, event)
        elif isinstance(event, EngineFailed):
            self._failure = event.message
        elif isinstance(event, EngineGone):
            self._gone(event)

    def _gone(self, event: EngineGone) -> None:
        if self.state is not EngineState.DRAINING:
            self.state = EngineState.DOWN
        self._past = EngineStats(**{name: getattr(self.stats, name) for name in COUNTERS})
        self.stats = msgspec.structs.replace(self._past)  # gauges at zero: nothing runs
        self.fail_all(EngineUnavailable(f"{event.message}; the request was lost"))
        if event.restart_in is None:
            if self._first is not None and not self._first.done():
                self._first.set_exception(SetupError(event.message))
        else:
            self.num_restarts += 1
            log.error("%s; starting it again in %.2g s", event.message, event.restart_in)
        self.on_gone(event)

    def _with_past(self, stats: EngineStats) -> EngineStats:
        if not self.num_restarts:
            return stats
        return msgspec.structs.replace(
            stats, **{name: getattr(stats, name) + getattr(self._past, name) for name in COUNTERS}
        )
