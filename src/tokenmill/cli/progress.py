"""Downloads, and the packing of large models, on stderr: a bar on a terminal, a line now and then elsewhere.

Nothing is shown for what takes less than a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..weights.store import Progress

PATIENCE = 1.0  # seconds before anything is shown
EVERY = 10.0  # seconds between lines where there is no terminal


@contextmanager
def download_progress() -> Iterator[Progress]:
    """A callable for sources.resolve(progress=...)."""
    show = _Bar() if sys.stderr.isatty() else _Lines()
    try:
        yield show.update
    finally:
        show.close()


class _Bar:
    def __init__(self) -> None:
        self.started = time.monotonic()
        self.bar: Any = None
        self.tasks: dict[str, int] = {}

    def update(self, what: str, done: int, total: int | None) -> None:
        if self.bar is None:
            if time.monotonic() - self.started < PATIENCE:
                return
            self.bar = self._make()
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what, total=total)
        self.bar.update(self.tasks[what], completed=done, total=total)

    @staticmethod
    def _make():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                   TimeRemainingColumn())  # fmt: skip
        bar = Progress(*columns, console=Console(stderr=True))
        bar.start()
        return bar

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class _Lines:
    def __init__(self) -> None:
        self.next = time.monotonic() + PATIENCE

    def update(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now >= self.next:
            self.next = now + EVERY
            of = f" of {total / 1e6:.0f}" if total else ""
            print(f"{what}: {done / 1e6:.0f}{of} MB", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass
