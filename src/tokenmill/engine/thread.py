"""The engine in a thread of this process: any thread submits and aborts, one thread owns the engine and steps it.

EngineThread knows requests and who wants their deltas, nothing of text or of event loops. `deliver` is called on the
engine's thread, with a request's deltas of one step or with the error that refused it; it must return at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from ..core import FinishReason
from ..errors import EngineUnavailable, TokenmillError
from .messages import AbortRequest, AddRequest, EngineStats, TokenDelta
from .process import EngineLike

log = logging.getLogger("tokenmill.engine")

Deliver = Callable[[list[TokenDelta] | TokenmillError], object]

_open: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _close_all() -> None:
    for thread in list(_open):
        thread.close()


# Before atexit's turn: by then the interpreter has already ended the thread pool that the engine's steps run in.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


@dataclass(slots=True)
class _Live:
    deliver: Deliver
    unfinished: int  # choices


class EngineThread:
    """Starts with the first submit. close() ends it within a step; what is live then gets EngineUnavailable."""

    def __init__(self, engine: EngineLike):
        self._engine = engine
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # (AddRequest, Deliver), AbortRequest, or None: close
        self._live: dict[str, _Live] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._failure: str | None = None
        self._stats = engine.stats()
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raises EngineUnavailable in a forked process: threads do not survive a fork, so nothing would answer."""
        if os.getpid() != self._process:
            raise EngineUnavailable("the engine stayed in the process that forked this one; load a model here")

    def submit(self, request: AddRequest, deliver: Deliver) -> None:
        """Raises EngineUnavailable once closed or failed, and in a forked process."""
        self.check_process()  # before the lock, which may have been held at the fork
        with self._lock:
            if self._failure is not None or self._closed:
                raise EngineUnavailable(self._failure or "the engine was shut down")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tokenmill-engine", daemon=True)
                self._thread.start()
                _open.add(self)
            self._inbox.put((request, deliver))

    def abort(self, request: AbortRequest) -> None:
        """Its choices end with one last delta; ids that are not live are ignored."""
        self._inbox.put(request)

    @property
    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def close(self) -> None:
        """Idempotent; returns when the thread has ended."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            thread = self._thread
        self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._route(self._engine.step())
                self._stats = self._engine.stats()
            end = EngineUnavailable("the engine was shut down")
        except Exception as bug:
            log.exception("the engine failed")
            end = EngineUnavailable(f"the engine failed: {type(bug).__name__}: {bug}")
        with self._lock:
            self._failure = end.message
        while True:  # nothing submitted is left without an answer
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, tuple):
                self._send(message[1], end)
        for live in self._live.values():
            self._send(live.deliver, end)
        self._live.clear()

    def _take_messages(self) -> bool:
        """Everything that came in, waiting while there is nothing to do; False to close."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, AbortRequest):
                self._engine.abort(message)
                continue
            request, deliver = message
            try:
                self._engine.add(request)
            except TokenmillError as error:
                self._send(deliver, error)
            else:
                self._live[request.request_id] = _Live(deliver, request.params.n)

    def _route(self, deltas: list[TokenDelta]) -> None:
        by_request: dict[str, list[TokenDelta]] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        for request_id, own in by_request.items():
            live = self._live.get(request_id)
            if live is None:
                continue
            live.unfinished -= sum(delta.finish_reason is not None for delta in own)
            if live.unfinished <= 0:
                del self._live[request_id]
            if not self._send(live.deliver, own) and live.unfinished > 0:
                self._engine.abort(AbortRequest(request_id, None, FinishReason.ABORT))

    @staticmethod
    def _send(deliver: Deliver, what: list[TokenDelta] | TokenmillError) -> bool:
        """False where the receiver is gone: its event loop was closed."""
        try:
            deliver(what)
        except RuntimeError:
            return False
        return True
