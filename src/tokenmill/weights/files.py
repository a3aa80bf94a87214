"""Opening a model's file: a regular, readable, non-empty file of ours to map, or a ModelFileError that says what it is.

It knows nothing of what is inside. A mapped file must not be changed in place while it is served: replace it by
renaming a new one over it. `MappedFile.check_unchanged()` notices a change up to the moment the weights are packed.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ModelFileError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class MappedFile:
    """A file mapped read-only: `data` is the mmap, `size` its length in bytes."""

    def __init__(self, path: Path):
        self.path = path
        try:
            kind = stat.S_IFMT(os.stat(path).st_mode)
            if kind != stat.S_IFREG:
                raise ModelFileError(f"{path} is {KINDS.get(kind, 'not a file')}, not a model file")
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise ModelFileError(f"{path} is not a regular file")
                if found.st_size == 0:
                    raise ModelFileError(f"{path} is empty; download it again")
                self.data = mmap.mmap(fd, found.st_size, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
        except OSError as e:
            raise ModelFileError(f"{path} cannot be read: {e.strerror or e}") from None
        except ValueError as e:
            if isinstance(e, ModelFileError):
                raise
            raise ModelFileError(f"{path} changed while it was opened") from None
        self.size = found.st_size
        self.identity = self._identity(found)

    @staticmethod
    def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def release(self) -> None:
        """Let go of the memory that holds what has been read so far. Reading again brings it back."""
        self.data.madvise(mmap.MADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raise ModelFileError if the file at this path is not the one that was opened, as it was."""
        try:
            same = self._identity(os.stat(self.path)) == self.identity
        except OSError:
            same = False
        if not same:
            raise ModelFileError(f"{self.path} changed while it was being loaded; load it again")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. Shape is in numpy's order: (out_features, in_features)."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int  # from the file's start
    nbytes: int
    file: MappedFile

    @property
    def data(self) -> np.ndarray:
        """uint8 view of the mapped file."""
        return np.frombuffer(self.file.data, np.uint8, self.nbytes, self.offset)


def describe_content(head: bytes) -> str | None:
    """What a file that is not a model seems to be, from its first bytes."""
    text = head.lstrip()[:64].lower()
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: run `git lfs pull`"
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "a web page saved in the model's place: the download needs a login or another link"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive"
    if head.startswith(b"\x1f\x8b"):
        return "a gzip archive"
    if head.startswith(b"ggjt") or head.startswith(b"tjgg"):
        return "a GGML file from before GGUF: convert it"
    return None
