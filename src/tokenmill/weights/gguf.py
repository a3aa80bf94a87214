"""Reads GGUF, versions 2 and 3, little-endian: metadata and where each tensor lies. Nothing in the file is trusted.

    | "GGUF" version | n_tensors n_kv | key values ... | tensor infos ... | padding | tensor data, aligned ... |
    0                8               24                                          data_start                 size

Every count and length is checked against the bytes that are left before anything is read or allocated for it, so the
work of opening is bounded by the file's size. Arrays are walked once (their bounds and types checked) and decoded only
when asked for: a vocabulary of 262k strings costs its walk. Numbers are Python integers and cannot overflow.

It does not know what the tensors mean (names.py) nor how to decode them (quant/formats.py). Source of the layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..quant.formats import BLOCKS, UNSUPPORTED_TYPES
from .files import MappedFile, TensorInfo, describe_content

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_NAME = 1024  # bytes of a key or tensor name
MAX_NESTING = 4  # arrays in arrays; no known model has any

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
FORMAT_OF = {f.ggml_type: f for f in BLOCKS.values()}

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


class Metadata(Mapping[str, Any]):
    """The key-values. Scalars and strings as Python values, arrays of numbers as numpy arrays, of strings as lists."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _LazyArray):
            value = self._values[key] = value.decode()
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(slots=True)
class _LazyArray:
    reader: _Reader
    key: str
    start: int  # of the array's element type

    def decode(self) -> Any:
        return self.reader.array(self.start, self.key, 0)[0]


class _Reader:
    """Reads values at positions of one file, checking bounds. Positions are bytes from the file's start."""

    def __init__(self, file: MappedFile):
        self.file = file
        self.data = file.data
        self.size = file.size

    def need(self, at: int, count: int, what: str) -> None:
        if count > self.size - at:
            raise ModelFileError(
                f"{self.file.path} is cut short or damaged: {what} needs {count} bytes at {at}, "
                f"the file has {self.size}"
            )

    def u32(self, at: int, what: str) -> int:
        self.need(at, 4, what)
        return _U32(self.data, at)[0]

    def u64(self, at: int, what: str) -> int:
        self.need(at, 8, what)
        return _U64(self.data, at)[0]

    def string(self, at: int, what: str, limit: int | None = None) -> tuple[str, int]:
        """(text, position after it)."""
        length = self.u64(at, what)
        if limit is not None and length > limit:
            raise ModelFileError(f"{self.file.path}: {what} is {length} bytes long, at most {limit} are allowed")
        self.need(at + 8, length, what)
        try:
            return self.data[at + 8 : at + 8 + length].decode(), at + 8 + length
        except UnicodeDecodeError:
            raise ModelFileError(f"{self.file.path}: {what} is not UTF-8") from None

    def scalar(self, kind: int, at: int, what: str) -> tuple[Any, int]:
        dtype = np.dtype(SCALARS[kind])
        self.need(at, dtype.itemsize, what)
        value = np.frombuffer(self.data, dtype, 1, at)[0].item()
        if kind == BOOL:
            if value > 1:
                raise ModelFileError(f"{self.file.path}: {what} is a boolean of value {value}")
            value = bool(value)
        return value, at + dtype.itemsize

    def value(self, kind: int, at: int, key: str) -> tuple[Any, int]:
        what = f"the value of {key!r}"
        if kind in SCALARS:
            return self.scalar(kind, at, what)
        if kind == STRING:
            return self.string(at, what)
        if kind == ARRAY:
            return _LazyArray(self, key, at), self.skip_array(at, key, 0)
        raise ModelFileError(f"{self.file.path}: {key!r} has unknown value type {kind}")

    def array_head(self, at: int, key: str, depth: int) -> tuple[int, int, int]:
        """(element type, count, position of the first element), both checked."""
        what = f"the array {key!r}"
        kind, count = self.u32(at, what), self.u64(at + 4, what)
        if depth >= MAX_NESTING:
            raise ModelFileError(f"{self.file.path}: {what} nests arrays more than {MAX_NESTING} deep")
        if kind in SCALARS:
            smallest = np.dtype(SCALARS[kind]).itemsize
        elif kind in (STRING, ARRAY):
            smallest = 8 if kind == STRING else 12
        else:
            raise ModelFileError(f"{self.file.path}: {what} has elements of unknown type {kind}")
        self.need(at + 12, count * smallest, f"{what} of {count} elements")
        return kind, count, at + 12

    def skip_array(self, at: int, key: str, depth: int) -> int:
        """Position after the array, every length in it checked."""
        kind, count, at = self.array_head(at, key, depth)
        if kind in SCALARS:
            return at + count * np.dtype(SCALARS[kind]).itemsize
        if kind == ARRAY:
            for _ in range(count):
                at = self.skip_array(at, key, depth + 1)
            return at
        data, last = self.data, self.size - 8
        for _ in range(count):  # half a million times for a large vocabulary: nothing but the walk
            if at > last:
                self.need(at, 8, f"a string of the array {key!r}")
            at += 8 + _U64(data, at)[0]
        self.need(at, 0, f"a string of the array {key!r}")
        return at

    def array(self, at: int, key: str, depth: int) -> tuple[Any, int]:
        """(decoded array, position after it); skip_array has checked it before."""
        kind, count, at = self.array_head(at, key, depth)
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            values = np.frombuffer(self.data, dtype, count, at).copy()
            return (values != 0) if kind == BOOL else values, at + count * dtype.itemsize
        items: list[Any] = []
        if kind == ARRAY:
            for _ in range(count):
                item, at = self.array(at, key, depth + 1)
                items.append(item)
            return items, at
        data = self.data
        try:
            for _ in range(count):
                start = at + 8
                at = start + _U64(data, at)[0]
                items.append(data[start:at].decode())
        except UnicodeDecodeError:
            raise ModelFileError(f"{self.file.path}: string {len(items)} of {key!r} is not UTF-8") from None
        return items, at


