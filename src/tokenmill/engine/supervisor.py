"""Starts the engine process, hands on what it sends, and starts it again when it dies.

                 spawn                ready               died (any reason)
    STOPPED ------------> LOADING ------------> READY -----------------------+
                             ^ |                                              |
                             | | died before it was ever ready: EngineGone(restart_in=None), the end
                             +-+--------- after a bounded, growing pause <----+

Two threads: `engine-reader` spawns the process and hands its messages to `on_event` until it is ready, then the channel
itself, to be read where the messages are needed: one thread less to wake for each step. `engine-writer` sends, so that
a caller never waits for an engine that is deep in a step. The reader lives as long as the supervisor, which matters:
Linux kills a child with PR_SET_PDEATHSIG when the *thread* that spawned it ends.

It knows nothing of requests; whoever listens to `on_event` fails them when it hears EngineGone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..config import EngineConfig
from .channel import Channel
from .messages import EngineFailed, EngineReady, FromEngine
from .process import DEFAULT_FACTORY

FIRST_PAUSE = 0.25  # seconds before a restart; doubled each time
LONGEST_PAUSE = 30.0
HEALTHY_SECONDS = 60.0  # a life this long forgives the deaths before it


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine process ended and all its requests with it."""

    message: str  # one line, safe to show
    restart_in: float | None  # seconds; None: it never got ready and is not tried again


@dataclass(frozen=True, slots=True)
class EngineChannel:
    """The engine is ready: whoever gets this reads `channel` until EOFError, then calls ended() and reads no more."""

    channel: Channel
    ended: Callable[[str | None], None]  # with EngineFailed's message, if one came


class Supervisor:
    """Owns one engine process at a time. `on_event` is called on the reader thread, in order: messages, EngineChannel,
    EngineGone."""

    def __init__(self, config: EngineConfig, on_event: Callable[[Any], None], *, factory: str = DEFAULT_FACTORY):
        self.config = config
        self.on_event = on_event
        self.factory = factory
        self.process: subprocess.Popen | None = None
        self._channel: Channel | None = None
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._end: queue.SimpleQueue = queue.SimpleQueue()  # what ended() was called with
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # of `process`, against a stop while it is being spawned
        self._reader = threading.Thread(target=self._run, name="engine-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self.process
        return process.pid if process and process.poll() is None else None

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def send(self, message: Any) -> None:
        """Queue a message for the engine that lives now. Messages to one that died are dropped: EngineGone says so."""
        self._outbox.put((self._channel, message))

    def stop(self) -> None:
        """Kill the engine process (it has nothing to save) and wait for it. Idempotent."""
        self._stopping.set()
        with self._lock:
            if self.process is not None:
                self.process.kill()
        self._outbox.put(None)
        self._end.put(None)
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join(5.0)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        ever_ready = False
        while not self._stopping.is_set():
            started = time.monotonic()
            was_ready, reason = self._one_life()
            if self._stopping.is_set():
                return
            ever_ready = ever_ready or was_ready
            if not ever_ready:
                self.on_event(EngineGone(reason, None))
                return
            if time.monotonic() - started > HEALTHY_SECONDS:
                pause = FIRST_PAUSE
            self.on_event(EngineGone(reason, pause))
            self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _one_life(self) -> tuple[bool, str]:
        """Spawn, listen until the end. (whether it got ready, why it ended)."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                if self._stopping.is_set():
                    return False, "stopped"
                self.process = self._spawn(theirs.fileno())
            self._channel = channel = Channel(ours, FromEngine)
            was_ready, failure = False, None
            with contextlib.suppress(EOFError):
                while not was_ready:
                    for message in channel.receive(wait=True):
                        if isinstance(message, EngineFailed):
                            failure = message.message
                        else:
                            was_ready = was_ready or isinstance(message, EngineReady)
                            self.on_event(message)
            if was_ready:
                self.on_event(EngineChannel(channel, self._end.put))
                failure = self._end.get() or failure
            self._channel = None
        ended = self._how_it_ended()
        return was_ready, failure or ended

    def _spawn(self, fd: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "tokenmill.engine.process", "--fd", str(fd), "--parent", str(os.getpid())]
        command += ["--config", msgspec.json.encode(self.config).decode(), "--factory", self.factory]
        # Its own session: Ctrl-C in a terminal reaches the front end alone, which drains first.
        return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True)

    def _how_it_ended(self) -> str:
        assert self.process is not None
        try:
            code = self.process.wait(2.0)
        except subprocess.TimeoutExpired:  # it closed its socket but does not end
            self.process.kill()
            code = self.process.wait()
        if code >= 0:
            return f"the engine process ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process was killed by signal {-code}"

    def _write(self) -> None:
        while (item := self._outbox.get()) is not None:
            channel, message = item
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.send(message)
