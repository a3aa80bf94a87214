"""The local cache of fetched models: one folder a model, complete or absent.

    $TOKENMILL_HOME or ~/.cache/tokenmill
      models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf
                                   source.json      where it came from, its size and digest
      downloads/                                    pieces on their way; never read as models

A model is built beside its place and renamed into it, so a full disk or a killed process leaves no half model.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import SourceError

RECORD = "source.json"
Progress = Callable[[str, int, int | None], None]  # (what, bytes done, bytes in all where known)


@dataclass(frozen=True, slots=True)
class Record:
    """What source.json holds."""

    ref: str  # the reference that fetches it again
    file: str
    size: int
    sha256: str
    licence: str = ""


def home() -> Path:
    chosen = os.environ.get("TOKENMILL_HOME")
    if chosen:
        return Path(os.path.expanduser(chosen))
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tokenmill"


def find(name: str) -> tuple[Path, Record] | None:
    """The model stored under `name`, if it is there whole: (its file, its record)."""
    folder = home() / "models" / name
    try:
        record = Record(**json.loads((folder / RECORD).read_text()))
        file = folder / record.file
        if Path(record.file).name == record.file and file.stat().st_size == record.size:
            return file, record
    except (OSError, ValueError, TypeError):
        pass
    return None


def list_all() -> list[tuple[str, Path, Record]]:
    """(name, file, record) of every stored model, by name."""
    try:
        names = sorted(p.name for p in (home() / "models").iterdir())
    except OSError:
        return []
    return [(name, *found) for name in names if (found := find(name))]


def remove(name: str) -> int:
    """Delete the model stored under `name`; the bytes freed."""
    found = find(name)
    if found is None:
        raise SourceError(f"no model {name!r} in {home() / 'models'}")
    folder = found[0].parent
    with disk_errors(folder):
        doomed = Path(tempfile.mkdtemp(prefix=".removing-", dir=folder.parent))
        os.rename(folder, doomed / "model")
        shutil.rmtree(doomed)
    return found[1].size


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what a full or read-only disk raises into a SourceError that says what to do."""
    try:
        yield
    except (TimeoutError, ConnectionError):
        raise
    except OSError as e:
        from urllib.error import URLError  # not above: a start that fetches nothing need not wait for it

        if isinstance(e, URLError):
            raise
        raise SourceError(
            f"cannot write to {path}: {e.strerror or e}; set TOKENMILL_HOME to a folder with room for the model"
        ) from None


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """The downloads folder, with `name` locked against other processes that fetch the same."""
    downloads = home() / "downloads"
    with disk_errors(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
        lock = open(downloads / f"{name}.lock", "w")  # noqa: SIM115 - closed below, outside disk_errors
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield downloads


def need_room(path: Path, size: int, what: str) -> None:
    free = shutil.disk_usage(path).free
    if free < size:
        raise SourceError(
            f"{what} needs {size / 1e6:.0f} MB, {path} has {free / 1e6:.0f} MB free; "
            "make room or set TOKENMILL_HOME to another disk"
        )


@contextmanager
def staged(name: str) -> Iterator[Path]:
    """A folder to build a model in; renamed to models/<name> when the body ends, removed when it raises.

    Hold locked(name) around it.
    """
    models = home() / "models"
    with disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        for stale in models.glob(f".incoming-{name}-*"):  # of a process that was killed: `name` is locked
            shutil.rmtree(stale)
        folder = Path(tempfile.mkdtemp(prefix=f".incoming-{name}-", dir=models))
    try:
        with disk_errors(models):
            yield folder
            os.chmod(folder, 0o755)
            if (models / name).exists():  # an older or damaged one
                shutil.rmtree(models / name)
            os.rename(folder, models / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_record(folder: Path, record: Record) -> None:
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n")