class GGUFFile:
    """One GGUF file, checked whole: `metadata`, `tensors` by name in the file's order, and where the header ends."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.file = MappedFile(self.path)
        self.metadata = Metadata()
        self.tensors: dict[str, TensorInfo] = {}
        reader = _Reader(self.file)
        try:
            num_tensors, num_values, at = self._read_head(reader)
            at = self._read_metadata(reader, num_values, at)
            self._read_tensors(reader, num_tensors, at)
        except RecursionError:  # pragma: no cover - MAX_NESTING comes first
            raise ModelFileError(f"{self.path}: nested too deep") from None

    def _read_head(self, reader: _Reader) -> tuple[int, int, int]:
        head = reader.data[:256]
        if not MAGIC.startswith(head[:4]):
            guess = describe_content(head)
            raise ModelFileError(f"{self.path} is not a GGUF file{f' but {guess}' if guess else ''}")
        reader.need(0, 24, "the header")
        version = reader.u32(4, "the version")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModel(f"{self.path} is a big-endian GGUF file; convert it to little-endian")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path} is GGUF version {version}; versions 2 and 3 are supported")
        num_tensors, num_values = reader.u64(8, "the tensor count"), reader.u64(16, "the key count")
        # The smallest key-value takes 13 bytes, the smallest tensor info 32.
        reader.need(24, 13 * num_values + 32 * num_tensors, f"a header of {num_values} keys and {num_tensors} tensors")
        return num_tensors, num_values, 24

    def _read_metadata(self, reader: _Reader, count: int, at: int) -> int:
        values = self.metadata._values
        for index in range(count):
            key, at = reader.string(at, f"key {index}", MAX_NAME)
            if not key:
                raise ModelFileError(f"{self.path}: key {index} has no name")
            if key in values:
                raise ModelFileError(f"{self.path}: the key {key!r} appears twice")
            kind = reader.u32(at, f"the type of {key!r}")
            values[key], at = reader.value(kind, at + 4, key)
            if key == "general.alignment" and kind != 4:
                raise ModelFileError(f"{self.path}: general.alignment has value type {kind}, not uint32")
        return at

    def _read_tensors(self, reader: _Reader, count: int, at: int) -> None:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
            raise ModelFileError(
                f"{self.path}: general.alignment is {alignment}; it must be a power of two up to {MAX_ALIGNMENT}"
            )
        infos = []
        for index in range(count):
            name, at = reader.string(at, f"the name of tensor {index}", MAX_NAME)
            if name in self.tensors or not name:
                raise ModelFileError(
                    f"{self.path}: tensor {index} {'repeats the name' if name else 'has no name'} {name!r}"
                )
            num_dims = reader.u32(at, f"tensor {name!r}")
            if not 1 <= num_dims <= MAX_DIMS:
                raise ModelFileError(
                    f"{self.path}: tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed"
                )
            reader.need(at + 4, 8 * num_dims + 12, f"tensor {name!r}")
            dims = struct.unpack_from(f"<{num_dims}Q", reader.data, at + 4)
            at += 4 + 8 * num_dims
            kind, offset = reader.u32(at, name), reader.u64(at + 4, name)
            at += 12
            self.tensors[name] = None  # type: ignore[assignment]  # placed below, once the data's start is known
            infos.append((name, dims, self._format(name, dims, kind), offset))
        self.header_end = at
        self.data_start = -(-at // alignment) * alignment
        placed = []
        for name, dims, format, offset in infos:
            if offset % alignment:
                raise ModelFileError(f"{self.path}: tensor {name!r} starts at {offset}, not a multiple of {alignment}")
            size = 1
            for dim in dims:
                size *= dim
            nbytes = format.nbytes(size)
            start = self.data_start + offset
            if start + nbytes > self.file.size:
                raise ModelFileError(
                    f"{self.path} is cut short or damaged: tensor {name!r} ({format.name} {dims[::-1]}) takes {nbytes} "
                    f"bytes from {start}, so the file must have {start + nbytes} bytes; it has {self.file.size}"
                )
            self.tensors[name] = TensorInfo(name, tuple(dims[::-1]), format.name, start, nbytes, self.file)
            placed.append((start, start + nbytes, name))
        placed.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(placed):
            if start < end:
                raise ModelFileError(f"{self.path}: tensors {first!r} and {second!r} overlap")

    def _format(self, name: str, dims: tuple[int, ...], kind: int):
        format = FORMAT_OF.get(kind)
        if format is None:
            known = UNSUPPORTED_TYPES.get(kind)
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} is of type {f'{known} ({kind})' if known else kind}, which is "
                f"not supported; these are: {', '.join(BLOCKS)}"
            )
        if 0 in dims:
            raise ModelFileError(f"{self.path}: tensor {name!r} has an empty dimension: {dims[::-1]}")
        if dims[0] % format.block_size:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} has rows of {dims[0]}, not a multiple of "
                f"{format.name}'s {format.block_size}"
            )
        return format


def open_gguf(path: Path) -> tuple[Metadata, dict[str, TensorInfo], list[MappedFile]]:
    """Metadata, tensors and files of a GGUF model: one file, the first part of a split one, or a folder of either.

    A split model's parts lie side by side as NAME-00001-of-00003.gguf; the keys split.* of each are checked.
    """
    if os.path.isdir(path):
        path = _first_in_folder(path)
    first = GGUFFile(path)
    number, count = _split_keys(first)
    if count is None:
        return first.metadata, first.tensors, [first.file]
    match = _SPLIT_NAME.fullmatch(path.name)
    stem = match["stem"] if match else "NAME"
    if number != 0:
        raise ModelFileError(
            f"{path} is part {number + 1} of {count}; give the first part, {stem}-00001-of-{count:05d}.gguf"
        )
    if count > 1 and path.name != f"{stem}-00001-of-{count:05d}.gguf":
        raise ModelFileError(
            f"{path} is part 1 of {count} but is not named so; the parts must be named {stem}-00001-of-{count:05d}.gguf"
        )
    tensors, files = dict(first.tensors), [first.file]
    for part in range(2, count + 1):
        part_path = path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf")
        if not os.path.exists(part_path):
            raise ModelFileError(f"{part_path} is missing: part {part} of {count} of this model")
        other = GGUFFile(part_path)
        total = first.metadata.get("split.tensors.count")
        if _split_keys(other) != (part - 1, count) or other.metadata.get("split.tensors.count", total) != total:
            raise ModelFileError(f"{part_path} is not part {part} of {count} of this model, by its split.* keys")
        for name, info in other.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{part_path} holds {name!r}, which {tensors[name].file.path.name} holds as well")
            tensors[name] = info
        files.append(other.file)
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelFileError(f"{path}: its parts hold {len(tensors)} tensors, split.tensors.count says {expected}")
    return first.metadata, tensors, files


def _split_keys(part: GGUFFile) -> tuple[int, int | None]:
    """(number from 0, count), or (0, None) for a file that is not split."""
    count, number = part.metadata.get("split.count"), part.metadata.get("split.no", 0)
    if count is None:
        return 0, None
    for key, value in (("split.count", count), ("split.no", number)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(f"{part.path}: {key} is {value!r}, not an integer")
    if count == 0:
        return 0, None
    if not 0 <= number < count:
        raise ModelFileError(f"{part.path}: split.no is {number} of {count}")
    return number, count


def _first_in_folder(folder: Path) -> Path:
    try:
        names = sorted(n for n in os.listdir(folder) if n.endswith(".gguf") and not n.startswith("mmproj"))
    except OSError as e:
        raise ModelFileError(f"{folder} cannot be read: {e.strerror}") from None
    firsts = [n for n in names if not (m := _SPLIT_NAME.fullmatch(n)) or int(m["no"]) == 1]
    if len(firsts) == 1:
        return folder / firsts[0]
    if not names:
        raise ModelFileError(f"{folder} holds neither config.json (a Hugging Face folder) nor a .gguf file")
    if not firsts:
        raise ModelFileError(f"{folder} holds parts of a model but not its first, ...-00001-of-....gguf")
    raise ModelFileError(f"{folder} holds several models; give one of {', '.join(firsts)}")
