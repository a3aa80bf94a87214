"""Writes GGUF files from plain values: small ones for tests, edited copies of real ones, split ones.

Independent of the reader under test except in edit_gguf and split_gguf, which take a file apart with it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.quant.formats import BLOCKS

NUMPY_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


@dataclass(frozen=True)
class Tensor:
    """Stored bytes of a tensor; shape as in numpy, (out_features, in_features)."""

    format: str
    shape: tuple[int, ...]
    data: Any  # bytes or a uint8 array

    @staticmethod
    def f32(array) -> Tensor:
        array = np.ascontiguousarray(array, np.float32)
        return Tensor("F32", array.shape, array.view(np.uint8).reshape(-1))

    @staticmethod
    def quantised(format: str, array, seed: int = 0) -> Tensor:
        """`array` in a format the gguf package can make; for the others random blocks of the same shape."""
        import gguf

        from .blocks import random_blocks

        array = np.ascontiguousarray(array, np.float32)
        try:
            data = gguf.quantize(array, gguf.GGMLQuantizationType[format]).view(np.uint8).reshape(-1)
        except NotImplementedError:
            data = random_blocks(format, array.size // BLOCKS[format].block_size, seed)
        return Tensor(format, array.shape, data)

    def decoded(self) -> np.ndarray:
        import gguf

        rows = np.frombuffer(bytes(self.data), np.uint8).reshape(*self.shape[:-1], -1)
        return gguf.dequantize(rows, gguf.GGMLQuantizationType[self.format]).reshape(self.shape)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and value. An int becomes uint32 where it fits, else int64; give a numpy scalar for another type."""
    if isinstance(item, np.generic):
        return struct.pack("<I", NUMPY_TYPES[item.dtype.str[1:]]) + item.tobytes()
    if isinstance(item, str | bytes):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item) if 0 <= item < 1 << 32 else struct.pack("<Iq", 11, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, np.ndarray):
        return struct.pack("<IIQ", 9, NUMPY_TYPES[item.dtype.str[1:]], item.size) + item.tobytes()
    parts = [value(x) for x in item]
    kind = parts[0][:4] if parts else struct.pack("<I", 8)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(parts)) + b"".join(p[4:] for p in parts)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, version: int = 3, alignment: int = 32
) -> Path:
    infos, offset = b"", 0
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        infos += string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        infos += struct.pack("<IQ", BLOCKS[tensor.format].ggml_type, offset)
        offset += -(-len(tensor.data) // alignment) * alignment
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(string(key) + value(item) for key, item in metadata.items()) + infos
    path = Path(path)
    unfinished = path.with_name(path.name + ".new")  # the tensors may be views of the very file that is replaced
    with open(unfinished, "wb") as f:
        f.write(header + b"\0" * (-len(header) % alignment))
        for tensor in tensors.values():
            f.write(bytes(tensor.data) + b"\0" * (-len(tensor.data) % alignment))
    unfinished.rename(path)
    return path


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, tensors) such that write_gguf makes the same model again."""
    from tokenmill.weights.gguf import GGUFFile

    file = GGUFFile(path)
    return dict(file.metadata), {name: Tensor(t.format, t.shape, t.data) for name, t in file.tensors.items()}


def edit_gguf(
    source: Path, target: Path, *, change: Mapping[str, Any] | None = None, remove: tuple[str, ...] = (), tensors=None
) -> Path:
    """A copy with metadata keys changed or removed; `tensors(dict) -> dict` may change those too."""
    metadata, stored = read_gguf(source)
    metadata = {key: item for key, item in (metadata | dict(change or {})).items() if key not in remove}
    return write_gguf(target, metadata, tensors(stored) if tensors else stored)


def split_gguf(source: Path, folder: Path, parts: int, stem: str = "model") -> list[Path]:
    """Split as llama.cpp's gguf-split does: the metadata in the first part, split.* keys in all."""
    metadata, stored = read_gguf(source)
    names = list(stored)
    paths = []
    for i in range(parts):
        mine = names[len(names) * i // parts : len(names) * (i + 1) // parts]
        keys = {
            "split.no": np.uint16(i),
            "split.count": np.uint16(parts),
            "split.tensors.count": np.int32(len(names)),
        }
        path = folder / f"{stem}-{i + 1:05d}-of-{parts:05d}.gguf"
        paths.append(write_gguf(path, (metadata if i == 0 else {}) | keys, {name: stored[name] for name in mine}))
    return paths
